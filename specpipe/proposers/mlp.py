"""Trained heads on the target's last hidden state draft: MLP heads (arXiv 2404.19124) or Medusa's (2401.10774).

One step of the target leaves the state that its newest token was drawn from; the heads go on from there, each a few
small matrices, and never read the prompt. `python -m train` makes them, for one target.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from specpipe.distribution import in_vocabulary
from specpipe.draft import Draft
from specpipe.errors import UserError
from specpipe.paths import from_start
from specpipe.proposers.artifact import load
from specpipe.proposers.counts import vocabulary_hash
from specpipe.proposers.drawing import Drawing, Row, joined
from specpipe.proposers.heads import KINDS, heads_of
from specpipe.proposers.translation import Mirror
from specpipe.sequence import Sequence
from specpipe.verifier.linear import packed
from specpipe.verifier.reader import Reader
from specpipe.verifier.targets import Target

SHIPPED = Path(__file__).with_name("smollm2_mlp")
REMEDY = "`python -m train student=mlp target=...` trains some"


class HeadsProposer:
    """Heads draft for the target that they were trained for, at most as many tokens a step as there are heads.

    In a pipeline nothing is drafted until the target has read the prompt: the heads start from its states. For requests
    that no verifier reads the target is run for them, which takes as long as a plain step.

    Args:
        path: folder of trained heads; None are the shipped ones, which are for the default target.
        draw, min_confidence: see `Drawing`.

    Raises:
        UserError: for a value out of range and a folder that cannot be used.
    """

    keeps_nothing = True

    def __init__(self, *, path: str | None = None, draw: str = "sample", min_confidence: float = 0.0) -> None:
        if path is not None and not isinstance(path, (str, Path)):
            raise UserError(f"{path!r} is not the path of a folder.", key="path")
        self.path = SHIPPED if path is None else from_start(path)
        self._drawing = Drawing(draw, min_confidence)
        if not self.path.is_dir():
            raise UserError(f"there are no trained heads {str(self.path)!r}; {REMEDY}.", key="path")
        self._card, weights, self._ids = load(self.path, KINDS)
        self._heads = heads_of(self._card, weights)

    def bind(self, target: Target) -> None:
        """Take the target's embedding, and of its head the rows that the heads can say.

        Raises:
            UserError: if the heads were trained for another vocabulary or another size of states.
        """
        head = target.head_weight
        self._refuse_other(target, head.shape[1])
        self._size, self._embedding = target.vocabulary, target.embedding_weight
        self._ids = self._ids.to(head.device)
        self._wide = torch.promote_types(head.dtype, torch.float32)  # in float32 the small matrices take less time
        self._heads.to(head.device, self._wide)
        self._narrow, self._head = head.dtype, _head(head[self._ids])
        self._states: Callable[[list[Sequence]], list[Tensor | None]] = _OwnStates(target.model)

    def attach(self, verifier: Any) -> None:
        """Go on from the states that the verifier's `reader` keeps, if it has one."""
        reader = getattr(verifier, "reader", None)
        if isinstance(reader, Reader):
            self._states = lambda sequences: [reader.state(sequence) for sequence in sequences]

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        return self.extend(sequences, [[] for _ in sequences], lengths)

    def extend(self, sequences: list[Sequence], drafts: list[list[int]], lengths: list[int]) -> Draft:
        """Up to lengths[b] tokens behind drafts[b], which others guessed: the first heads are told those as their own.

        So there are at most as many in all as there are heads; and none behind a stop id.
        """
        rows = [
            _Row(sequence, given, end=min(len(given) + k, self._heads.heads))
            for sequence, given, k in zip(sequences, drafts, lengths, strict=True)
        ]
        asked = [row for row in rows if len(row.given) < row.end and row.sequence.stop_ids.isdisjoint(row.given)]
        if asked:
            states = self._states([row.sequence for row in asked])
            self._draft([(row, s.to(self._wide)) for row, s in zip(asked, states, strict=True) if s is not None])
        return joined(rows, self._size)

    def _draft(self, going: list[tuple[_Row, Tensor]]) -> None:
        """Fill the rows, each given with its state [H], up to their ends: one pass of each head for all that go on."""
        for i in range(self._heads.heads):
            if not going:
                return
            newest = torch.tensor([row.behind[i] for row, _ in going], device=self._embedding.device)
            carries = torch.stack([carry for _, carry in going])
            carries, features = self._heads.step(i, carries, self._embedding[newest].to(self._wide))
            self._guess([row for row, _ in going], features, i)
            going = [(row, carry) for (row, _), carry in zip(going, carries, strict=True) if i + 1 < row.end]

    def _guess(self, rows: list[_Row], features: Tensor, i: int) -> None:
        """Draft with head i for the rows that have no token there yet. features: [R, H]."""
        open_ = [b for b, row in enumerate(rows) if i >= len(row.given)]
        if open_:
            logits = in_vocabulary(self._head(features[open_].to(self._narrow)), self._size, self._ids)
            for b, row_logits in zip(open_, logits, strict=True):
                if not self._drawing.take(rows[b], row_logits):
                    rows[b].end = 0

    def _refuse_other(self, target: Target, hidden: int) -> None:
        """Raise UserError unless the heads were trained for such a target."""
        known = f"the heads in {self.path.name} were trained for {self._card.target}"
        same = vocabulary_hash(target.tokenizer) == self._card.vocabulary
        if not same or self._ids[-1] >= target.vocabulary:
            raise UserError(f"{known}, and {target.name} has another vocabulary; {REMEDY} for it.", key="path")
        sizes = {hidden, target.embedding_weight.shape[1]} if self._heads.sees_drafts else {hidden}
        if other := sizes - {self._card.hidden}:
            what = f"{known}, with a hidden size of {self._card.hidden}, and {target.name} has {other.pop()}"
            raise UserError(f"{what}; {REMEDY} for it.", key="path")


@dataclass
class _Row(Row):
    """A request while heads draft for it; `end` is the first head that is not asked."""

    end: int = 0

    @property
    def behind(self) -> list[int]:
        """The tokens behind the state: the newest committed one, and all guesses so far."""
        return [self.sequence.tokens[-1], *self.given, *self.drafted]


class _OwnStates:
    """The states of requests that no verifier reads, from a cache of its own.

    A mirror of each request is one token behind it while it is read: what is kept are states at last tokens.

    Args:
        model: the target's.
    """

    def __init__(self, model: Any) -> None:
        self._reader = Reader(model)
        self._mirrors: WeakKeyDictionary[Sequence, Mirror] = WeakKeyDictionary()

    def __call__(self, sequences: list[Sequence]) -> list[Tensor | None]:
        """For each the state [H] that its newest token was drawn from; None where that is all there is."""
        mirrors: list[Any] = [self._mirrors.setdefault(sequence, Mirror(sequence)) for sequence in sequences]
        for mirror, sequence in zip(mirrors, sequences, strict=True):
            mirror.tokens = sequence.tokens[:-1]
        reading = [mirror for mirror in mirrors if mirror.tokens]
        if reading:
            self._reader.read(reading, Draft.of([[] for _ in reading]))
        for mirror, sequence in zip(mirrors, sequences, strict=True):
            mirror.tokens = sequence.tokens
        return [self._reader.state(mirror) for mirror in mirrors]


def _head(rows: Tensor) -> nn.Module:
    """Features [R, H] to logits [R, D], for rows [D, H] of the target's head."""
    linear = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(rows, requires_grad=False)
    return packed(linear)
