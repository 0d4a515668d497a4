"""What `decode` shows: the text as it streams, coloured by how each token came about, then one table.

Standard output carries the text of the answers and nothing else: one answer is exactly its text and a newline; several
are separated by a line that holds a form feed. All else goes to standard error. On a terminal several answers stand
under their prompts, with a progress bar below. Colours are off when piped and under NO_COLOR, on under FORCE_COLOR.
"""

from __future__ import annotations

import contextlib
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.style import Style
from rich.table import Table
from rich.text import Text

from specpipe.console import Console, OutputClosed, written
from specpipe.errors import UserError
from specpipe.text import Piece

STYLES = {"accepted": "green", "correction": "red", "bonus": "cyan", "plain": ""}
LEGEND = {"accepted": "accepted draft", "correction": "correction", "bonus": "bonus"}
SEPARATOR = "\f\n"
HARDLY_ACCEPTED = 1.05  # mean acceptance length below which drafting is mentioned as not paying
REDRAW_S = 0.1
# A model may emit any character, and a terminal would obey these. Line feed and tab are text.
VISIBLE = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
VISIBLE |= dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


class DecodeView:
    """Shows one run. Use as a context manager, so that an interrupted run leaves the terminal whole.

    Args:
        total: number of prompts; a progress bar accompanies several.
        out: takes the text; standard output if None.
        err: takes all else; standard error if None.

    Raises (all methods):
        OutputClosed: when the reader of the output has gone.
        UserError: when the text cannot be written for another reason, such as a full disk.
    """

    def __init__(self, total: int, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._stream = out or sys.stdout
        self._out = Console(file=self._stream, highlight=False)
        self._err = Console(file=err or sys.stderr, highlight=False)
        self._to_terminal = self._stream.isatty()
        self._coloured = self._out.color_system is not None and not self._out.no_color
        self._total = total
        self._in_line = False  # the cursor stands behind text
        self._bar = _Bar(self._out if self._to_terminal else self._err, total) if self._wants_bar() else None

    def __enter__(self) -> DecodeView:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OutputClosed, UserError):
            if self._bar:
                self._bar.stop()
            if self._in_line and self._to_terminal:
                self._write("\n")

    def begin(self, number: int, prompt: str) -> None:
        """A request starts; several are headed by their prompts."""
        if self._total == 1:
            return
        if number:
            self._text("\n" if self._to_terminal else SEPARATOR)
        heading = f"[{number + 1}/{self._total}] {' '.join(prompt.split())}".translate(VISIBLE)
        console = self._bar.console if self._bar else self._err
        console.print(Text(heading, style="bold"), no_wrap=True, overflow="ellipsis")

    def piece(self, piece: Piece) -> None:
        """Some text of the running request."""
        text = piece.text.translate(VISIBLE) if self._to_terminal else piece.text
        self._text(text, STYLES[piece.kind] if self._coloured else "")

    def end(self, record: dict[str, Any]) -> None:
        """The running request is finished."""
        self._text("\n")
        if self._bar:
            self._bar.advance(record["tokens_per_s"])

    def summary(self, summary: dict[str, Any], engine: str | None = None) -> None:
        """The legend and the table under the text, and a warning if drafting does not pay; engine: of the verifier."""
        counts = summary["spec_decode"]
        self._err.print()
        if self._coloured and counts["num_spec_steps"]:
            legend = (Text(word, style=STYLES[kind]) for kind, word in LEGEND.items())
            self._err.print(Text("  ").join(legend), soft_wrap=True)
        for label, value in [*_rows(summary), *([("verifier", engine)] if engine else [])]:
            indent = " " * (20 if self._err.width >= 50 else 2)
            self.note(textwrap.fill(f"{label:<20}{value}", max(20, self._err.width), subsequent_indent=indent))
        length = counts["mean_acceptance_length"]
        if length is not None and length < HARDLY_ACCEPTED:
            self.note(f"warning: hardly any draft was accepted ({length:.2f} tokens per step)")

    def profile(self, profile: Mapping[str, Any], file: Path) -> None:
        """Two small tables of what `Profiler.summary` gives, and where the trace viewer's file is."""
        if not profile:
            self.note("profile: nothing was recorded, the run had too few steps")
            return
        split = Table("part", "ms a step", "between operations", box=None)
        for part in profile["parts"]:
            split.add_row(part["name"], f"{part['ms']:.2f}", f"{part['between_operations_ms']:.2f}")
        most = Table("operation", "ms a step", "calls", box=None)
        for each in profile["operations"]:
            most.add_row(each["name"], f"{each.get('device_ms', each['ms']):.2f}", f"{each['calls']:.0f}")
        self.note(f"\nprofile of {profile['steps']} steps, recording included")
        self._err.print(split)
        self._err.print(most)
        self.note(f"profile: {file}")

    def note(self, line: str) -> None:
        """One line beside the text. Where it is too long the terminal wraps it, so that it copies as one."""
        self._err.print(Text(line), soft_wrap=True)

    def _wants_bar(self) -> bool:
        return self._total > 1 and self._err.file.isatty() and not self._err.is_dumb_terminal

    def _text(self, text: str, style: str = "") -> None:
        """To standard output; past the bar, if it shares the terminal."""
        if self._bar and self._to_terminal:
            self._bar.text(text, style)
        else:
            self._write(Style.parse(style).render(text) if style else text)

    def _write(self, text: str) -> None:
        # Not through rich, which would expand tabs and drop control characters. Flushed, so that it streams.
        with written(self._stream):
            self._stream.write(text)
            self._stream.flush()
        self._in_line = not text.endswith("\n")


