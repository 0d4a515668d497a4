"""What was decoded in a bench, request by request, and the file that keeps it, from which a killed run goes on.

All figures are made from these steps.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from specpipe.bench.grid import Cell, Setting
from specpipe.clock import PARTS
from specpipe.errors import UserError, one_line
from specpipe.sequence import Step

FILE = "steps.jsonl"
KEPT = ("drafted", "accepted", "tokens", "overlaps", "asked", "prefill", "has_q", "rows", "source")  # of a step


@dataclass
class Decoded:
    """A request of a cell. `conversation` is the number of its prompt, `number` counts all turns of all prompts."""

    repeat: int
    conversation: int
    number: int
    category: str | None
    steps: list[Step]

    @property
    def token_ids(self) -> list[int]:
        return [token for step in self.steps for token in step.tokens]


@dataclass(frozen=True)
class Round:
    """One repeat of one setting: all of its cells, interleaved."""

    repeat: int
    setting: Setting

    def names(self) -> dict[str, Any]:
        return {"repeat": self.repeat, "temperature": self.setting.temperature, "batch_size": self.setting.batch_size}


class Record:
    """All that was decoded, in memory and in a file that grows by a line for each stretch of prompts of a cell.

    A round that did not come to its end counts with the stretches that all of its cells have; whoever goes on from the
    file decodes it anew, because proposers that remember earlier requests could not be where they were.
    """

    def __init__(self) -> None:
        self.done: list[Round] = []
        self._stretches: dict[tuple[Round, int], dict[Cell, list[Decoded]]] = defaultdict(dict)
        self._file: TextIO | None = None
        self._failure: OSError | None = None  # of the file

    def keep(self, file: Path) -> None:
        """Write what comes to a file, which is begun anew."""
        self._file = file.open("w", buffering=1, encoding="utf-8")

    def add(self, round_: Round, stretch: int, cell: Cell, requests: list[Decoded]) -> None:
        """What one cell made of the `stretch`th part of the prompts."""
        self._stretches[round_, stretch][cell] = requests
        rows = [_row(request) for request in requests]
        self._write({"round": round_.names(), "stretch": stretch, "cell": cell.names(), "requests": rows})

    def end(self, round_: Round) -> None:
        """The round is done."""
        self.done.append(round_)
        self._write({"done": round_.names()})

    def whole(self, cells: Iterable[Cell]) -> dict[Cell, list[Decoded]]:
        """The requests of these cells, of one setting, from the stretches that all of them have."""
        wanted = list(cells)
        found: dict[Cell, list[Decoded]] = {cell: [] for cell in wanted}
        for by_cell in self._stretches.values():
            if all(cell in by_cell for cell in wanted):
                for cell in wanted:
                    found[cell] += by_cell[cell]
        return found

    def take_over(self, file: Path) -> None:
        """The rounds that another run came to the end of. What a kill left of a line is passed over.

        Raises:
            UserError: for a file that is no such record.
        """
        open_: dict[Round, list[Mapping[str, Any]]] = defaultdict(list)
        try:
            for line in _lines(file):
                if "done" in line:
                    round_ = _round(line["done"])
                    for each in open_.pop(round_, ()):
                        requests = [_decoded(row) for row in each["requests"]]
                        self.add(round_, each["stretch"], _cell(each["cell"]), requests)
                    self.end(round_)
                else:
                    open_[_round(line["round"])].append(line)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{str(file)!r} is damaged: {one_line(error)}.", key="resume") from error

    def close(self) -> None:
        """Nothing comes any more. Raises OSError if the file could not take everything."""
        if self._file:
            try:
                self._file.close()
            except OSError as error:
                self._failure = self._failure or error
        if self._failure:
            raise self._failure

    def _write(self, line: Mapping[str, Any]) -> None:
        """A disk that is full ends the file, not the bench."""
        if self._file and not self._failure:
            try:
                self._file.write(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")
            except OSError as error:
                self._failure = error


def _lines(file: Path) -> Iterator[Mapping[str, Any]]:
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            with suppress(ValueError):
                yield json.loads(line)


def _round(names: Mapping[str, Any]) -> Round:
    return Round(names["repeat"], Setting(names["temperature"], names["batch_size"]))


def _cell(names: Mapping[str, Any]) -> Cell:
    setting = Setting(names["temperature"], names["batch_size"])
    return Cell(setting, names["proposer"], names["sampler"], names["num_speculative_tokens"], names["peer"])


def _row(request: Decoded) -> dict[str, Any]:
    steps = [
        [*(getattr(step, name) for name in KEPT), [round(step.seconds.get(part, 0.0), 7) for part in PARTS]]
        for step in request.steps
    ]
    names = ("repeat", "conversation", "number", "category")
    return {name: getattr(request, name) for name in names} | {"steps": steps}


def _decoded(row: Mapping[str, Any]) -> Decoded:
    steps = [
        Step(**dict(zip(KEPT, values, strict=True)), seconds=dict(zip(PARTS, seconds, strict=True)))
        for *values, seconds in row["steps"]
    ]
    return Decoded(row["repeat"], row["conversation"], row["number"], row["category"], steps)
