"""A causal LM drafts: its own cache, its own loop, one pass per drafted token.

What is common to every model that drafts by its own; where the model comes from is the subclasses' matter, and whose
tokens it reads that of `translation.py`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor

from specpipe.draft import Draft
from specpipe.proposers.drawing import Drawing, Row, Vocabulary, joined
from specpipe.proposers.translation import SameTokens, Translation
from specpipe.sequence import Sequence
from specpipe.verifier.compiled import compiled_like
from specpipe.verifier.reader import Reader


class ModelProposer:
    """Drafts with a model that `bind` of a subclass hands to `_use`.

    Args:
        draw, min_confidence, copy_bias: see `Drawing`.
    """

    keeps_nothing = q_by_prefix = True
    _reader: Reader

    def __init__(self, *, draw: str = "sample", min_confidence: float = 0.0, copy_bias: Items[float] = ()) -> None:
        self._drawing = Drawing(draw, min_confidence, copy_bias)
        self._warned = False

    def attach(self, verifier: Any) -> None:
        """Run compiled if the target does."""
        self._reader = Reader(compiled_like(verifier, self._reader.model))

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
        return joined(rows, self._size)

    def forget(self) -> None:
        """Let go of the model's cache."""
        self._reader.forget()
        self._held.clear()

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
        self._known = Vocabulary(size, self._words.ids)
        self._held: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()  # what the reader's rows may hold

    def _row(self, sequence: Sequence, given: list[int], length: int) -> _Row:
        if length == 0 or not sequence.stop_ids.isdisjoint(given):
            return _Row(sequence, given)
        text, behind = self._words.follow(sequence, given)
        limit = min(length, self._room(text) - len(behind)) if text.tokens else 0
        return _Row(sequence, given, text=text, behind=behind, limit=limit)

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
        """Draft one more token, unless the draft ends before it; whether to go on. logits: [D] of the model."""
        return self._drawing.take(row, logits, self._known)

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
class _Row(Row):
    """A request while a model drafts for it.

    `text` and `behind` are what the model reads of the committed tokens and of those `given`, in its own ids; `limit`
    is how many tokens it may draft.
    """

    text: Any = None
    behind: list[int] = field(default_factory=list)
    limit: int = 0


def _agreement(a: list[int], b: list[int]) -> int:
    """Length of the longest common beginning."""
    n = min(len(a), len(b))
    return n if a[:n] == b[:n] else next(i for i in range(n) if a[i] != b[i])
