"""Paths as the user means them."""

from __future__ import annotations

from pathlib import Path

from hydra.utils import to_absolute_path


def from_start(path: str | Path) -> Path:
    """`path` as meant where the command was typed, also when `hydra.job.chdir` has moved on to the run's folder."""
    return Path(to_absolute_path(str(Path(path).expanduser())))
