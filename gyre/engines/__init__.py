"""Rollout engines: the client of SGLang's HTTP API, the versioned weight push, and a small reference engine.

Nothing else in gyre speaks an engine's HTTP API. Importing this package imports neither torch nor transformers.
"""
