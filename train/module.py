"""The training of a student: one step, its normalisation over all ranks, and what validation counts.

Knows a student, a loss and numbers; the target is in the batch, as the states that its head read.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import lightning
import torch
from torch import Tensor

from specpipe.walk import Walk, greedy_walk, sampled_walk
from train.batches import Batch
from train.losses import Loss, head_weights, mean_over, overlap
from train.optimizer import AdamW
from train.students import Guesses, Student

TINY = torch.finfo(torch.float32).tiny


class DraftTraining(lightning.LightningModule):
    """A student under a loss.

    Args:
        student: prepared for its target.
        loss: per-row distance from the target's law.
        optimizer: how weights are moved.
        gamma: drafted tokens of a step in validation.
    """

    def __init__(self, student: Student, loss: Loss, optimizer: AdamW, gamma: int) -> None:
        super().__init__()
        self.student, self.gamma = student, gamma
        self._loss, self._optimizer = loss, optimizer
        self._counts = Counts()
        self.figures: dict[str, float] = {}  # of the last validation
        self.validated_at = -1  # step
        self.strict_loading = False  # checkpoints hold what is trained alone

    def training_step(self, batch: Batch, index: int) -> Tensor:
        """The heads' weighted mean losses, each over the supervised tokens of all ranks."""
        p = self.student.teacher(batch)
        guesses = list(self.student.guesses(batch))
        rows = torch.tensor([len(each.at) for each in guesses], dtype=torch.float32, device=p.device)
        counts = self._summed(rows)
        shares = head_weights(len(guesses)).to(p.device)
        losses = [share * self._of(each, p, count) for share, each, count in zip(shares, guesses, counts, strict=True)]
        loss = torch.stack(losses).sum()
        self.log("train/loss", loss.detach() * self.trainer.world_size, sync_dist=True, prog_bar=True)
        return loss * self.trainer.world_size  # DDP averages over ranks

    def configure_optimizers(self) -> Any:
        steps = int(self.trainer.estimated_stepping_batches)
        return self._optimizer.configured(self.student.parameters(), steps)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """What is trained, and nothing of the target."""
        trained = {name for name, weight in self.named_parameters() if weight.requires_grad}
        checkpoint["state_dict"] = {n: weight for n, weight in checkpoint["state_dict"].items() if n in trained}

    # ---- validation ----

    def on_validation_epoch_start(self) -> None:
        self._counts = Counts()

    def validation_step(self, batch: Batch, index: int) -> None:
        p = self.student.teacher(batch)
        found = Found.of(batch, self.student.heads)
        for each in self.student.guesses(batch):
            own, logits = p[each.at], each.logits.float()
            self._counts.add_rows(each, own, logits, batch.drawn[each.at], self._loss)
            found.add(each, own, logits, self.student.row_of[batch.answer[each.at]])
        self._counts.add_mass(p, self.student.row_of[batch.answer] >= 0)
        self._counts.add_walks(found, batch, self.gamma, self.student.start)

    def on_validation_epoch_end(self) -> None:
        summed = self._summed(self._counts.flat(self.student.heads, self.gamma).to(self.device))
        self.figures, self.validated_at = figures(summed.tolist(), self.student.heads, self.gamma), self.global_step
        self.log_dict(self.figures)

    def _of(self, guesses: Guesses, p: Tensor, count: Tensor) -> Tensor:
        values = self._loss(p[guesses.at], guesses.logits)
        return mean_over(values, torch.ones_like(values), count)

    def _summed(self, numbers: Tensor) -> Tensor:
        """Over all ranks."""
        return self.trainer.strategy.reduce(numbers, reduce_op="sum") if self.trainer.world_size > 1 else numbers


class Found:
    """Whether each written token was guessed, and how likely: by the place where a step begins, and its offset.

    hits: bool [G, n], the best guess is the token. ratio: float64 [G, n], q / p of the token, 0 where the student
    cannot say it. An entry [t, j] belongs to a step that begins at written token t and to the token j places on.
    """

    def __init__(self, count: int, heads: int) -> None:
        self.hits = torch.zeros(count, heads, dtype=torch.bool)
        self.ratio = torch.zeros(count, heads, dtype=torch.float64)

    @classmethod
    def of(cls, batch: Batch, heads: int) -> Found:
        """Nothing found yet."""
        return cls(len(batch.answer), heads)

    def guesses(self, rows: slice) -> tuple[Tensor, Tensor]:
        """hits and ratio of one document, as walks take them: [T, n], or [T] for a model."""
        hits, ratio = self.hits[rows], self.ratio[rows]
        return (hits[:, 0], ratio[:, 0]) if hits.shape[1] == 1 else (hits, ratio)

    def add(self, guesses: Guesses, p: Tensor, logits: Tensor, row: Tensor) -> None:
        """p, logits: [A, D]; row: [A] of the token that came, -1 for one that the student cannot say."""
        begun, head = (guesses.at - guesses.head).cpu(), guesses.head
        known = row >= 0
        at = row.clamp(min=0)[:, None]
        q, p_own = logits.softmax(-1).gather(1, at)[:, 0], p.gather(1, at)[:, 0]
        self.hits[begun, head] = ((logits.argmax(-1) == row) & known).cpu()
        self.ratio[begun, head] = torch.where(known, q.double() / p_own.double().clamp(min=TINY), 0.0).cpu()


