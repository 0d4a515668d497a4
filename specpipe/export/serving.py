"""How engines are told of an artefact: vLLM's `--speculative-config`, commands, and how many tokens to draft."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpipe.bench.answer import best_cells
from specpipe.errors import UserError
from specpipe.results import read_result

SPECULATION = "speculative_config.json"


@dataclass(frozen=True)
class Serving:
    """What one engine is told.

    engine: vllm, or tgi. keys: of `--speculative-config`, beside the number of tokens; None: vLLM does not load it.
    drafted: tokens of a step, where no bench found a better number. most: that the artefact can draft, None: any
    number. weights: whether the engine reads the folder.
    """

    keys: Mapping[str, Any] | None
    drafted: int
    most: int | None = None
    engine: str = "vllm"
    weights: bool = True

    def gamma(self, best: int | None) -> int:
        """Tokens of a step: those of a bench if there was one, as far as the artefact goes."""
        wanted = self.drafted if best is None else best
        return wanted if self.most is None else min(wanted, self.most)

    def speculation(self, folder: str, gamma: int) -> dict[str, Any] | None:
        """vLLM's `--speculative-config` for the artefact in `folder`; None for other engines."""
        if self.keys is None:
            return None
        method = {name: value for name, value in self.keys.items() if name == "method"}
        model = {"model": folder} if self.weights else {}
        return {**method, **model, "num_speculative_tokens": gamma, **self.keys}

    def command(self, target: str, folder: str, gamma: int) -> str | None:
        """The line that serves `target`, a directory or hub id, with the artefact; None where no line is known."""
        if self.engine == "tgi":
            return shlex.join(["text-generation-launcher", "--model-id", folder, "--speculate", str(gamma)])
        told = self.speculation(folder, gamma)
        return None if told is None else shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(told)])


def best_of_bench(folder: str | Path, proposer: str, target: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a bench found for a proposer: its best cell for each temperature and batch size, as `best_cells` gives them.

    Args:
        folder: of the bench.
        proposer: the option's name.
        target: the config of the target that the artefact is for.

    Raises:
        UserError: if it is no bench, or one of another target, or has not measured the proposer.
    """
    result = read_result(folder, "bench")
    if result.get("command") != "bench":
        raise UserError(f"{str(folder)!r} is a run of {result.get('command')}, not of bench.", key="bench")
    measured = (result.get("config") or {}).get("target") or {}
    if any(measured.get(key) != target.get(key) for key in ("_target_", "model")):
        name = (result.get("target") or {}).get("model")
        raise UserError(f"the bench in {str(folder)!r} is of another target, {name}.", key="bench")
    cells = result.get("cells") or []
    found = best_cells(cell for cell in cells if cell["proposer"] == proposer)
    if not found:
        names = ", ".join(sorted({cell["proposer"] for cell in cells})) or "nothing"
        raise UserError(f"the bench in {str(folder)!r} has no speedup of {proposer}; it measured {names}.", key="bench")
    return found
