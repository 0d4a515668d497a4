"""The bias for what the text said before: which tokens gain how much, and that rejected drafts leave nothing behind."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from specpipe.chance import Chance
from specpipe.errors import UserError
from specpipe.proposers.copying import Copying, Followers
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings


def sequence_of(tokens: list[int]) -> Sequence:
    return Sequence(tokens, GenerationSettings(), chance=Chance(0))


def followed(text: list[int], n: int) -> set[int]:
    """What followed the last n tokens before, by looking everywhere."""
    last = text[len(text) - n :]
    return {text[i] for i in range(n, len(text)) if text[i - n : i] == last and len(text) >= n}


@pytest.mark.parametrize("seed", range(20))
def test_followers_are_those_of_the_whole_text_drafts_included(seed: int) -> None:
    """Looked up as the text grows, beside drafts that are forgotten again."""
    chance = random.Random(seed)
    text, known = [chance.randrange(4)], Followers(3)
    while len(text) < 30:
        known.catch_up(text)
        for _ in range(3):
            draft = [chance.randrange(4) for _ in range(chance.randrange(5))]
            assert known.of(text, draft) == [followed([*text, *draft], n) for n in (1, 2, 3)]
        text += [chance.randrange(4) for _ in range(chance.randrange(1, 4))]


def test_gains_add_up_over_the_lengths() -> None:
    """Behind 1 2: 3 followed both, 4 and 6 the 2 alone; 5 never did, and what cannot be said stays so."""
    logits = torch.tensor([0.0, 0.5, 0.0, 0.0, 0.0, 0.0, -torch.inf])
    raised = Copying([1.0, 2.0]).raised(logits, sequence_of([1, 2, 3, 0, 2, 4, 2, 6, 1, 2]), [])
    assert raised.tolist() == [0.0, 0.5, 0.0, 3.0, 1.0, 0.0, -torch.inf]
    assert logits.tolist() == [0.0, 0.5, 0.0, 0.0, 0.0, 0.0, -torch.inf]


def test_nothing_changes_without_a_bias_or_a_repetition() -> None:
    logits = torch.zeros(5)
    assert Copying([]).raised(logits, sequence_of([1, 1, 1]), []) is logits
    assert Copying([1.0]).raised(logits, sequence_of([1, 2, 3]), []) is logits


@pytest.mark.parametrize("bias", ["1,2", 3, [-1.0], ["much"], [float("nan")], [1e9]])
def test_a_bias_that_is_none_is_refused(bias: Any) -> None:
    with pytest.raises(UserError, match="copy_bias"):
        Copying(bias)
