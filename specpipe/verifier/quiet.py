"""Loading a model without its library's own bars and warnings: they are about its internals and would break up ours."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partialmethod


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence `transformers` inside the block."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), _no_bars():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _no_bars() -> Iterator[None]:
    """Switch tqdm itself off: the GGUF reader of transformers 5.24 draws a bar that heeds no other switch."""
    from tqdm.std import tqdm

    original = tqdm.__init__
    tqdm.__init__ = partialmethod(original, disable=True)
    try:
        yield
    finally:
        tqdm.__init__ = original
