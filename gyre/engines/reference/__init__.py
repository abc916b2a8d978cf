"""A small engine for CPUs with SGLang's routes: `python -m gyre.engines.reference --model DIR ...`.

It keeps SGLang's JSON shapes and rules (begin/end around weight updates, abort by prefix with partial output, version
spans), and refuses with 400 what would kill SGLang. Only `__main__` starts anything.
"""
