"""What `audit` shows: a progress bar per test while it runs, then one line per test and the verdict.

The lines and the verdict go to standard output, all else to standard error; bars are drawn on terminals only.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.style import Style
from rich.text import Text

from specpipe.audit.finding import BIASED, FAILED, LOSSLESS, NOT_APPLICABLE, PASSED, TOO_LITTLE, Finding
from specpipe.console import Console, written

STYLES = {PASSED: "green", LOSSLESS: "bold green", FAILED: "red", BIASED: "bold red", TOO_LITTLE: "yellow"}
LABEL = 19  # columns of a test's name


class AuditView:
    """Shows one audit.

    Args:
        out: takes findings and verdict; standard output if None.
        err: takes bars and notes; standard error if None.

    Raises (`finding` and `verdict`):
        OutputClosed: when the reader of the output has gone.
        UserError: when it cannot be written for another reason, such as a full disk.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        self._stream = out or sys.stdout
        self._out = Console(file=self._stream, highlight=False)
        self._err = Console(file=err or sys.stderr, highlight=False)

    @contextmanager
    def bar(self, what: str, total: int) -> Iterator[Callable[[int], None]]:
        """While a test runs; call what it gives with how much more is done, out of `total`."""
        columns = (TextColumn(f"{what:<{LABEL}}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self._err, transient=True, disable=not self._err.is_terminal) as progress:
            task = progress.add_task("", total=total)
            yield lambda more: progress.update(task, completed=min(total, progress.tasks[0].completed + more))

    def finding(self, finding: Finding) -> None:
        """One test's outcome."""
        width = max(60, min(self._out.width, 120)) if self._out.is_terminal else 10_000
        words = "skipped" if finding.result == NOT_APPLICABLE else finding.result
        indent = " " * (LABEL + len(words) + 3)
        lines = textwrap.wrap(finding.reason, max(30, width - len(indent))) or [""]
        self._line(f"{finding.test:<{LABEL}}", words, f"   {lines[0]}", STYLES.get(finding.result, "dim"))
        for line in lines[1:]:
            self._line("", "", indent + line, "")

    def verdict(self, word: str) -> None:
        """The one word."""
        self._line(f"{'verdict':<{LABEL}}", word, "", STYLES[word])

    def note(self, line: str) -> None:
        """One line beside the results."""
        self._err.print(Text(line), soft_wrap=True)

    def _line(self, label: str, word: str, rest: str, style: str) -> None:
        coloured = self._out.color_system is not None and not self._out.no_color
        word = Style.parse(style).render(word) if coloured and word else word
        with written(self._stream):  # not through rich, which says nothing of a reader that has gone
            self._stream.write(f"{label}{word}{rest}\n")
            self._stream.flush()
