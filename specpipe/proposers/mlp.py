"""Trained heads on the target's last hidden state draft: MLP heads (arXiv 2404.19124) or Medusa's (2401.10774).

One step of the target leaves the state that its newest token was drawn from; the heads go on from there, each a few
small matrices, and never read the prompt. `python -m train` makes them for a target; those of others are read too.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specpipe.draft import Draft
from specpipe.errors import UserError
from specpipe.paths import from_start
from specpipe.proposers.bound_heads import REMEDY, DraftingHeads, heads_in
from specpipe.proposers.compiled_heads import CompiledHeads
from specpipe.proposers.drawing import Drawing, Row, Vocabulary, joined
from specpipe.proposers.translation import Mirror
from specpipe.sequence import Sequence
from specpipe.verifier.reader import Reader
from specpipe.verifier.targets import Target

SHIPPED = Path(__file__).with_name("smollm2_mlp")


class HeadsProposer:
    """Heads draft for the target that they were trained for, at most as many tokens a step as there are heads.

    In a pipeline nothing is drafted until the target has read the prompt: the heads start from its states. For requests
    that no verifier reads the target is run for them, which takes as long as a plain step.

    Args:
        path: folder of heads, trained here or in a format of `specpipe.formats`; None: those that ship, for the default
            target.
        draw, min_confidence, copy_bias: see `Drawing`.

    Raises:
        UserError: for a value out of range and a folder that cannot be used.
    """

    keeps_nothing = True

    def __init__(
        self,
        *,
        path: str | None = None,
        draw: str = "sample",
        min_confidence: float = 0.0,
        copy_bias: Items[float] = (),
    ) -> None:
        if path is not None and not isinstance(path, (str, Path)):
            raise UserError(f"{path!r} is not the path of a folder.", key="path")
        self.path = SHIPPED if path is None else from_start(path)
        self._drawing = Drawing(draw, min_confidence, copy_bias)
        if not self.path.is_dir():
            raise UserError(f"there are no trained heads {str(self.path)!r}; {REMEDY}.", key="path")
        self._loaded = heads_in(self.path)
        self.heads: DraftingHeads = self._loaded

    def bind(self, target: Target) -> None:
        """Get the heads ready for a target.

        Raises:
            UserError: if they are for another vocabulary or another size of states.
        """
        self._loaded.bind(target)
        self.heads = self._loaded
        self._size = target.vocabulary
        self._words = Vocabulary(self._size, self.heads.ids)
        self._states: Callable[[list[Sequence]], list[Tensor | None]] = _OwnStates(target.model)

    def attach(self, verifier: Any) -> None:
        """Go on from the states that the verifier's `reader` keeps, if it has one; compiled, if the target is."""
        reader = getattr(verifier, "reader", None)
        if isinstance(reader, Reader):
            self._states = lambda sequences: [reader.state(sequence) for sequence in sequences]
            if getattr(verifier, "engine", None) == "compiled" and CompiledHeads.fits(self._loaded):
                self.heads = CompiledHeads(self._loaded)

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        return self.extend(sequences, [[] for _ in sequences], lengths)

    def extend(self, sequences: list[Sequence], drafts: list[list[int]], lengths: list[int]) -> Draft:
        """Up to lengths[b] tokens behind drafts[b], which others guessed: the first heads are told those as their own.

        So there are at most as many in all as there are heads; and none behind a stop id.
        """
        rows = [
            _Row(sequence, given, end=min(len(given) + k, self.heads.heads))
            for sequence, given, k in zip(sequences, drafts, lengths, strict=True)
        ]
        asked = [row for row in rows if len(row.given) < row.end and row.sequence.stop_ids.isdisjoint(row.given)]
        if asked:
            states = self._states([row.sequence for row in asked])
            self._draft([(row, s) for row, s in zip(asked, states, strict=True) if s is not None])
        return joined(rows, self._size)

    def _draft(self, going: list[tuple[_Row, Tensor]]) -> None:
        """Fill the rows, each given with its state [H], up to their ends: one pass of each head for all that go on."""
        for i in range(self.heads.heads):
            if not going:
                return
            carries = torch.stack([carry for _, carry in going])
            newest = torch.tensor([row.behind[i] for row, _ in going], device=carries.device)
            carries, features = self.heads.step(i, carries, newest)
            self._guess([row for row, _ in going], features, i)
            going = [(row, carry) for (row, _), carry in zip(going, carries, strict=True) if i + 1 < row.end]

    def _guess(self, rows: list[_Row], features: Tensor, i: int) -> None:
        """Draft with head i for the rows that have no token there yet. features: [R, H]."""
        open_ = [b for b, row in enumerate(rows) if i >= len(row.given)]
        if open_:
            logits = self.heads.logits(i, features[open_])
            for b, row_logits in zip(open_, logits, strict=True):
                if not self._drawing.take(rows[b], row_logits, self._words):
                    rows[b].end = 0


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
