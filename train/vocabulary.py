"""The ids that a draft keeps: those that the target's own text is mostly made of, and those it must be able to say."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specpipe.errors import UserError
from specpipe.verifier.targets import Target

ALWAYS = "\n 0123456789"  # characters whose tokens are kept, if the tokenizer has such


def kept_ids(generated: np.ndarray, target: Target, size: int | None) -> Tensor:
    """[D] ids, ascending: the most frequent in `generated`, of equals the lowest, with all special and end ids.

    Args:
        generated: ids that the target wrote.
        target: whose ids they are.
        size: D; None or more than the target has: all of them.

    Raises:
        UserError: if not even the ids that must be kept fit.
    """
    if size is None or size >= target.vocabulary:
        return torch.arange(target.vocabulary)
    must = sorted(_must(target))
    if len(must) > size:
        what = f"{size} ids are too few; {len(must)} special ones and digits must be kept"
        raise UserError(f"{what}.", key="student.vocabulary")
    counts = np.bincount(generated, minlength=target.vocabulary)
    ranked = np.lexsort((np.arange(len(counts)), -counts))
    others = ranked[~np.isin(ranked, must)][: size - len(must)]
    return torch.tensor(sorted([*must, *others.tolist()]))


def _must(target: Target) -> set[int]:
    single = (target.tokenizer.encode(letter, add_special_tokens=False) for letter in ALWAYS)
    letters = {ids[0] for ids in single if len(ids) == 1}
    return {each for each in {*target.tokenizer.all_special_ids, *target.eos_ids, *letters} if each < target.vocabulary}
