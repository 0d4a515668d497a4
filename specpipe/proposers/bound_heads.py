"""Heads that can be bound to a target: from its states and tokens to logits over ids, whoever trained the heads."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from specpipe.errors import UserError
from specpipe.formats import load_heads
from specpipe.formats.checkpoint import CONFIG
from specpipe.proposers.artifact import CARD, load
from specpipe.proposers.counts import vocabulary_hash
from specpipe.proposers.heads import KINDS, heads_of
from specpipe.verifier.linear import packed
from specpipe.verifier.targets import Target

REMEDY = "`python -m train student=mlp target=...` trains some"


class DraftingHeads(Protocol):
    """What drafts, `heads` tokens at most."""

    heads: int

    @property
    def ids(self) -> Tensor | None:
        """[D] int64, the target's id of each logit; None: they are those of all its ids."""
        ...

    def step(self, i: int, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Head i = 0 .. n-1: from its carry and the tokens before its guesses to the next carry and its features.

        Args:
            i: in this order.
            carry: [R, H] the target's states for head 0, else what head i - 1 gave.
            tokens: [R] the newest committed tokens for head 0, else the i-th drafts.
        """
        ...

    def logits(self, i: int, features: Tensor) -> Tensor:
        """[R, D] of head i, whose features [R, .] these are."""
        ...


class BoundHeads(DraftingHeads, Protocol):
    """Heads that draft once they are bound to a target."""

    def bind(self, target: Target) -> None:
        """Get ready for a target. Raises UserError if the heads do not fit it."""
        ...


class TrainedHeads:
    """Of `python -m train`: they read through the target's embedding and speak through rows of its head.

    `module` are they, and once they are bound `embedding` [V, H] and `head`, from features to logits, are what they
    take of the target.

    Args:
        folder: as `artifact.save` writes it.

    Raises:
        UserError: if it is another one, or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self.card, weights, self.ids = load(folder, KINDS)
        self.module = heads_of(self.card, weights)
        self.heads = self.module.heads

    def bind(self, target: Target) -> None:
        self.refuse_other(target)
        head = target.head_weight
        self.embedding, self.ids = target.embedding_weight, self.ids.to(head.device)
        self._narrow, self._wide = head.dtype, _wide(head.dtype)
        self.module.to(head.device, self._wide)
        self.head = _head(head[self.ids])

    def step(self, i: int, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.module.step(i, carry.to(self._wide), self.embedding[tokens].to(self._wide))

    def logits(self, i: int, features: Tensor) -> Tensor:
        found: Tensor = self.head(features.to(self._narrow))
        return found

    def refuse_other(self, target: Target) -> None:
        """Raise UserError unless the heads were trained for such a target."""
        known = f"the heads in {self.name} were trained for {self.card.target}"
        same = vocabulary_hash(target.tokenizer) == self.card.vocabulary
        if not same or self.ids[-1] >= target.vocabulary:
            raise UserError(f"{known}, and {target.name} has another vocabulary; {REMEDY} for it.", key="path")
        sizes = {target.head_weight.shape[1]}
        if self.module.sees_drafts:
            sizes.add(target.embedding_weight.shape[1])
        if other := sizes - {self.card.hidden}:
            what = f"{known}, with a hidden size of {self.card.hidden}, and {target.name} has {other.pop()}"
            raise UserError(f"{what}; {REMEDY} for it.", key="path")


class ImportedHeads:
    """Made elsewhere: Medusa heads or an MLP speculator, with tables of the vocabulary of their own.

    Their files do not say which tokens their ids are: of other tokens than the target's few would be accepted, and the
    text would be the target's all the same.

    Args:
        folder: in one of the formats of `specpipe.formats`.

    Raises:
        UserError: if it is another one, or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.name = folder.name
        self._checkpoint = load_heads(folder)
        self.heads, self.ids = self._checkpoint.heads, self._checkpoint.ids

    def bind(self, target: Target) -> None:
        head = target.head_weight
        self._refuse_other(target, head.shape[1])
        self._narrow, self._wide = head.dtype, _wide(head.dtype)
        self._checkpoint.to(head.device, self._wide)
        self.ids = self._checkpoint.ids
        outputs = [head if (rows := self._checkpoint.rows(i)) is None else rows for i in range(self.heads)]
        made = {id(rows): _head(rows.to(self._narrow)) for rows in outputs}
        self._outputs = [made[id(rows)] for rows in outputs]

    def step(self, i: int, carry: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self._checkpoint.step(i, carry.to(self._wide), tokens)

    def logits(self, i: int, features: Tensor) -> Tensor:
        found: Tensor = self._outputs[i](features.to(self._narrow))
        return found

    def _refuse_other(self, target: Target, hidden: int) -> None:
        """Raise UserError for a target of other sizes."""
        known = f"the heads in {self.name} are for"
        size = self._checkpoint.vocabulary
        if size not in (None, target.vocabulary):
            what = f"{known} a vocabulary of {size} ids, and {target.name} has {target.vocabulary}"
            raise UserError(f"{what}; {REMEDY} for it.", key="path")
        if self._checkpoint.hidden != hidden:
            what = f"{known} a hidden size of {self._checkpoint.hidden}, and {target.name} has {hidden}"
            raise UserError(f"{what}; {REMEDY} for it.", key="path")


def heads_in(folder: Path) -> BoundHeads:
    """The heads in a folder, of `python -m train` or made elsewhere.

    Raises:
        UserError: if it has none, or they are damaged.
    """
    elsewhere = (folder / CONFIG).is_file() and not (folder / CARD).is_file()
    return ImportedHeads(folder) if elsewhere else TrainedHeads(folder)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Of the small matrices, for a head of this type: in float32 they take less time than in a narrower one."""
    return torch.promote_types(dtype, torch.float32)


def _head(rows: Tensor) -> nn.Module:
    """Features [R, d] to logits [R, D], for rows [D, d] of a head."""
    linear = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(rows, requires_grad=False)
    return packed(linear)
