"""Going on with a run that was interrupted: its checkpoint, best weights and curves come into the new run's folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from specpipe.errors import UserError, one_line
from specpipe.paths import from_start

CHECKPOINTS, LAST, BEST, POINTS = "checkpoints", "last", "best", "metrics.jsonl"


def checkpoint_of(resume: str | None, folder: Path) -> Path | None:
    """The checkpoint to go on from; None to start anew.

    Args:
        resume: folder of a run, or `last`: the newest run beside this one, or this one itself.
        folder: of this run.

    Raises:
        UserError: if there is no checkpoint.
    """
    if resume is None:
        return None
    found = _newest(folder) if resume == "last" else from_start(resume) / CHECKPOINTS / f"{LAST}.ckpt"
    if found is None or not found.is_file():
        where = folder.parent if resume == "last" else from_start(resume)
        raise UserError(f"there is no {CHECKPOINTS}/{LAST}.ckpt in {str(where)!r}.", key="resume")
    return found


def brought_over(found: Path | None, folder: Path) -> Path | None:
    """A checkpoint brought into the folder of this run, with the best one and the curves before it.

    Raises:
        UserError: if one of them is damaged: better now than when the training is done.
    """
    if found is None:
        return None
    before, own = found.parent.parent, place(folder)
    content, best = loaded(found), found.with_name(f"{BEST}.ckpt")
    if best.is_file():
        loaded(best)
    if before.resolve() != folder.resolve():
        own.parent.mkdir(parents=True, exist_ok=True)
        for file in (f"{CHECKPOINTS}/{BEST}.ckpt", POINTS):
            if (before / file).is_file():
                shutil.copy2(before / file, folder / file)
        torch.save(_moved(content, str(own.parent.resolve())), own)
    return own


def loaded(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds.

    Raises:
        UserError: for one that was cut short, or is none.
    """
    try:
        content = torch.load(checkpoint, weights_only=True, map_location="cpu")
    except Exception as error:  # torch has another one for each kind of damage
        raise UserError(f"{str(checkpoint)!r} is damaged: {one_line(error)}", key="resume") from error
    if not isinstance(content, dict) or not isinstance(content.get("callbacks"), dict):
        raise UserError(f"{str(checkpoint)!r} is not the checkpoint of a training.", key="resume")
    return content


def place(folder: Path) -> Path:
    """Where a run's last checkpoint lies."""
    return folder / CHECKPOINTS / f"{LAST}.ckpt"


def wandb_run(checkpoint: Path | None) -> str | None:
    """The wandb run that the checkpoint belongs to."""
    if checkpoint is None:
        return None
    callbacks = loaded(checkpoint)["callbacks"]
    return next((state["wandb"] for name, state in callbacks.items() if name.startswith("Ledger")), None)


def _newest(folder: Path) -> Path | None:
    if place(folder).is_file():
        return place(folder)
    others = folder.parent.glob(f"*/{CHECKPOINTS}/{LAST}.ckpt")
    return max(others, key=lambda file: file.stat().st_mtime, default=None)


def _moved(checkpoint: dict[str, Any], now: str) -> dict[str, Any]:
    """The same with paths in the new folder: its callbacks remember where their checkpoints lay when it was written."""
    for state in checkpoint["callbacks"].values():
        if before := state.get("dirpath"):
            state.update(_replaced(state, before, now))
    return checkpoint


def _replaced(value: Any, before: str, now: str) -> Any:
    if isinstance(value, dict):
        return {_replaced(key, before, now): _replaced(each, before, now) for key, each in value.items()}
    return value.replace(before, now) if isinstance(value, str) else value
