"""`specpipe dashboard`: puts the wandb workspace of a project together, and saves it there as a view."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from specpipe.commands.parts import ending
from specpipe.config import plain
from specpipe.errors import UserError, one_line
from specpipe.results import RunFolder
from specpipe.tracking import ABANDON_SECONDS, NoRun, abandon, home_below, within

SPEC = "workspace.json"
SAVE_SECONDS = 60.0  # a healthy server takes a second or two
PRIVATE = ("offline", "dryrun", "disabled")  # of WANDB_MODE


def run(config: DictConfig) -> int:
    """Write the workspace in the run folder, then save it at wandb; the exit code.

    Raises:
        UserError: if the package for it is missing, or wandb does not take it: without a login or a network.
    """
    settled = plain(config)
    made, spec = _made(settled)
    saved: dict[str, Any] = {}
    folder = RunFolder(
        Path(HydraConfig.get().runtime.output_dir), {"command": "dashboard", "config": settled}, lambda: saved
    )
    folder.write(SPEC, json.dumps(spec, indent=2))
    with ending(folder, NoRun(), _note) as end:
        saved["url"] = _save(made, settled["entity"], folder.folder)
        print(saved["url"])
        end.code = 0
    return end.code


def _made(settled: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The workspace, and what wandb stores of it."""
    try:
        from specpipe.workspace import serialised, workspace
    except ImportError as error:
        raise UserError(f"needs the package wandb-workspaces: pip install 'specpipe[dashboard]' ({error}).") from error
    made = workspace(settled["entity"] or "", settled["project"], settled["name"])
    return made, serialised(made)


def _save(made: Any, entity: str | None, folder: Path) -> str:
    """Its address at wandb."""
    written = f"the workspace is in {str(folder / SPEC)!r}, and not at wandb"
    if (mode := os.environ.get("WANDB_MODE")) in PRIVATE:
        raise UserError(f"{written}: WANDB_MODE is {mode}.")
    url, problem = within(SAVE_SECONDS, lambda: _upload(made, entity, folder))
    if problem is not None:
        within(ABANDON_SECONDS, abandon)
        raise UserError(f"{written}: {one_line(problem)}") from problem
    return str(url)


def _upload(made: Any, entity: str | None, folder: Path) -> str:
    import wandb

    with home_below(folder / "wandb"):
        wandb.setup(wandb.Settings(silent=True))  # never asks for a login
        made.entity = entity or wandb.Api().default_entity
        made.save()
        return str(made.url)


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