class Counts:
    """Sums over the validation text, of which all figures are made; those of several ranks add up."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)

    def add_rows(self, guesses: Guesses, p: Tensor, logits: Tensor, drawn: Tensor, loss: Loss) -> None:
        """One head's guesses. p, logits: [A, D]; drawn: [A] whether the token was drawn, not the target's best."""
        head = guesses.head
        self._sums[f"rows{head}"] += len(p)
        self._sums[f"loss{head}"] += float(loss(p, logits).sum())
        self._sums[f"drawn{head}"] += int(drawn.sum())
        self._sums[f"alpha{head}"] += float(overlap(p[drawn], logits[drawn]).sum())

    def add_mass(self, p: Tensor, known: Tensor) -> None:
        """p: [G, D] true probabilities of the kept ids; known: [G] whether the token that came is kept."""
        self._sums["tokens"] += len(p)
        self._sums["known"] += int(known.sum())
        self._sums["mass"] += float(p.sum())

    def add_walks(self, found: Found, batch: Batch, gamma: int, start: int) -> None:
        """Walk through each document."""
        first = 0
        for size in batch.sizes.tolist():
            rows = slice(first, first + size)
            hits, ratio = found.guesses(rows)
            if bool(batch.drawn[first]):
                self._add_walk("drawn", sampled_walk(ratio, gamma, start=start))
            else:
                self._add_walk("greedy", greedy_walk(hits, gamma, start=start))
                self._add_places(hits, gamma, start)
            first += size

    def _add_places(self, hits: Tensor, gamma: int, start: int) -> None:
        """For each place in a draft: from how many places a step would reach it, and have it accepted."""
        if hits.dim() == 1:
            hits = torch.nn.functional.pad(hits, (0, gamma - 1)).unfold(0, gamma, 1)
        for i in range(gamma):
            begun = hits[start : len(hits) - i]
            self._sums[f"reached{i}"] += int(begun[:, :i].all(1).sum())
            self._sums[f"accepted{i}"] += int(begun[:, : i + 1].all(1).sum())

    def _add_walk(self, kind: str, walk: Walk) -> None:
        self._sums[f"{kind}_tokens"] += walk.tokens
        self._sums[f"{kind}_steps"] += walk.steps

    def flat(self, heads: int, gamma: int) -> Tensor:
        """All sums in a fixed order, float64."""
        return torch.tensor([self._sums[name] for name in _names(heads, gamma)], dtype=torch.float64)


def _names(heads: int, gamma: int) -> list[str]:
    by_head = [f"{what}{i}" for i in range(heads) for what in ("rows", "loss", "drawn", "alpha")]
    by_head += [f"{what}{i}" for i in range(gamma) for what in ("reached", "accepted")]
    walks = [f"{kind}_{what}" for kind in ("greedy", "drawn") for what in ("tokens", "steps")]
    return [*by_head, *walks, "tokens", "known", "mass"]


def figures(sums: list[float], heads: int, gamma: int) -> dict[str, float]:
    """What is reported of a validation. Without text of a temperature its figures are left out.

    `val/tau_g{gamma}` tokens per target pass of greedy decoding, and `_T1` of sampling at the text's temperature;
    `val/alpha` mean of sum min(p, q) of the first guess; `val/alpha_pos{i}` the same of each head; `val/acc_pos{i}` of
    drafts whose tokens before i were accepted, the share accepted at i, greedy; `val/coverage` of the written tokens,
    `val/p_mass` of the target's law, what the kept ids have.
    """
    by = dict(zip(_names(heads, gamma), sums, strict=True))
    shares = head_weights(heads).tolist()
    shown = {
        "val/loss": sum(share * _ratio(by[f"loss{i}"], by[f"rows{i}"], 0.0) for i, share in enumerate(shares)),
        f"val/tau_g{gamma}": _ratio(by["greedy_tokens"], by["greedy_steps"]),
        f"val/tau_g{gamma}_T1": _ratio(by["drawn_tokens"], by["drawn_steps"]),
        "val/alpha": _ratio(by["alpha0"], by["drawn0"]),
        "val/coverage": _ratio(by["known"], by["tokens"]),
        "val/p_mass": _ratio(by["mass"], by["tokens"]),
    }
    for i in range(heads):
        shown[f"val/alpha_pos{i + 1}"] = _ratio(by[f"alpha{i}"], by[f"drawn{i}"])
    for i in range(gamma):
        shown[f"val/acc_pos{i + 1}"] = _ratio(by[f"accepted{i}"], by[f"reached{i}"])
    return {name: value for name, value in shown.items() if value is not None}


def _ratio(above: float, below: float, otherwise: Any = None) -> Any:
    return above / below if below else otherwise
