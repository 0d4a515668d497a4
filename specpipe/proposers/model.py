"""A causal LM drafts: its own cache, its own loop, one pass per drafted token.

What is common to every model that drafts by its own; where the model comes from is the subclasses' matter, and whose
tokens it reads that of `translation.py`.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specpipe.distribution import in_vocabulary, probabilities
from specpipe.draft import Draft
from specpipe.errors import choice, number
from specpipe.proposers.translation import SameTokens, Translation
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings
from specpipe.verifier.reader import Reader

DRAWS = ("sample", "argmax")


class ModelProposer:
    """Drafts with a model that `bind` of a subclass hands to `_use`.

    Args:
        draw: `sample` draws each draft from the model's law under the request's settings and returns it as q; `argmax`
            takes its best token, which is a deterministic draft. At temperature 0 they are the same.
        min_confidence: a draft ends where the model's best token has less probability than this, before that token is
            drawn; 0 never. At temperature 0 the model's own probability counts. The law is kept, since the end depends
            on the prefix alone.
    """

    def __init__(self, *, draw: str = "sample", min_confidence: float = 0.0) -> None:
        self.draw = choice("draw", draw, DRAWS)
        self.min_confidence = number("min_confidence", min_confidence, 0, 1)
        self._warned = False

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        return self.extend(sequences, [[] for _ in sequences], lengths)

    def extend(self, sequences: list[Sequence], drafts: list[list[int]], lengths: list[int]) -> Draft:
        """Propose up to `lengths[b]` tokens behind `drafts[b]`, which somebody else guessed and nobody has committed.

        The model reads committed tokens and `drafts` in one pass, and forgets the latter as it does its own guesses.

        Returns:
            The new tokens only, and their q, under settings that see `drafts` in the prefix; none behind a stop id.
        """
        rows = [self._row(*each) for each in zip(sequences, drafts, lengths, strict=True)]
        if drafting := [row for row in rows if row.limit > 0]:
            self._draft(drafting)
        return Draft.joined([(row.drafted, torch.stack(row.laws) if row.laws else None) for row in rows], self._size)

    def _use(self, model: Any, size: int, context: int | None, words: SameTokens | Translation | None = None) -> None:
        """Draft with `model` for a target of `size` ids.

        Args:
            model: what drafts.
            size: ids of the target.
            context: how many positions the model has.
            words: how the target's tokens become the model's; None: they are the same.
        """
        self._reader, self._size, self._context = Reader(model), size, context
        self._words = words or SameTokens()
        self._held: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # what the reader's rows may hold

    def _row(self, sequence: Sequence, given: list[int], length: int) -> _Row:
        if length == 0 or not sequence.stop_ids.isdisjoint(given):
            return _Row(sequence, given)
        text, behind = self._words.follow(sequence, given)
        limit = min(length, self._room(text) - len(behind)) if text.tokens else 0
        return _Row(sequence, given, text, behind, limit)

    def _draft(self, rows: list[_Row]) -> None:
        """Fill the rows up to their limits."""
        for row in rows:
            self._forget(row)
        texts: list[Any] = [row.text for row in rows]
        logits: Any = [read[-1] for read in self._reader.read(texts, Draft.of([row.behind for row in rows]))]
        going = set(range(len(rows)))
        while True:
            going = {b for b in going if self._next(rows[b], logits[b]) and len(rows[b].drafted) < rows[b].limit}
            if not going:
                return
            own = [self._words.own(row.drafted[-1]) if b in going else None for b, row in enumerate(rows)]
            for row, token in zip(rows, own, strict=True):
                if token is not None:
                    self._held[row.text].append(token)
            logits = self._reader.extend(own)

    def _forget(self, row: _Row) -> None:
        """Keep of the model's cache only what still stands in the text; it may have been idle since its last guess."""
        tokens = row.text.tokens
        self._reader.cut(row.text, _agreement(self._held.get(row.text, []), tokens))
        self._held[row.text] = [*tokens, *row.behind]

    def _next(self, row: _Row, logits: Tensor) -> bool:
        """Draft one more token, if the model is confident enough; whether to go on. logits: [D] of the model."""
        settings, draft = row.sequence.settings, row.drafted
        prefix = row.sequence.prefix.then([*row.given, *draft])
        logits = in_vocabulary(logits, self._size, self._words.ids)
        q = probabilities(logits, settings, prefix)
        best = int(q.argmax())
        if q[best].isnan() and not logits.isnan().any():
            return False  # the request bans all that the model can say
        if self.min_confidence > 0 and self._confidence(q, logits, settings)[best] < self.min_confidence:
            return False
        if self.draw == "argmax" or settings.temperature == 0:
            draft.append(best)
        else:
            draft.append(row.sequence.chance.propose(q))
            row.laws.append(q)
        return draft[-1] not in row.sequence.stop_ids  # nothing is worth guessing behind a stop

    def _confidence(self, q: Tensor, logits: Tensor, settings: GenerationSettings) -> Tensor:
        """[V] the model's law: under the request's settings, or its own where those leave one token."""
        return q if settings.temperature > 0 else logits.float().softmax(-1)

    def _room(self, text: Any) -> int:
        """How many tokens the model can draft behind a text in its own tokens, inside its own context."""
        if self._context is None:
            return sys.maxsize
        room = self._context - len(text.tokens) + 1
        if room <= 0 and not self._warned:
            self._warned = True
            what = f"the draft's context of {self._context} positions is full; decoding goes on without drafts"
            warnings.warn(what, stacklevel=2)
        return room


@dataclass
class _Row:
    """A request while tokens are drafted for it.

    `given` stands behind the committed tokens, in the target's ids; `text` and `behind` are what the model reads, in
    its own; `limit` is how many tokens it may draft, and `drafted` and `laws` are what it did, in the target's ids.
    """

    sequence: Sequence
    given: list[int]
    text: Any = None
    behind: list[int] = field(default_factory=list)
    limit: int = 0
    drafted: list[int] = field(default_factory=list)
    laws: list[Tensor] = field(default_factory=list)


def _agreement(a: list[int], b: list[int]) -> int:
    """Length of the longest common beginning."""
    n = min(len(a), len(b))
    return n if a[:n] == b[:n] else next(i for i in range(n) if a[i] != b[i])
