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

import torch
from torch import Tensor

from specpipe.distribution import probabilities
from specpipe.draft import Draft
from specpipe.errors import UserError, choice, integer, number
from specpipe.paths import from_start
from specpipe.proposers.counts import LONGEST, Smoothed, load, vocabulary_hash
from specpipe.proposers.model import DRAWS
from specpipe.sequence import Sequence

SHIPPED = Path(__file__).with_name("smollm2_bigram.safetensors")
CONTEXTS = 100_000  # whose best token is remembered


class CountsProposer:
    """Drafts from the smoothed law of counted n-grams (`Smoothed`).

    Args:
        path: of a table; None is the shipped one, which is for targets with the default target's vocabulary.
        order: 1 unigrams, 2 bigrams, 3 trigrams, each with the shorter ones; None is the table's own.
        draw: `sample` draws each draft from the law under the request's settings and returns it as q; `argmax` takes
            its best token, which is a deterministic draft. At temperature 0 they are the same.
        min_confidence: a draft ends where the best token has less probability than this, before that token is drawn;
            under the request's settings, and at temperature 0 by the table itself. 0 never.

    Raises:
        UserError: for a value out of range and a table that cannot be used.
    """

    def __init__(
        self, *, path: str | None = None, order: int | None = None, draw: str = "sample", min_confidence: float = 0.0
    ) -> None:
        if path is not None and not isinstance(path, (str, Path)):
            raise UserError(f"{path!r} is not the path of a file.", key="path")
        self.path = SHIPPED if path is None else from_start(path)
        self.draw = choice("draw", draw, DRAWS)
        self.min_confidence = number("min_confidence", min_confidence, 0, 1)
        self._counts, self._origin = load(self.path)
        self.order = self._counts.order if order is None else integer("order", order, 1, LONGEST)
        if self.order > self._counts.order:
            raise UserError(f"{order} is above the table's {self._counts.order}.", key="order")

    def bind(self, target: Any) -> None:
        """Make the law over the target's ids. Raises UserError if its vocabulary is not the table's."""
        self._refuse_other_vocabulary(target)
        self._size = target.vocabulary
        self._law = Smoothed(self._counts, self.order, self._size)
        self._best = lru_cache(CONTEXTS)(self._look_up_best)

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        return self.extend(sequences, [[] for _ in sequences], lengths)

    def extend(self, sequences: list[Sequence], drafts: list[list[int]], lengths: list[int]) -> Draft:
        """Up to lengths[b] tokens behind drafts[b], which others proposed for sequences[b]: as if those were committed.

        Nothing is drafted behind a stop id.
        """
        rows = zip(sequences, drafts, lengths, strict=True)
        return Draft.joined([self._continue(sequence, draft, k) for sequence, draft, k in rows], self._size)

    def _continue(self, sequence: Sequence, draft: list[int], k: int) -> tuple[list[int], Tensor | None]:
        """The new tokens, and their q [k, V] if they were drawn."""
        tokens: list[int] = []
        laws: list[Tensor] = []
        while len(tokens) < k and sequence.stop_ids.isdisjoint(tokens[-1:] or draft):
            drafted = self._next(sequence, [*draft, *tokens])
            if drafted is None:
                break
            tokens.append(drafted[0])
            laws += [] if drafted[1] is None else [drafted[1]]
        return tokens, torch.stack(laws) if laws else None

    def _next(self, sequence: Sequence, draft: list[int]) -> tuple[int, Tensor | None] | None:
        """A token behind the draft, and q [V] if it was drawn from one; None where the table is not sure enough."""
        settings = sequence.settings
        context = self._law.context([*sequence.tokens[-LONGEST:], *draft])
        if settings.temperature == 0 and not settings.depends_on_prefix:
            best, confidence = self._best(context)
            return None if confidence < self.min_confidence else (best, None)
        law = self._law.law(context)
        q = probabilities(law.float().log(), settings, sequence.prefix.then(draft))
        drawn = self.draw == "sample" and settings.temperature > 0
        if self.min_confidence > 0 or not drawn:
            best = int(q.argmax())
            if (q if settings.temperature > 0 else law)[best] < self.min_confidence:
                return None
            if not drawn:
                return best, None
        return sequence.chance.propose(q), q

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
