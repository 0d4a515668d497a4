"""The token-level rule (arXiv 2211.17192, 2302.01318): accept with probability min(1, p/q), else draw from (p - q)+.

The emitted law is exactly p, whatever q is, as long as each draft was drawn from its q.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specpipe.chance import Chance
from specpipe.distribution import Rows
from specpipe.errors import ContractError


class Rejection:
    """Token by token; the first rejection ends the block."""

    lossless = True

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        """See `Sampler.accept`. Raises ContractError for a draft that its own q says cannot have been drawn."""
        for i, token in enumerate(x):
            q_x = 1.0 if q is None else draft_probability(q, i, token)
            if not chance.passes(p[i][token].item(), q_x):
                return i, chance.draw(residual(p[i], token if q is None else q[i]))  # correction
        return len(x), chance.draw(p[len(x)])  # bonus

    def accept_on_device(self, x: Tensor, p: Tensor, q: Tensor | None, u: Tensor, v: Tensor) -> Tensor:
        """The same decision without waiting for the device in between.

        Args:
            x: [k] drafts; p: [k + 1, V]; q: [k, V] or None; u: [k] and v: [] uniforms on [0, 1), float64.

        Returns:
            [2] float64: accepted count, next token; -1 in place of the count if a draft has no q (ContractError).
        """
        places = torch.arange(len(x), device=p.device)
        q_x = torch.ones_like(u) if q is None else q[places, x].double()
        n = (u * q_x < p[places, x].double()).long().cumprod(0).sum()
        rest = p[n]
        if len(x):
            last = n.clamp(max=len(x) - 1)
            taken = torch.zeros_like(rest).scatter_(0, x[last, None], torch.inf) if q is None else q[last]
            left = (rest - taken).clamp(min=0)
            rest = torch.where((n < len(x)) & (left.sum() > 0), left, rest)
        cdf = rest.cumsum(0, dtype=torch.float64)
        y = torch.searchsorted(cdf, v * cdf[-1], right=True)
        return torch.stack([torch.where((q_x > 0).all(), n, -1).double(), y.double()])


def draft_probability(q: Tensor, i: int, token: int) -> float:
    """q_i(x_i). Raises ContractError if it says that the token cannot have been drawn."""
    q_x = q[i, token].item()
    if not q_x > 0:
        raise ContractError(f"token {token} was proposed although its q is {q_x}")
    return q_x


def residual(p: Tensor, q: Tensor | int) -> Tensor:
    """What p holds and q does not: (p - q)+, not normalised, [V]. An int stands for the one-hot q at that token.

    Where rounding leaves nothing (a rejection that had probability 0 in exact arithmetic) the law is p itself.
    """
    if isinstance(q, int):
        rest = p.clone()
        rest[q] = 0.0
    else:
        rest = (p - q).clamp_(min=0)
    return rest if rest.sum() > 0 else p
