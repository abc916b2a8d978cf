"""Emulation: gyre's own processes, with engines and trainers that take time instead of computing."""
