"""What `bench` shows: a progress bar with the time left, then one table and the answer."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from specpipe.bench.answer import pays, said
from specpipe.console import Console, written

COLUMNS = (
    "proposer",
    "sampler",
    "T",
    "batch",
    "gamma",
    "tokens/s",
    "speedup",
    "predicted",
    "tokens/pass",
    "alpha",
    "c",
)
TONES = {True: "green", False: "red", None: ""}
LINE_EVERY_S = 60.0  # where no bar can be drawn
WIDE = 120  # columns for all there is to say; narrower terminals are told less, so that no line breaks


class BenchView:
    """Progress on standard error, drawn between two decodings, never beside one; results on standard output.

    Args:
        total: stretches of prompts to decode.
    """

    def __init__(self, total: int) -> None:
        self._console = Console(file=sys.stderr, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=self._console,
            auto_refresh=False,
            transient=True,
        )
        self._task = self._bar.add_task("", total=total)
        self._drawn = sys.stderr.isatty() and not self._console.is_dumb_terminal
        self._begun = self._told = time.monotonic()
        self._total, self._done, self._skipped = total, 0, 0

    def __enter__(self) -> BenchView:
        if self._drawn:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            self._bar.stop()

    def skip(self, count: int) -> None:
        """Stretches that an earlier run decoded."""
        self._skipped += count
        self._bar.update(self._task, advance=count)

    def advance(self, what: str) -> None:
        """One more stretch is decoded."""
        self._done += 1
        self._bar.update(self._task, advance=1, description=what)
        now = time.monotonic()
        if self._drawn:
            self._bar.refresh()
        elif now - self._told > LINE_EVERY_S:
            self._told = now
            done = self._done + self._skipped
            left = (now - self._begun) / self._done * (self._total - done)
            self.note(f"{done} of {self._total} ({what}), about {left / 60:.0f} min left")

    def result(self, result: Mapping[str, Any]) -> None:
        """The table and the answer.

        Raises:
            OutputClosed: when the reader of the output has gone.
        """
        console = Console(file=sys.stdout, highlight=False)
        if not console.is_terminal:
            console.width = max(console.width, WIDE)
        with console.capture() as capture:
            console.print(_table(result["cells"], intervals=console.width >= WIDE))
            console.print()
            console.print(Text(result["summary"]["answer"]), soft_wrap=True)
        with written(sys.stdout):
            sys.stdout.write(capture.get())
            sys.stdout.flush()

    def note(self, line: str) -> None:
        """One line beside the results."""
        self._console.print(Text(line), soft_wrap=True)


def _table(cells: Iterable[Mapping[str, Any]], *, intervals: bool) -> Table:
    """A row for each cell; `intervals`: there is room for that of alpha too."""
    cells = list(cells)
    rows = [_row(cell, intervals) for cell in cells]
    same = {i for i in range(len(COLUMNS)) if 1 <= i <= 4 and len({row[i] for row in rows if row[i] != "-"}) < 2}
    kept = [i for i in range(len(COLUMNS)) if i not in same]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for i in kept:
        table.add_column(COLUMNS[i], justify="left" if i < 2 else "right")
    for cell, row in zip(cells, rows, strict=True):
        drafts = not cell["peer"] and cell["num_speculative_tokens"]
        tone = TONES[pays(cell["summary"]["speedup"])] if drafts else ""
        table.add_row(*(Text(row[i], style=tone if COLUMNS[i] == "speedup" else "") for i in kept))
    return table


def _row(cell: Mapping[str, Any], intervals: bool) -> list[str]:
    summary = cell["summary"]
    alpha = summary["alpha"]
    covered = "-" if alpha["mean"] is None else f"{alpha['mean']:.3f}"
    if intervals and alpha["low"] is not None:
        covered += f" [{alpha['low']:.2f}, {alpha['high']:.2f}]"
    return [
        cell["proposer"],
        cell["sampler"] or "-",
        f"{cell['temperature']:g}",
        str(cell["batch_size"]),
        str(cell["num_speculative_tokens"] or "-"),
        _figure(summary["tokens_per_s"], ".1f"),
        said(summary["speedup"]),
        _figure((summary.get("predicted_speedup") or {}).get("costs"), ".2f"),
        _figure(summary["tokens_per_target_pass"], ".2f"),
        covered,
        _figure(summary.get("cost_ratio"), ".3f"),
    ]


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
