"""Logits to probabilities, and drawing: theory.md section 9, with Hugging Face's processors as reference."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specpipe.distribution import NUCLEUS_HEAD, Rows, draw, probabilities
from specpipe.errors import UserError
from specpipe.settings import GenerationSettings

BASE = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64).log()


def law(logits: torch.Tensor, **settings: float) -> list[float]:
    return probabilities(logits, GenerationSettings(**{"temperature": 1.0, **settings})).tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.6, [0.625, 0.375, 0, 0]), (0.85, [0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0]), (0.96, [0.5, 0.3, 0.15, 0.05])],
)
def test_the_token_that_crosses_top_p_stays(top_p: float, kept: list[float]) -> None:
    assert law(BASE, top_p=top_p) == pytest.approx(kept)


def test_ties_with_the_kth_stay() -> None:
    assert law(torch.tensor([0.4, 0.2, 0.2, 0.2]).log(), top_k=2) == pytest.approx([0.4, 0.2, 0.2, 0.2])


def test_order_is_temperature_top_k_top_p() -> None:
    assert sum(p > 0 for p in law(BASE, temperature=0.5, top_p=0.6)) == 1
    assert sum(p > 0 for p in law(BASE, top_k=3, top_p=0.84)) == 2


def test_at_least_one_token_is_kept() -> None:
    assert law(BASE, top_p=1e-9) == [1, 0, 0, 0]


@pytest.mark.parametrize("size", [50, 1000, 5000])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
@pytest.mark.parametrize(("k", "p"), [(0, 0.9), (40, 1.0), (40, 0.8), (0, 0.3), (0, 0.999)])
def test_agrees_with_hugging_face(size: int, scale: float, k: int, p: float) -> None:
    logits = torch.randn(4, size, generator=torch.Generator().manual_seed(size)) * scale
    wanted = TemperatureLogitsWarper(0.8)(torch.zeros(4, 1), logits)
    wanted = TopKLogitsWarper(k)(torch.zeros(4, 1), wanted) if k else wanted
    wanted = TopPLogitsWarper(p)(torch.zeros(4, 1), wanted) if p < 1 else wanted
    ours = probabilities(logits, GenerationSettings(temperature=0.8, top_k=k, top_p=p))
    # A token on the very edge of the nucleus may fall either way by the last bit of a sum: its mass is the tolerance.
    edge = wanted.softmax(-1).masked_fill(wanted == -torch.inf, 1).min().item() if p < 1 else 0
    assert (ours - wanted.softmax(-1)).abs().max().item() <= 1e-6 + edge


def test_nucleus_head_and_full_sort_agree() -> None:
    """The shortcut over the largest values gives what the full sort gives, ties at the cut included."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        logits = torch.randint(0, 6, (NUCLEUS_HEAD * 2,), generator=generator).double()  # many equal values
        top_p = torch.rand((), generator=generator).item() * 0.98 + 0.01
        p = logits.softmax(-1)
        ranked, order = p.sort(descending=True, stable=True)
        kept = order[(ranked.cumsum(-1) - ranked) < top_p]
        wanted = torch.zeros_like(p).index_copy(0, kept, p[kept])
        assert torch.allclose(
            probabilities(logits, GenerationSettings(temperature=1.0, top_p=top_p)), wanted / wanted.sum()
        )


def test_greedy_is_the_lowest_id_of_the_best() -> None:
    """C10, C17: temperature 0 is a branch of its own; 0, 0.0 and "0.0" are the same, 1e-6 agrees with it."""
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0])
    assert law(logits, temperature=0.0) == [0, 1, 0, 0]
    assert GenerationSettings(temperature="0.0").temperature == 0  # type: ignore[arg-type]
    assert law(torch.tensor([1.0, 3.0, 2.0]), temperature=1e-6) == [0, 1, 0]


@pytest.mark.parametrize("temperature", [-1, math.nan, math.inf, "warm", None, True])
def test_a_temperature_that_is_none_is_refused_by_name(temperature: object) -> None:
    """C17."""
    with pytest.raises(UserError, match="temperature"):
        GenerationSettings(temperature=temperature)  # type: ignore[arg-type]


def test_half_precision_logits_are_computed_in_float32() -> None:
    """C13: in float16 both probabilities would underflow and the draft be accepted without question."""
    p = probabilities(torch.tensor([0, -20.75], dtype=torch.float16), GenerationSettings(temperature=1.0))
    q = probabilities(torch.tensor([0, -17.75], dtype=torch.float16), GenerationSettings(temperature=1.0))
    assert p.dtype == torch.float32
    assert p[1].item() == pytest.approx(9.74e-10, rel=1e-3)
    assert (p[1] / q[1]).item() == pytest.approx(0.049787, abs=1e-6)


def test_a_draft_law_follows_the_temperature() -> None:
    """C16: 4,000 draws at T = 1 look like the law, not like its argmax."""
    import random

    p = probabilities(torch.tensor([2, 1.5, 1, 0.5]), GenerationSettings(temperature=1.0))
    source = random.Random(0)
    counts = [0] * 4
    for _ in range(4000):
        counts[draw(p, source.random())] += 1
    chi2 = sum((n - 4000 * w) ** 2 / (4000 * w) for n, w in zip(counts, p.tolist(), strict=True))
    assert chi2 < 21.1  # p = 1e-4 at 3 degrees of freedom


@pytest.mark.parametrize("v", [0.0, 2**-53, 0.5, 1 - 2**-53])
def test_a_token_without_mass_is_never_drawn(v: float) -> None:
    law = torch.tensor([0, 0, 0.25, 0, 0.75, 0, 0])
    assert law[draw(law, v)] > 0
    assert law[draw(law * 1e-30, v)] > 0
    assert law[draw(law.float() * 3, v)] > 0


def test_draw_inverts_the_cdf() -> None:
    law = torch.tensor([0.5, 0.0, 0.3, 0.2])
    assert [draw(law, v) for v in (0, 0.49, 0.5, 0.79, 0.81)] == [0, 0, 2, 2, 3]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_an_error_not_a_token(bad: float, temperature: float) -> None:
    p = probabilities(torch.tensor([1.0, bad, 0.0]), GenerationSettings(temperature=temperature))
    with pytest.raises(FloatingPointError):
        draw(p, 0.5)


def test_rows_are_made_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejection at the first draft must not cost the top-p of the rows behind it."""
    made: list[int] = []
    monkeypatch.setattr("specpipe.distribution.probabilities", lambda logits, _: made.append(1) or logits.softmax(-1))
    rows = Rows(torch.randn(6, 10), GenerationSettings(temperature=1.0))
    rows[0], rows[0], rows[1]
    assert len(made) == 2
