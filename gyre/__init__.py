"""gyre: online reinforcement learning of coding agents through unmodified harnesses, on a Slurm cluster."""

__version__ = "0.1.0"
