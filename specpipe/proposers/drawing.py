"""From a proposer's logits to its next token: what every proposer with a law of its own does alike."""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from specpipe.distribution import argmax, in_vocabulary, probabilities
from specpipe.draft import Draft
from specpipe.errors import choice, number
from specpipe.proposers.copying import Copying, added
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

    def take(self, row: Row, logits: Tensor, words: Vocabulary) -> bool:
        """Draft one more token, if the logits are confident enough; whether to go on. logits: [D], of `words`.

        The draft also ends where the request bans all that the logits can say.
        """
        settings, behind = row.sequence.settings, [*row.given, *row.drafted]
        if settings.temperature == 0 and not settings.depends_on_prefix and not self.min_confidence:
            best = words.best(logits, self._copying.gains(row.sequence, behind))
            if best is not None:
                return row.add(best)
        drawn = self.draw == "sample" and settings.temperature > 0
        if drawn and not settings.depends_on_prefix and not self.min_confidence:
            own = words.raised(logits, self._copying.gains(row.sequence, behind))
            if own is not None:
                law = probabilities(own, settings)
                place = row.sequence.chance.propose(law)
                return row.add(words.token(place), words.spread(law))
        logits = self._copying.raised(words.placed(logits), row.sequence, behind)
        q = probabilities(logits, settings, row.sequence.prefix.then(behind))
        if q.sum().isnan() and not logits.isnan().any():
            return False
        if self.min_confidence > 0 or not drawn:
            best = int(argmax(q))
            if self.min_confidence > 0 and _confidence(q, logits, settings)[best] < self.min_confidence:
                return False
            if not drawn:
                return row.add(best)
        return row.add(row.sequence.chance.propose(q), q)


class Vocabulary:
    """Which of the target's ids a draft's logits are for.

    Args:
        size: V, ids of the target.
        ids: [D], see `in_vocabulary`.
    """

    def __init__(self, size: int, ids: Tensor | None = None) -> None:
        self.size, self.ids = size, ids

    def placed(self, logits: Tensor) -> Tensor:
        """[..., V] of [..., D]."""
        return in_vocabulary(logits, self.size, self.ids)

    def best(self, logits: Tensor, gains: Mapping[int, float]) -> int | None:
        """The id of the largest of [D] logits, of equals the lowest, after some ids have gained something.

        That is the best of `placed` ones, without making V of them. None where it takes those to see: the ids are not
        in order, or there are numbers among the logits that are none.
        """
        place = self._places
        if place is None or logits.device.type != "cpu":
            return None
        known = logits.detach().float().numpy()[: len(place)]
        first = int(known.argmax())
        best, token = float(known[first]), self._in_order[first]
        for each, gain in gains.items():
            if each not in place or place[each] >= len(known):
                continue
            raised = float(known[place[each]]) + gain
            if (raised, -each) > (best, -token):
                best, token = raised, each
        return token if math.isfinite(best) else None

    def raised(self, logits: Tensor, gains: Mapping[int, float]) -> Tensor | None:
        """[D] logits after some ids have gained something, where a law over them serves as one over all V ids.

        None where it does not: the ids are not in order or not all the target's, or they are all that it has.
        """
        place = self._places
        if place is None or self.ids is None or logits.device.type != "cpu" or logits.shape[-1] != len(place):
            return None
        return added(logits, {place[each]: gain for each, gain in gains.items() if each in place})

    def token(self, place: int) -> int:
        """The id at a place of [D]."""
        return self._in_order[place]

    def spread(self, law: Tensor) -> Tensor:
        """[V] of a law over [D]."""
        assert self.ids is not None
        return law.new_zeros(self.size).index_copy_(0, self.ids, law)

    @cached_property
    def _in_order(self) -> list[int] | range:
        """The ids, if they ascend; else empty."""
        if self.ids is None:
            return range(self.size)
        ids: list[int] = self.ids.tolist()
        inside = not ids or (ids[0] >= 0 and ids[-1] < self.size)
        return ids if inside and all(a < b for a, b in pairwise(ids)) else []

    @cached_property
    def _places(self) -> Mapping[int, int] | range | None:
        if not self._in_order:
            return None
        return range(self.size) if self.ids is None else {token: place for place, token in enumerate(self._in_order)}


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
