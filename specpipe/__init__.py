"""specpipe: speculative decoding as a declarative pipeline, exact for every proposer.

`load("proposer=ngram", ...)` gives a `Pipeline` with `generate(prompts)` and `stream(prompt)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from specpipe.pipeline import Pipeline

__version__ = "0.1.0"
__all__ = ["load"]


def load(*overrides: str) -> Pipeline:
    """The pipeline that `python -m specpipe decode <overrides>` would use.

    Args:
        overrides: as on the command line, e.g. `"target.dtype=float32"`.

    Raises:
        specpipe.errors.UserError: for a wrong key, option or value, with the nearest match.
    """
    from specpipe.commands.parts import build_pipeline
    from specpipe.config import compose

    return build_pipeline(compose("decode", overrides))
