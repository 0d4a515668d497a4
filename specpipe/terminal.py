"""What `decode` shows: the text as it streams, coloured by how each token came about, then one table.

Standard output carries the text of the answers and nothing else: one answer is exactly its text and a newline; several
are separated by a line that holds a form feed. All else goes to standard error. On a terminal several answers stand
under their prompts, with a progress bar below. Colours are off when piped and under NO_COLOR, on under FORCE_COLOR.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from types import TracebackType
from typing import Any, NoReturn

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.style import Style
from rich.table import Table
from rich.text import Text

from specpipe.errors import UserError
from specpipe.text import Piece

STYLES = {"accepted": "green", "correction": "red", "bonus": "cyan", "plain": ""}
LEGEND = {"accepted": "accepted draft", "correction": "correction", "bonus": "bonus"}
SEPARATOR = "\f\n"
HARDLY_ACCEPTED = 1.05  # mean acceptance length below which drafting is mentioned as not paying
REDRAW_S = 0.1
# A terminal would obey these; a model may emit any byte. Line feed and tab are text.
VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
VISIBLE |= dict.fromkeys(range(128, 160), 0xFFFD)


class OutputClosed(Exception):
    """Whoever read the output has gone, as `head` does; nobody waits for the rest."""


class DecodeView:
    """Shows one run. Use as a context manager, so that an interrupted run leaves the terminal whole.

    `begin`, `piece` and `end` raise OutputClosed when the reader of the text has gone, and UserError when the text
    cannot be written for another reason, such as a full disk.

    Args:
        total: number of prompts; a progress bar accompanies several.
    """

    def __init__(self, total: int) -> None:
        self.out = _Console(highlight=False)
        self.err = _Console(stderr=True, highlight=False)
        self._stream = sys.stdout
        self._to_terminal = _is_terminal(sys.stdout)
        self._coloured = bool(self.out.color_system) and not self.out.no_color
        self._total = total
        self._number = 0
        self._in_line = False  # the cursor stands behind text
        self._bar = self._progress_bar() if total > 1 and _is_terminal(sys.stderr) else None

    def __enter__(self) -> DecodeView:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with contextlib.suppress(OSError, OutputClosed):
            if self._bar:
                self._bar.stop()
            if self._in_line and self._to_terminal:
                self._write("\n")

    def begin(self, number: int, prompt: str) -> None:
        """A request starts; several are headed by their prompts."""
        self._number = number
        if self._total == 1:
            return
        if number:
            self._write("\n" if self._to_terminal else SEPARATOR)
        console = self._bar.console if self._bar else self.err
        heading = Text(f"[{number + 1}/{self._total}] {' '.join(prompt.split())}".translate(VISIBLE), style="bold")
        console.print(heading, no_wrap=True, overflow="ellipsis")

    def piece(self, piece: Piece) -> None:
        """Some text of the running request."""
        text = piece.text.translate(VISIBLE) if self._to_terminal else piece.text
        if self._coloured and STYLES[piece.kind]:
            text = Style.parse(STYLES[piece.kind]).render(text, color_system=self.out._color_system)
        self._write(text)

    def end(self, record: dict[str, Any]) -> None:
        """The running request is finished."""
        self._write("\n")

    def summary(self, result: dict[str, Any]) -> None:
        """The table under the text."""
        counts = result["summary"]["spec_decode"]
        self.err.print()
        if self._coloured and counts["num_spec_steps"]:
            self.err.print(Text("  ").join(Text(word, style=STYLES[kind]) for kind, word in LEGEND.items()))
        for label, value in rows(result["summary"]):
            self.note(f"{label:<20}{value}")
        length = counts["mean_acceptance_length"]
        if length is not None and length < HARDLY_ACCEPTED:
            self.note(f"warning: hardly any draft was accepted ({length:.2f} tokens per step), try proposer=none")

    def note(self, line: str) -> None:
        """One line beside the text, never broken by us: the terminal does that, and can undo it when copying."""
        self.err.print(Text(line), soft_wrap=True)
