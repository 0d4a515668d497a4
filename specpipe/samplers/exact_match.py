"""Exact match: draw the target's own token at each place, accept the draft while it is the same.

The folk description of speculative decoding, and what many engines do. Lossless, since what is emitted is always the
target's sample; accepts sum p q where the token-level rule accepts sum min(p, q).
"""

from __future__ import annotations

from torch import Tensor

from specpipe.chance import Chance
from specpipe.distribution import Rows


class ExactMatch:
    """Needs no q."""

    lossless = True

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        """See `Sampler.accept`."""
        for i, token in enumerate(x):
            y = chance.draw(p[i])
            if y != token:
                return i, y
        return len(x), chance.draw(p[len(x)])
