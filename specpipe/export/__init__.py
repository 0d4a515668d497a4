"""A proposer as files that other engines load.

What reads a format (`transformers`, `specpipe.formats`) knows names, tensors and forward alone. What writes it is here,
and knows our proposers. What was written is loaded back by the reader and compared with the proposer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from specpipe.errors import UserError
from specpipe.export.check import Check
from specpipe.export.serving import Serving


class Export(Protocol):
    """A proposer on its way into a format.

    head: what the head says to ids that the draft was not trained to say, one of `trimming.HEADS`; None: it is the
    proposer's own. serving: how an engine is told of it. loaded_by: who loads it and who does not, a line each.
    training: how the weights came about, as a `Card` has it; empty where that is not known.
    """

    head: str | None
    serving: Serving
    loaded_by: tuple[str, ...]
    training: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Put the files that the format asks for into a folder that is there and empty."""
        ...

    def check(self, folder: Path) -> Check | None:
        """Load them back and compare with the proposer; None where nothing is computed from them.

        Raises:
            NotTheSame: if they are not such an artefact.
        """
        ...


@contextmanager
def about_the_proposer() -> Iterator[None]:
    """What is wrong with its files, or with them for this target, is told of the proposer's keys."""
    try:
        yield
    except UserError as error:
        raise error.under("proposer") from error
