"""Writing to terminals, files and pipes whose reader may leave at any time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import IO

import rich.console

from specpipe.errors import UserError


class OutputClosed(Exception):
    """Whoever read the output has gone, as `head` does: nobody waits for the rest."""


class Console(rich.console.Console):
    """rich's, for output whose reader may go."""

    def on_broken_pipe(self) -> None:
        """Go on without it, where rich would leave the program: the text may still have a reader."""
        self.quiet = True
        silence(self.file)


@contextlib.contextmanager
def written(stream: IO[str]) -> Iterator[None]:
    """Around writing results: OutputClosed when the reader has gone, UserError for a full disk and the like."""
    try:
        yield
    except BrokenPipeError:
        silence(stream)
        raise OutputClosed from None
    except OSError as error:
        silence(stream)
        raise UserError(f"the text could not be written to standard output: {error.strerror}.") from error


def silence(stream: IO[str]) -> None:
    """What is still buffered goes nowhere; Python would try to write it at exit, and complain."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
