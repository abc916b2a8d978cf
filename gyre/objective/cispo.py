"""CISPO: the clipped ratio is a constant weight of log pi, so no target loses its gradient.

Source: MiniMax-M1, arXiv 2506.13585.
Invariant: the gradient of a target is bounded by (1 + hi) |A| times that of its log-probability, and never
vanishes.
"""

from __future__ import annotations

from gyre.objective.terms import Targets, Terms, bounded_ratio


def cispo(targets: Targets, clip: tuple[float, float]) -> Terms:
    """term_j = mean_t stop_gradient(clip(r_t, 1 - lo, 1 + hi)) A_j log pi_new(t)."""
    low, high = clip
    ratio = bounded_ratio(targets.log_ratio.detach())
    weight = ratio.clamp(1.0 - low, 1.0 + high)
    term = weight * targets.advantages[targets.samples] * targets.new_logprobs
    return Terms(targets.mean_per_sample(term), ratio, weight != ratio)
