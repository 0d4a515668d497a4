"""A greedy draft is the best token of its law, also where the law is never made; a drawn one is drawn from its q."""

from __future__ import annotations

import pytest
import torch

from specpipe.chance import Chance
from specpipe.distribution import argmax
from specpipe.proposers.drawing import Drawing, Row, Vocabulary
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings

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


@pytest.mark.parametrize(
    "settings", [{}, {"top_p": 0.6}, {"top_k": 2}, {"min_p": 0.3}, {"typical_p": 0.7}, {"temperature": 0.5}], ids=str
)
@pytest.mark.parametrize("kind", IDS)
def test_a_law_over_a_drafts_own_ids_is_the_law_over_all_ids(kind: str, settings: dict[str, float]) -> None:
    """Same tokens from the same random numbers, same q; a `min_confidence` that ends nothing asks for all ids."""
    words = Vocabulary(SIZE, IDS[kind])
    generator = torch.Generator().manual_seed(5)
    asked = GenerationSettings(max_new_tokens=50, **{"temperature": 1.0} | settings)
    rows = [Row(Sequence([1, 2, 1], asked, chance=Chance(7)), []) for _ in range(2)]
    for _ in range(30):
        logits = torch.randn(SIZE if IDS[kind] is None else len(IDS[kind]), generator=generator)
        for row, confidence in zip(rows, (0.0, 1e-9), strict=True):
            assert Drawing("sample", confidence, [1.0, 0.5]).take(row, logits, words)
    assert rows[0].drafted == rows[1].drafted
    assert all(torch.allclose(a, b) for a, b in zip(rows[0].laws, rows[1].laws, strict=True))
