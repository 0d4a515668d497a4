"""From a proposer's logits to its next token: what every proposer with a law of its own does alike."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specpipe.distribution import argmax, probabilities
from specpipe.draft import Draft
from specpipe.errors import choice, number
from specpipe.proposers.copying import Copying
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings

DRAWS = ("sample", "argmax")


class Drawing:
    """How drafts are taken from a law, and where they end.

    Args:
        draw: `sample` draws each draft from the law under the request's settings and returns it as q; `argmax` takes
            its best token, which is a deterministic draft. At temperature 0 they are the same.
        min_confidence: a draft ends where the best token has less probability than this, before that token is drawn;
            0 never. At temperature 0 the probability without the request's settings counts. The law is kept, since the
            end depends on the prefix alone.
        copy_bias: see `Copying`.

    Raises:
        UserError: for a value out of range.
    """

    def __init__(self, draw: str, min_confidence: float, copy_bias: Items[float] = ()) -> None:
        self.draw = choice("draw", draw, DRAWS)
        self.min_confidence = number("min_confidence", min_confidence, 0, 1)
        self._copying = Copying(copy_bias)

    def take(self, row: Row, logits: Tensor) -> bool:
        """Draft one more token, if the logits are confident enough; whether to go on. logits: [V] of the target's ids.

        The draft also ends where the request bans all that the logits can say.
        """
        settings, behind = row.sequence.settings, [*row.given, *row.drafted]
        logits = self._copying.raised(logits, row.sequence, behind)
        q = probabilities(logits, settings, row.sequence.prefix.then(behind))
        if q.sum().isnan() and not logits.isnan().any():
            return False
        drawn = self.draw == "sample" and settings.temperature > 0
        if self.min_confidence > 0 or not drawn:
            best = int(argmax(q))
            if self.min_confidence > 0 and _confidence(q, logits, settings)[best] < self.min_confidence:
                return False
            if not drawn:
                return row.add(best)
        return row.add(row.sequence.chance.propose(q), q)


def _confidence(q: Tensor, logits: Tensor, settings: GenerationSettings) -> Tensor:
    """[V] the law under the request's settings, or without them where those leave one token."""
    return q if settings.temperature > 0 else logits.float().softmax(-1)


@dataclass
class Row:
    """A request while tokens are drafted for it.

    `given` stands behind the committed tokens, guessed by others; `drafted` are the tokens taken so far, and `laws` the
    q [V] of each if they were drawn.
    """

    sequence: Sequence
    given: list[int]
    drafted: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)

    def add(self, token: int, q: Tensor | None = None) -> bool:
        """Take a token, with its q [V] if it was drawn; whether to go on: nothing is worth guessing behind a stop."""
        self.drafted.append(token)
        self.laws += [] if q is None else [q]
        return token not in self.sequence.stop_ids


def joined(rows: Items[Row], vocabulary: int) -> Draft:
    """What was drafted for the rows, over `vocabulary` ids."""
    return Draft.joined([(row.drafted, torch.stack(row.laws) if row.laws else None) for row in rows], vocabulary)
