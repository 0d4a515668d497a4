"""Logits to probabilities, and drawing: theory.md section 9, with Hugging Face's processors as reference."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from specpipe.audit.tables import FixedProposer
from specpipe.distribution import NUCLEUS_HEAD, Prefix, Rows, draw, probabilities
from specpipe.errors import UserError
from specpipe.settings import GenerationSettings
from tests.stand_ins import pipeline_of

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


def reference(settings: dict[str, Any], prompt: list[int], output: list[int], stops: list[int], row: Tensor) -> Tensor:
    """Hugging Face's processors in its own order; penalties over the output are not among them."""
    processors = LogitsProcessorList()
    if "logit_bias" in settings:
        processors.append(SequenceBiasLogitsProcessor({(t,): b for t, b in settings["logit_bias"].items()}))
    if "repetition_penalty" in settings:
        processors.append(RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    if "banned_token_ids" in settings:
        processors.append(NoBadWordsLogitsProcessor([[t] for t in settings["banned_token_ids"]], eos_token_id=None))
    if "min_new_tokens" in settings:
        processors.append(MinNewTokensLengthLogitsProcessor(len(prompt), settings["min_new_tokens"], stops))
    processors.append(TemperatureLogitsWarper(settings["temperature"]))
    if "top_k" in settings:
        processors.append(TopKLogitsWarper(settings["top_k"]))
    if "top_p" in settings:
        processors.append(TopPLogitsWarper(settings["top_p"]))
    if "min_p" in settings:
        processors.append(MinPLogitsWarper(settings["min_p"]))
    if "typical_p" in settings:
        processors.append(TypicalLogitsWarper(settings["typical_p"]))
    return processors(torch.tensor([prompt + output]), row[None].clone())[0].softmax(-1)


EACH = {
    "logit_bias": {3: 1.5, 5: -2.0},
    "repetition_penalty": 1.4,
    "banned_token_ids": [2, 7],
    "min_new_tokens": 4,
    "top_k": 20,
    "top_p": 0.83,
    "min_p": 0.07,
    "typical_p": 0.71,
}


@pytest.mark.parametrize(
    "names", [*([name] for name in EACH), list(EACH), ["repetition_penalty", "min_p", "typical_p"]]
)
@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_every_setting_is_hugging_faces(names: list[str], temperature: float) -> None:
    """Alone, some and all together, on random logits; ids repeat in prompt and output, one stop id is banned early."""
    generator = torch.Generator().manual_seed(len(names))
    for _ in range(20):
        row = torch.randn(60, generator=generator) * 2
        prompt, output = [1, 5, 5, 9], [3, 5, 11]
        settings = {"temperature": temperature, **{name: EACH[name] for name in names}}
        ours = probabilities(row, GenerationSettings(**settings), Prefix(prompt, output, frozenset([4])))
        assert torch.allclose(ours, reference(settings, prompt, output, [4], row), atol=1e-6)


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    settings = GenerationSettings(temperature=1.0, frequency_penalty=0.5, presence_penalty=0.25)
    p = probabilities(torch.zeros(4), settings, Prefix([0, 0, 0], [1, 1, 2]))
    assert p.tolist() == pytest.approx(torch.tensor([0, -1.25, -0.75, 0]).softmax(-1).tolist())


def test_penalties_at_each_row_of_a_block() -> None:
    """theory.md section 9: frequency .5, drafts (7, 7, 7): 0, .5, 1.0 in rows 1-3 and 1.5 in the bonus row."""
    settings = GenerationSettings(temperature=1.0, frequency_penalty=0.5)
    rows = Rows(torch.zeros(4, 9), settings, Prefix([1], []), [7, 7, 7])
    lowered = [(row[0] / row[7]).log().item() for row in (rows[0], rows[1], rows[2], rows[3])]
    assert lowered == pytest.approx([0, 0.5, 1.0, 1.5], abs=1e-6)
    assert torch.equal(rows.all(), torch.stack([rows[i] for i in range(4)]))


def test_repetition_penalty_counts_prompt_and_output() -> None:
    """C39: id 5 in the prompt, logits 2.0 and 1.8, penalty 1.3: 6 5 5 5 for every k; penalty 0 is refused."""
    row = torch.full((8,), -20.0, dtype=torch.float64)
    row[5], row[6] = 2.0, 1.8
    for gamma in (0, 1, 2, 3, 4):
        guess = FixedProposer(lambda tokens, k: [5] * k)
        pipeline = pipeline_of(lambda ids: row, 8, guess, gamma=gamma, repetition_penalty=1.3, max_new_tokens=4)
        assert pipeline.generate([[5]])[0].token_ids == [6, 5, 5, 5]
    with pytest.raises(UserError, match="repetition_penalty"):
        GenerationSettings(repetition_penalty=0)


def test_options_reach_every_verified_token() -> None:
    """C38: every row (2, 1, 0), drafts 0 0 0: a bias of -inf on 0 accepts none; min_p .4 leaves id 0 at each place."""
    row = torch.tensor([2.0, 1.0, 0.0], dtype=torch.float64)
    zeros = FixedProposer(lambda tokens, k: [0] * k)
    banned = pipeline_of(lambda ids: row, 3, zeros, gamma=3, logit_bias={0: -math.inf}, max_new_tokens=8)
    done = banned.generate([[1]])[0]
    assert (done.token_ids, done.spec_decode["num_accepted_draft_tokens"]) == ([1] * 8, 0)
    only = pipeline_of(lambda ids: row, 3, zeros, gamma=3, temperature=1.0, min_p=0.4, max_new_tokens=8)
    assert only.generate([[1]])[0].token_ids == [0] * 8
    rows = Rows(row.repeat(4, 1), GenerationSettings(temperature=1.0, min_p=0.3), drafts=[0, 0, 0])
    for i in range(4):
        assert rows[i].tolist() == pytest.approx([0.7311, 0.2689, 0], abs=5e-5)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({"min_p": 0.25}, 3), ({"min_p": 0.31}, 2), ({"typical_p": 0.7}, 2), ({"top_p": 0.84, "min_p": 0.2}, 3)],
)
def test_worked_examples_of_the_filters(settings: dict[str, float], kept: int) -> None:
    assert sum(p > 0 for p in law(BASE, **settings)) == kept
    assert law(BASE, typical_p=0.2) == pytest.approx([0, 1, 0, 0])


def test_ids_the_target_lacks_are_refused() -> None:
    for key, value in {"banned_token_ids": [3], "stop_token_ids": [9], "logit_bias": {5: 1.0}}.items():
        with pytest.raises(UserError, match=f"generation.{key}.*its ids end at 2"):
            pipeline_of(lambda ids: torch.zeros(3), 3, FixedProposer(lambda t, k: []), **{key: value})


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
    for temperature in (1e-6, 1e-30):
        assert law(torch.tensor([1.0, 3.0, 2.0]), temperature=temperature) == [0, 1, 0]
    assert law(torch.tensor([1.0, 3.0, 2.0]), temperature=1e300) == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(
    "settings",
    [{"logit_bias": {1: 1e39}}, {"presence_penalty": 1e39}, {"repetition_penalty": 1e39}, {"min_new_tokens": 9}],
)
def test_values_that_cannot_be_honoured_are_refused_by_name(settings: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(settings))):
        GenerationSettings(max_new_tokens=8, **settings)


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
    monkeypatch.setattr("specpipe.distribution.probabilities", lambda logits, *_: made.append(1) or logits.softmax(-1))
    rows = Rows(torch.randn(6, 10), GenerationSettings(temperature=1.0))
    rows[0], rows[0], rows[1]
    assert len(made) == 2
