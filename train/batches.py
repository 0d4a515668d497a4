"""From documents to batches: which token belongs to which state, and in which order documents come.

All alignment is here, for every student. Of an answer y_0 .. y_{n-1}, y_k was drawn from state s_k. A language model
reads the tokens before y_k and must give the law at s_k. Head i reads s_k and y_k .. y_{k+i} and must give the law at
s_{k+1+i}, that of y_{k+1+i}. Nothing reaches from one document into the next.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from specpipe.errors import UserError
from train.generate import Corpus
from train.shards import Document

WINDOW = 32  # batches whose documents are sorted by length: padding is computed for nothing


@dataclass(frozen=True)
class Batch:
    """Documents side by side, and their written tokens in one row.

    ids: [B, T] prompts and answers, padded behind. place: [G] for each written token the place in `ids`, flattened,
    whose reading predicts it: the one before it. answer: [G] the written ids. left: [G] how many more its document has
    behind it. states: [G, H], logz: [G] as in `Document`. drawn: [G] bool, False at temperature 0. sizes: [B] written
    tokens of each document.
    """

    ids: Tensor
    place: Tensor
    answer: Tensor
    left: Tensor
    states: Tensor
    logz: Tensor
    drawn: Tensor
    sizes: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same on another device."""
        return Batch(**{each.name: getattr(self, each.name).to(device) for each in fields(self)})

    def anchors(self, head: int) -> Tensor:
        """[A] the written tokens behind which `head` (from 0) has a written token to guess, `head` + 1 further on."""
        return (self.left > head).nonzero()[:, 0]


def collate(documents: Sequence[Document]) -> Batch:
    """One batch of some documents."""
    width = max(len(document.ids) for document in documents)
    ids = torch.zeros(len(documents), width, dtype=torch.long)
    for row, document in enumerate(documents):
        ids[row, : len(document.ids)] = document.ids
    sizes = [len(document.answer) for document in documents]
    places = [
        row * width + torch.arange(document.prompt - 1, len(document.ids) - 1) for row, document in enumerate(documents)
    ]
    return Batch(
        ids=ids,
        place=torch.cat(places),
        answer=torch.cat([document.answer for document in documents]),
        left=torch.cat([torch.arange(n - 1, -1, -1) for n in sizes]),
        states=torch.cat([document.states for document in documents]),
        logz=torch.cat([document.logz for document in documents]),
        drawn=torch.cat([torch.full((len(document.answer),), document.temperature > 0) for document in documents]),
        sizes=torch.tensor(sizes),
    )


class Order(Sampler[int]):
    """The documents of one rank, epoch by epoch: a pure function of seed and epoch, so that a run can be resumed.

    The order is made of whole batches of all ranks together, each of documents of similar length; those that fill no
    batch are left out of the epoch. `skip` batches of the next epoch are passed over, once.

    Args:
        lengths: of the documents.
        batch_size: of one rank.
        seed: of the order. rank, world: which process of how many.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, rank: int = 0, world: int = 1) -> None:
        self._lengths, self._batch, self._seed = torch.tensor(list(lengths)), batch_size, seed
        self._rank, self._world = rank, world
        self._epoch = 0
        self.skip = 0

    @property
    def batches(self) -> int:
        """Of an epoch."""
        return len(self._lengths) // (self._batch * self._world)

    def __len__(self) -> int:
        return self.batches * self._batch

    def set_epoch(self, epoch: int) -> None:
        """Called by the trainer before each epoch."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[int]:
        first, self.skip = self.skip, 0
        for batch in self._global()[first:]:
            yield from batch[self._rank * self._batch : (self._rank + 1) * self._batch].tolist()

    def _global(self) -> list[Tensor]:
        """The epoch's batches of all ranks together."""
        chance = torch.Generator().manual_seed(_number(self._seed, self._epoch))
        size = self._batch * self._world
        shuffled = torch.randperm(len(self._lengths), generator=chance)[: self.batches * size]
        batches: list[Tensor] = []
        for window in shuffled.split(WINDOW * size):
            by_length = window[self._lengths[window].argsort(stable=True)]
            batches += by_length.split(size)
        return [batches[i] for i in torch.randperm(len(batches), generator=chance).tolist()]


class Loader(DataLoader[Document]):
    """A loader whose place inside an epoch is saved in checkpoints: Lightning asks for its state."""

    sampler: Order

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._done = self.sampler.skip
        for batch in super().__iter__():
            self._done += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"done": self._done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.sampler.skip = state["done"] % max(1, self.sampler.batches)


class DraftData(lightning.LightningDataModule):
    """The text of a corpus in batches of whole documents.

    Args:
        corpus: what the target wrote.
        batch_size: documents of one rank in a step.
        seed: of the order.
    """

    def __init__(self, corpus: Corpus, *, batch_size: int, seed: int) -> None:
        super().__init__()
        self._corpus, self._batch_size, self._seed = corpus, batch_size, seed

    def train_dataloader(self) -> Loader:
        rank, world = self._place
        order = Order(self._corpus.train.lengths, self._batch_size, self._seed, rank, world)
        if not order.batches:
            what = f"{len(self._corpus.train)} documents do not fill one step of {self._batch_size * world}"
            raise UserError(f"{what}.", key="data.batch_size")
        return Loader(self._corpus.train, batch_size=self._batch_size, sampler=order, collate_fn=collate)

    def val_dataloader(self) -> DataLoader[Document]:
        """Every document once, shared out among the ranks. UserError if one would get none: the others wait for it."""
        rank, world = self._place
        if len(self._corpus.val) < world:
            what = f"{len(self._corpus.val)} documents to validate with are too few for {world} processes"
            raise UserError(f"{what}.", key="data.val_share")
        own = range(rank, len(self._corpus.val), world)
        return DataLoader(self._corpus.val, batch_size=self._batch_size, sampler=own, collate_fn=collate)

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch.to(device)

    @property
    def _place(self) -> tuple[int, int]:
        return (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)


def _number(seed: int, epoch: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}/{epoch}".encode()).digest()[:8], "big") >> 1
