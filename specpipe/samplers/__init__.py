"""Acceptance rules: one file each. See `Sampler` for what one must do."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from specpipe.chance import Chance
from specpipe.distribution import Rows


class Sampler(Protocol):
    """Decides how many drafts stand and what follows them. Pure: probabilities and chance in, decision out.

    A rule may also have `accept_on_device`, see `Rejection`: the same decision without waiting for the device.

    lossless: whether the emitted law is the target's. A rule that cannot judge drafts without q also names, as
    `without_q`, the rule that judges those in its place.
    """

    lossless: bool

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        """Judge one request's drafts.

        Args:
            x: the k drafted tokens.
            p: the target's k + 1 laws; `p[i]` is [V], at the place of `x[i]`, `p[k]` behind the last draft.
            q: [k, V] the laws x was drawn from, or None if q is one-hot at each x.
            chance: `passes` and `draw` make every random decision.

        Returns:
            (n, y): the first n drafts are accepted and y follows them.
        """
        ...
