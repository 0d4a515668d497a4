"""What a run has cost so far, kept through interruptions."""

from __future__ import annotations

import time
from typing import Any

import lightning
from lightning.pytorch.callbacks import Callback

from specpipe.errors import UserError
from train.batches import Batch

EVERY = 10  # steps between two points of the curves


class Ledger(Callback):
    """Counts supervised tokens and seconds of training, and carries through checkpoints what a resumed run must share.

    Args:
        text: checksum of the text that is trained on.
        wandb: id of the wandb run, if there is one.
    """

    def __init__(self, text: str, wandb: str | None = None) -> None:
        self.text, self.wandb = text, wandb
        self.tokens, self.seconds = 0, 0.0

    @property
    def minutes(self) -> float:
        return self.seconds / 60

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Batch, batch_idx: int) -> None:
        self._started = time.monotonic()

    def on_train_batch_end(
        self, trainer: lightning.Trainer, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int
    ) -> None:
        self.seconds += time.monotonic() - self._started
        self.tokens += len(batch.answer) * trainer.world_size
        if trainer.global_step % EVERY == 0:
            rate = self.tokens / max(self.seconds, 1e-9)
            pl_module.log_dict({"train/tokens_per_s": rate, "train/minutes": self.minutes})

    def state_dict(self) -> dict[str, Any]:
        return {"text": self.text, "wandb": self.wandb, "tokens": self.tokens, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["text"] != self.text:
            raise UserError("the checkpoint was trained on other text; data.* must be as they were.", key="resume")
        self.tokens, self.seconds = state_dict["tokens"], state_dict["seconds"]
