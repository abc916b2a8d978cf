"""GRPO: token-level ratios with the pessimistic clip, averaged over a sample's targets.

Source: DeepSeekMath, arXiv 2402.03300, without its KL term.
Invariant: a clipped target contributes no gradient; its neighbours still do.
"""

from __future__ import annotations

from gyre.objective.terms import Targets, Terms, bounded_ratio, pessimistic


def grpo(targets: Targets, clip: tuple[float, float]) -> Terms:
    """term_j = mean_t min(r_t A_j, clip(r_t, 1 - lo, 1 + hi) A_j)."""
    ratio = bounded_ratio(targets.log_ratio)
    term, clipped = pessimistic(ratio, targets.advantages[targets.samples], clip)
    return Terms(targets.mean_per_sample(term), ratio, clipped)
