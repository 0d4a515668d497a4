"""A table of counted n-grams drafts: no network at all, and by arXiv 2211.17192 even bigrams help.

The shipped table holds bigrams of the default target's own output. One for another target is made of its texts with
`specpipe.proposers.counts`:

    counts = fit(texts, order=2, size=target.vocabulary)
    save(counts, Origin(target.name, vocabulary_hash(target.tokenizer), source="..."), path)

For the outputs of finished runs benchmarks/count_ngrams.py does this.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from specpipe.draft import Draft
from specpipe.errors import UserError, integer
from specpipe.paths import from_start
from specpipe.proposers.counts import LONGEST, Smoothed, load, vocabulary_hash
from specpipe.proposers.drawing import Drawing, Row, Vocabulary, joined
from specpipe.sequence import Sequence

SHIPPED = Path(__file__).with_name("smollm2_bigram.safetensors")
CONTEXTS = 100_000  # whose best token is remembered


class CountsProposer:
    """Drafts from the smoothed law of counted n-grams (`Smoothed`).

    Args:
        path: of a table; None is the shipped one, which is for targets with the default target's vocabulary.
        order: 1 unigrams, 2 bigrams, 3 trigrams, each with the shorter ones; None is the table's own.
        draw, min_confidence: see `Drawing`.

    Raises:
        UserError: for a value out of range and a table that cannot be used.
    """

    keeps_nothing = q_by_prefix = True

    def __init__(
        self, *, path: str | None = None, order: int | None = None, draw: str = "sample", min_confidence: float = 0.0
    ) -> None:
        if path is not None and not isinstance(path, (str, Path)):
            raise UserError(f"{path!r} is not the path of a file.", key="path")
        self.path = SHIPPED if path is None else from_start(path)
        self._drawing = Drawing(draw, min_confidence)
        self._counts, self._origin = load(self.path)
        self.order = self._counts.order if order is None else integer("order", order, 1, LONGEST)
        if self.order > self._counts.order:
            raise UserError(f"{order} is above the table's {self._counts.order}.", key="order")

    def bind(self, target: Any) -> None:
        """Make the law over the target's ids. Raises UserError if its vocabulary is not the table's."""
        self._refuse_other_vocabulary(target)
        self._size = target.vocabulary
        self._words = Vocabulary(self._size)
        self._law = Smoothed(self._counts, self.order, self._size)
        self._best = lru_cache(CONTEXTS)(self._look_up_best)

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        return self.extend(sequences, [[] for _ in sequences], lengths)

    def extend(self, sequences: list[Sequence], drafts: list[list[int]], lengths: list[int]) -> Draft:
        """Up to lengths[b] tokens behind drafts[b], which others proposed for sequences[b]: as if those were committed.

        Nothing is drafted behind a stop id.
        """
        rows = [Row(sequence, draft) for sequence, draft in zip(sequences, drafts, strict=True)]
        for row, k in zip(rows, lengths, strict=True):
            going = row.sequence.stop_ids.isdisjoint(row.given)
            while going and len(row.drafted) < k:
                going = self._next(row)
        return joined(rows, self._size)

    def _next(self, row: Row) -> bool:
        """Draft one more token, if the table is sure enough; whether to go on."""
        settings = row.sequence.settings
        context = self._law.context([*row.sequence.tokens[-LONGEST:], *row.given, *row.drafted])
        if settings.temperature == 0 and not settings.depends_on_prefix:
            best, confidence = self._best(context)
            return confidence >= self._drawing.min_confidence and row.add(best)
        return self._drawing.take(row, self._law.law(context).float().log(), self._words)

    def _look_up_best(self, context: tuple[int, ...]) -> tuple[int, float]:
        law = self._law.law(context)
        best = int(law.argmax())  # the first of equals
        return best, law[best].item()

    def _refuse_other_vocabulary(self, target: Any) -> None:
        same = vocabulary_hash(target.tokenizer) == self._origin.vocabulary
        if same and self._counts.largest < target.vocabulary:
            return
        if self.path == SHIPPED:
            what = f"the shipped table is for {self._origin.target}, and {target.name} has another vocabulary"
            raise UserError(f"{what}; {__name__} says how to make one from its own texts.", key="path")
        what = f"{self.path.name} was counted for {self._origin.target}; {target.name} has another vocabulary."
        raise UserError(what, key="path")
