"""GSPO: one importance ratio for a sample, the geometric mean over its targets.

Source: Group Sequence Policy Optimization, arXiv 2507.18071, equations 5 to 7.
Invariant: a sample is clipped as a whole or not at all.
"""

from __future__ import annotations

import torch

from gyre.objective.terms import Targets, Terms, bounded_ratio, pessimistic


def gspo(targets: Targets, clip: tuple[float, float]) -> Terms:
    """r_j = exp(mean_t(log pi_new - log pi_behaviour)); term_j = min(r_j A_j, clip(r_j, 1 - lo, 1 + hi)
    A_j)."""
    ratio = bounded_ratio(targets.mean_per_sample(targets.log_ratio))
    term, clipped = pessimistic(ratio, targets.advantages, clip)
    return Terms(torch.where(targets.counts > 0, term, 0.0), ratio, clipped, sequence_level=True)
