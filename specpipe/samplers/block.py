"""Block verification (arXiv 2403.10444): the drafts are judged together, and never fewer accepted than token by token.

With the running ratio w clipped at every place, the block stands up to the last place whose own coin passes:

    w_0 = 1,  w_i = min(1, w_{i-1} p_i(x_i) / q_i(x_i))
    R_i(y) = (w_i p_{i+1}(y) - q_{i+1}(y))+,   A_i = sum_y R_i(y)
    h_i = A_i / (A_i + 1 - w_i) for 1 <= i < k (1 if w_i = 1),   h_k = w_k
    N = max {i : u_i < h_i}, 0 if none;   the next token ~ R_N / A_N, or p_{k+1} if N = k
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specpipe.chance import Chance
from specpipe.distribution import Rows
from specpipe.samplers.rejection import Rejection, draft_probability


class Block:
    """The last place that passes. Where q is one-hot or unknown it is the token-level rule, and that is what runs."""

    lossless = True
    without_q = "rejection"

    def __init__(self) -> None:
        self._token_rule = Rejection()

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        """See `Sampler.accept`."""
        if q is None:
            return self._token_rule.accept(x, p, None, chance)
        log_w = running_log_ratios(x, p, q)
        for i in range(len(x), 0, -1):
            if stands(i, log_w[i], p, q, chance):
                break
        else:
            i = 0
        return i, chance.draw(p[i] if i == len(x) else excess(p[i], q[i], log_w[i]))


def running_log_ratios(x: list[int], p: Rows, q: Tensor) -> list[float]:
    """log w_0 .. log w_k. Raises ContractError for a draft that its own q says cannot have been drawn."""
    log_w = [0.0]
    for i, token in enumerate(x):
        p_x = p[i][token].item()
        log_p = math.log(p_x) if p_x > 0 else -math.inf
        log_w.append(min(0.0, log_w[-1] + log_p - math.log(draft_probability(q, i, token))))
    return log_w


def stands(i: int, log_w: float, p: Rows, q: Tensor, chance: Chance) -> bool:
    """Whether the first i >= 1 drafts stand, by the coin of place i alone."""
    if log_w == 0:
        return True
    if i == len(q):
        return chance.passes(math.exp(log_w), 1.0)
    mass = excess(p[i], q[i], log_w, or_p=False).sum(dtype=torch.float64).item()  # A_i
    return chance.passes(mass, mass - math.expm1(log_w))


def excess(p: Tensor, q: Tensor, log_w: float, or_p: bool = True) -> Tensor:
    """(w p - q)+, [V], not normalised; p where rounding leaves nothing to draw from."""
    rest = (p * math.exp(log_w) - q).clamp_(min=0)
    return rest if not or_p or rest.sum() > 0 else p
