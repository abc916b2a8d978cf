"""Real SGLang: its environment, its command line, and the program that serves inside it.

Nothing here imports sglang but what runs in SGLang's own interpreter (`inside/`, `cpu/`).
"""
