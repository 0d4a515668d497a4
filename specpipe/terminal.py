"""What `decode` shows: the text as it streams, coloured by how each token came about, then one table.

The text goes to standard output and nothing else does, so it can be piped; the rest goes to standard error. Colours are
off when piped and under NO_COLOR.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from specpipe.text import Piece

STYLES = {"accepted": "green", "correction": "red", "bonus": "cyan", "plain": ""}
LEGEND = "accepted draft", "correction", "bonus"
HARDLY_ACCEPTED = 1.05  # mean acceptance length below which drafting is mentioned as not paying


class DecodeView:
    """Shows one run. Use as a context manager, so that an interrupted run leaves the terminal whole.

    Args:
        total: number of prompts; a progress bar accompanies several.
    """

    def __init__(self, total: int) -> None:
        self.out = Console(highlight=False, soft_wrap=True)
        self.err = Console(stderr=True, highlight=False)
        self._total = total
        self._progress = Progress(
            TextColumn("decoding"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=self.err,
            transient=True,
            disable=total < 2 or not self.err.is_terminal,
        )
        self._bar = self._progress.add_task("", total=total, speed="")
        self._line = Text()

    def __enter__(self) -> DecodeView:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def begin(self, number: int, prompt: str) -> None:
        """A request starts; several are headed by their prompts."""
        if self._total > 1:
            first_line = " ".join(prompt.split())
            self.err.print(Text(f"[{number + 1}/{self._total}] {first_line}", style="bold", overflow="ellipsis"), no_wrap=True)

    def piece(self, piece: Piece) -> None:
        """Some text of the running request."""
        if self._total > 1 and not self._progress.disable:  # a bar below the text: whole lines only
            self._line.append(piece.text, style=STYLES[piece.kind])
            *lines, self._line = self._line.split("\n", allow_blank=True)
            for line in lines:
                self.out.print(line)
        else:
            self.out.print(Text(piece.text, style=STYLES[piece.kind]), end="")
            self.out.file.flush()

    def end(self, record: dict[str, Any]) -> None:
        """The running request is finished."""
        self.out.print(self._line)
        self._line = Text()
        speed = record["tokens_per_s"]
        self._progress.update(self._bar, advance=1, speed=f"{speed:.1f} tokens/s" if speed else "")

    def summary(self, result: dict[str, Any]) -> None:
        """The table under the text."""
        summary, counts = result["summary"], result["summary"]["spec_decode"]
        if self.out.color_system and counts["num_spec_steps"]:
            legend = [Text(word, style=STYLES[kind]) for word, kind in zip(LEGEND, STYLES, strict=False)]
            self.err.print(Text(" ").join(legend))
        self.err.print(_table(result))
        length = counts["mean_acceptance_length"]
        if length is not None and length < HARDLY_ACCEPTED:
            self.err.print(f"warning: drafts were hardly ever accepted ({length:.2f} tokens per step); they cost more than they bring")

    def note(self, line: str) -> None:
        """One line beside the text."""
        self.err.print(line, soft_wrap=True)


def _table(result: dict[str, Any]) -> Table:
    summary, counts = result["summary"], result["summary"]["spec_decode"]
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("new tokens", f"{summary['new_tokens']} in {sum(summary['timing'].values()):.1f} s")
    table.add_row("tokens/s", _number(summary["tokens_per_s"], ".1f"))
    table.add_row("tokens per target pass", _number(summary["tokens_per_target_pass"], ".2f"))
    if counts["num_draft_tokens"]:
        accepted = f"{counts['num_accepted_draft_tokens']} of {counts['num_draft_tokens']} drafts"
        table.add_row("alpha", _interval(summary["alpha"]))
        table.add_row("accepted", f"{accepted} ({counts['draft_acceptance_rate']:.0%})")
    table.add_row("time", _split(summary["timing"]))
    return table


def _interval(alpha: dict[str, float | None]) -> str:
    text = _number(alpha["mean"], ".2f")
    return text if alpha["low"] is None else f"{text} (95 % interval {alpha['low']:.2f} to {alpha['high']:.2f})"


def _split(timing: dict[str, float]) -> str:
    total = sum(timing.values())
    return "  ".join(f"{part} {seconds / total:.0%}" for part, seconds in timing.items()) if total else "n/a"


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)
