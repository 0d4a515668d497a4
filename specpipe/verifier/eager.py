"""The verifier in Python: the target's modules as they were loaded (`eager`), or packed and fused (`packed`)."""

from __future__ import annotations

import warnings

from torch import Tensor

from specpipe.draft import Draft
from specpipe.errors import choice, flag
from specpipe.sequence import Sequence
from specpipe.verifier.prepared import prepare
from specpipe.verifier.reader import Reader
from specpipe.verifier.support import plain_logits, refuse_unsupported, rehearse, same_bits
from specpipe.verifier.targets import Target

FREE, FIXED = "free", "fixed"  # widths


class EagerVerifier:
    """The target behind one call.

    Args:
        target: the model whose law is kept.
        prepack: on a CPU, pack the linear layers' weights once (see `linear.py`); same results up to rounding.
        fuse: where the architecture is known, run its layers in fewer operations (see `fused.py`); the same.
        width: `fixed` reads as many tokens in every pass behind a prompt as the longest draft needs, and looks at as
            many places as the text may have. Kernels round differently for other shapes, and near ties of bfloat16
            depend on it: so plain and speculative decoding of one request at a time see the same logits to the last
            bit, on most machines, and it is said if not. `free` reads what there is.

    `engine` says what runs: `packed`, or `eager` if nothing was prepared. `reader` holds what was read of each request,
    for proposers made of the target's own layers or for its states.

    Raises:
        UserError: if the target's layers cannot be rolled back.
    """

    def __init__(self, target: Target, *, prepack: bool = True, fuse: bool = True, width: str = FREE) -> None:
        self.width = choice("width", width, (FREE, FIXED))
        self._longest = 0
        refuse_unsupported(target.model)
        self._expected = plain_logits(target.model)
        self.target = target
        self._prepare(fuse=flag("fuse", fuse), prepack=flag("prepack", prepack))
        self.device = self.reader.device

    def _prepare(self, *, fuse: bool = True, prepack: bool = True) -> None:
        self.prepared = prepare(self.target.model, fuse=fuse, prepack=prepack)
        rehearse(self.target.model, self._expected)
        self.engine = "packed" if self.prepared.fused or self.prepared.packed else "eager"
        self.reader = Reader(self.target.model)

    def expect(self, longest: int) -> None:
        """Drafts of up to so many tokens will come."""
        if self.width == FREE or longest <= self._longest:
            return
        self._longest, self.reader.width = longest, 1 + longest
        trial = Reader(self.reader.model)
        trial.width = self.reader.width
        if not same_bits(trial, longest):
            what = "on this machine logits depend on drafts in passes of a fixed width too"
            warnings.warn(f"{what}, by rounding; verifier=packed may not", stacklevel=2)

    def score(self, sequences: list[Sequence], draft: Draft) -> list[Tensor]:
        """Row b: logits [k_b + 1, V] at the places of its k_b drafts and behind them."""
        return self.reader.read(sequences, draft)

    def roll_back(self, sequences: list[Sequence]) -> None:
        """Call after committing: the cache forgets what was scored and not committed."""
        self.reader.roll_back(sequences)

    def forget(self) -> None:
        """Let go of what the cache holds: there is no memory for it."""
        self.reader.forget()
