"""A greedy draft is the best token of its law, also where the law is never made."""

from __future__ import annotations

import pytest
import torch

from specpipe.distribution import argmax
from specpipe.proposers.drawing import Vocabulary

SIZE = 12
IDS = {
    "all ids": None,
    "some ids": torch.tensor([0, 3, 4, 8, 11]),
    "ids out of order": torch.tensor([4, 3, 8]),
    "padding": torch.tensor([3, 5, 12, 13]),
    "no counterpart": torch.tensor([-1, 2, 5]),
}
IN_ORDER = ("all ids", "some ids")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", IDS)
def test_the_best_token_is_that_of_the_placed_logits(kind: str, dtype: torch.dtype) -> None:
    """Whole numbers, so that many are equal: of these the lowest id."""
    words = Vocabulary(SIZE, IDS[kind])
    generator = torch.Generator().manual_seed(3)
    for _ in range(200):
        count = SIZE if IDS[kind] is None else len(IDS[kind])
        logits = torch.randint(-2, 3, (count,), generator=generator).to(dtype)
        gained = torch.randint(0, SIZE, (3,), generator=generator).tolist()
        gains = {token: float(token % 3 + 1) for token in gained}
        law = words.placed(logits).float().clone()
        for token, gain in gains.items():
            law[token] += gain
        best = words.best(logits, gains)
        assert best == (int(argmax(law)) if kind in IN_ORDER else None)


def test_heads_of_fewer_or_more_rows_than_there_are_ids() -> None:
    words = Vocabulary(SIZE)
    assert words.best(torch.arange(20.0), {}) == SIZE - 1  # the rest is padding
    assert words.best(torch.arange(5.0), {7: 100.0, 2: 9.0}) == 2  # there is no 7


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_where_there_is_no_best_number_somebody_else_has_to_look(bad: float) -> None:
    logits = torch.full((SIZE,), -torch.inf)
    logits[4] = bad
    assert Vocabulary(SIZE).best(logits, {5: 1.0}) is None
