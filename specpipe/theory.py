"""The papers' formulas, as pure functions of numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence


def expected_accepted(log_p: Sequence[float], log_q: Sequence[float]) -> dict[str, float]:
    """E[N] of one step under each acceptance rule, given its drafts: no coin is thrown, so rules compare without noise.

    With r_i = p_i(x_i) / q_i(x_i) on the drafted path: sum_i prod_{j<=i} min(1, r_j) token by token (arXiv 2211.17192),
    sum_i w_i with w_i = min(1, w_{i-1} r_i) for block verification (arXiv 2403.10444), sum_i prod_{j<=i} p_j(x_j) for
    exact match. Averaged over the steps of a trace they are what each rule would accept from those steps' starts.

    Args:
        log_p: natural log of the target's probability of each scored draft, at its own place; -inf for 0.
        log_q: the same of the law it was drawn from; 0 for a deterministic draft.

    Returns:
        By rule, between 0 and the number of drafts; block is never below rejection.
    """
    token = block = match = 0.0  # log of the running products
    total = {"rejection": 0.0, "block": 0.0, "exact_match": 0.0}
    for p, q in zip(log_p, log_q, strict=True):
        token, block, match = token + min(0.0, p - q), min(0.0, block + p - q), match + p
        total["rejection"] += math.exp(token)
        total["block"] += math.exp(block)
        total["exact_match"] += math.exp(match)
    return total
