"""From turns to micro-steps: tree, targets, path selection, advantages, weights, packing.

Owns every decision between a recorded execution and its training input. Pure: no torch, no clock, no files;
the same code runs in the processor and in `gyre replay`.
Invariant: every sampled token is trained at most once, and sampled = trained + dropped, with one reason a
token.
"""
