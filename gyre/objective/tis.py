"""Truncated importance weights: the policy gradient, corrected for the behaviour policy and truncated above
only.

Source: truncated importance sampling, Ionides 2008 (doi 10.1198/106186008X320456), on the score-function
gradient. Invariant: the weight of a target never exceeds 1 + hi, and is unbiased where it is not truncated.
"""

from __future__ import annotations

from gyre.objective.terms import Targets, Terms, bounded_ratio


def tis(targets: Targets, clip: tuple[float, float]) -> Terms:
    """term_j = mean_t stop_gradient(min(r_t, 1 + hi)) A_j log pi_new(t); `clip`'s lower value has no meaning
    here."""
    ratio = bounded_ratio(targets.log_ratio.detach())
    weight = ratio.clamp(max=1.0 + clip[1])
    term = weight * targets.advantages[targets.samples] * targets.new_logprobs
    return Terms(targets.mean_per_sample(term), ratio, weight != ratio)