class _Bar:
    """A progress bar below the text. The line that is still growing stands between them and is drawn anew with the bar.

    Drawn between steps, never by a thread beside them: it would run inside what is measured.
    """

    def __init__(self, console: Console, total: int) -> None:
        self.console = console
        self._line = Text()
        self._done, self._total = 0, total
        self._speed: float | None = None
        self._started = self._drawn = time.monotonic()
        self._live = Live(
            console=console,
            get_renderable=self._render,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            vertical_overflow="crop",
        )

    def start(self) -> None:
        self._started = time.monotonic()
        self._live.start(refresh=True)

    def stop(self) -> None:
        """Takes the bar away; a line that has not ended stays."""
        line, self._line = self._line, Text()
        if line:
            self.console.print(line, soft_wrap=True)
        self._live.stop()

    def text(self, text: str, style: str) -> None:
        self._line.append(text, style=style)
        *lines, self._line = self._line.split("\n", allow_blank=True)
        for line in lines:
            self.console.print(line, soft_wrap=True)
        if time.monotonic() - self._drawn > REDRAW_S:
            self._live.refresh()

    def advance(self, speed: float | None) -> None:
        """One more request is finished, decoded at `speed` tokens/s."""
        self._done += 1
        self._speed = speed
        self._live.refresh()

    def _render(self) -> RenderableType:
        self._drawn = time.monotonic()
        words = [f"{self._done}/{self._total}"]
        if self._speed is not None:
            words.append(f"{self._speed:.1f} tokens/s")
        if self._done:
            seconds = (self._drawn - self._started) / self._done * (self._total - self._done)
            words.append(f"{seconds // 60:.0f}:{seconds % 60:02.0f} left")
        while len(words) > 1 and len("  ".join(words)) + 12 > self.console.width:
            words.pop()
        bar = Table.grid(padding=(0, 2, 0, 0))
        width = max(1, min(30, self.console.width - len("  ".join(words)) - 2))
        bar.add_row(
            ProgressBar(self._total, self._done, width, style="dim", complete_style="blue"),
            Text("  ".join(words), no_wrap=True, overflow="crop"),
        )
        return Group(self._end_of_line(), bar) if self._line else bar

    def _end_of_line(self) -> Text:
        """As much of the growing line as there is room for above the bar."""
        room = self.console.width * max(1, self.console.height - 3) // 2  # wide characters take two columns
        return self._line[-room:] if len(self._line) > room else self._line


def _rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    counts = summary["spec_decode"]
    rows = [
        ("new tokens", f"{summary['new_tokens']} in {sum(summary['timing'].values()):.1f} s"),
        ("tokens/s", _number(summary["tokens_per_s"], ".1f")),
        ("tokens/target pass", _number(summary["tokens_per_target_pass"], ".2f")),
    ]
    if counts["num_draft_tokens"]:
        accepted = f"{counts['num_accepted_draft_tokens']} of {counts['num_draft_tokens']} draft tokens"
        rows += [
            ("alpha", _interval(summary["alpha"])),
            ("accepted", f"{accepted} ({counts['draft_acceptance_rate']:.0%})"),
        ]
    return [*rows, ("time", _split(summary["timing"]))]


def _interval(alpha: dict[str, float | None]) -> str:
    text = _number(alpha["mean"], ".2f")
    return text if alpha["low"] is None else f"{text} (95 % interval {alpha['low']:.2f} to {alpha['high']:.2f})"


def _split(timing: dict[str, float]) -> str:
    total = sum(timing.values())
    return ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in timing.items()) if total else "n/a"


def _number(value: float | None, form: str) -> str:
    return "n/a" if value is None else format(value, form)
