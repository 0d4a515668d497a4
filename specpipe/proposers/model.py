"""A causal LM drafts: its own cache, its own loop, one pass per drafted token.

What is common to every model that drafts by its own; where the model comes from is the subclasses' matter.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
from torch import Tensor

from specpipe.distribution import in_vocabulary, probabilities
from specpipe.draft import Draft
from specpipe.errors import choice, number
from specpipe.sequence import Sequence
from specpipe.verifier.reader import Reader

DRAWS = ("sample", "argmax")


class ModelProposer:
    """Drafts with a model that `bind` of a subclass hands to `_use`.

    Args:
        draw: `sample` draws each draft from the model's law under the request's settings and returns it as q; `argmax`
            takes its best token, which is a deterministic draft. At temperature 0 they are the same.
        min_confidence: a draft ends where the model's best token has less probability than this, before that token is
            drawn; 0 never. The law is kept, since the end depends on the prefix alone.
    """

    def __init__(self, *, draw: str = "sample", min_confidence: float = 0.0) -> None:
        self.draw = choice("draw", draw, DRAWS)
        self.min_confidence = number("min_confidence", min_confidence, 0, 1)
        self._warned = False

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        rows = [b for b, sequence in enumerate(sequences) if self._room(sequence) > 0]
        limits = [min(lengths[b], self._room(sequences[b])) for b in rows]
        laws: list[list[Tensor]] = [[] for _ in sequences]
        drafts: list[list[int]] = [[] for _ in sequences]
        if any(limits):
            self._draft([sequences[b] for b in rows], limits, [drafts[b] for b in rows], [laws[b] for b in rows])
        draft = Draft.of(drafts)
        if not any(laws):
            return draft
        probs = torch.zeros(*draft.tokens.shape, self._size, dtype=next(law for law in laws if law)[0].dtype)
        for b, row in enumerate(laws):
            for i, q in enumerate(row):
                probs[b, i] = q
        return Draft(draft.tokens, draft.lengths, probs)

    def _use(self, model: Any, size: int, context: int | None) -> None:
        """Draft with `model` for a target of `size` ids; `context` is how many positions the model has."""
        self._reader, self._size, self._context = Reader(model), size, context

    def _draft(
        self, sequences: list[Sequence], limits: list[int], drafts: list[list[int]], laws: list[list[Tensor]]
    ) -> None:
        """Fill `drafts`, and `laws` where tokens are drawn, up to `limits`."""
        going = set(range(len(sequences)))
        logits: Any = [rows[-1] for rows in self._reader.read(sequences, Draft.of([[] for _ in sequences]))]
        while True:
            for b in sorted(going):
                if len(drafts[b]) == limits[b] or not self._next(sequences[b], logits[b], drafts[b], laws[b]):
                    going.discard(b)
            going = {b for b in going if len(drafts[b]) < limits[b]}
            if not going:
                return
            logits = self._reader.extend([drafts[b][-1] if b in going else None for b in range(len(sequences))])

    def _next(self, sequence: Sequence, logits: Tensor, draft: list[int], laws: list[Tensor]) -> bool:
        """Draft one more token, if the model is confident enough. logits: [D] of the model."""
        settings = sequence.settings
        q = probabilities(in_vocabulary(logits, self._size), settings, sequence.prefix.then(draft))
        best = int(q.argmax())
        if q[best] < self.min_confidence:
            return False
        if self.draw == "argmax" or settings.temperature == 0:
            draft.append(best)
        else:
            draft.append(sequence.chance.propose(q))
            laws.append(q)
        return draft[-1] not in sequence.stop_ids  # nothing is worth guessing behind a stop

    def _room(self, sequence: Sequence) -> int:
        """How many tokens the model can draft behind the sequence inside its own context."""
        if self._context is None:
            return sys.maxsize
        room = self._context - len(sequence.tokens) + 1
        if room <= 0 and not self._warned:
            self._warned = True
            what = f"the draft's context of {self._context} positions is full; decoding goes on without drafts"
            warnings.warn(what, stacklevel=2)
        return room
