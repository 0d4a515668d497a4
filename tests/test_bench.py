"""What a bench measures and says: pairs, intervals, what is kept of a killed run, and the conclusion."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from specpipe.bench.answer import answer, best_cells, pays
from specpipe.bench.figures import costs_by_drafted, speedup, summary
from specpipe.bench.grid import Cell, Grid, Setting
from specpipe.bench.record import Decoded, Record, Round
from specpipe.clock import PARTS
from specpipe.config import compose
from specpipe.errors import UserError
from specpipe.sequence import Step
from specpipe.stats import paired_ratio

GREEDY = Setting(0.0, 1)
PLAIN, NGRAM = Cell(GREEDY, "none", None, 0), Cell(GREEDY, "ngram", "rejection", 4)


def step(
    drafted: int = 0, accepted: int = 0, *, verify: float = 1.0, draft: float = 0.0, prefill: bool = False
) -> Step:
    made = Step(drafted, accepted, [7] * (accepted + 1), [0.5] * min(drafted, accepted + 1), drafted, prefill)
    made.seconds = dict.fromkeys(PARTS, 0.0) | {"prefill" if prefill else "verify": verify, "draft": draft}
    return made


def request(prompt: int, *steps: Step, repeat: int = 0, category: str | None = None) -> Decoded:
    return Decoded(repeat, prompt, prompt, category, [step(prefill=True), *steps])


# ---- what is compared ----


def grid(*words: str) -> Grid:
    return Grid(compose("bench", ["target=tiny", *words]), "rejection")


def test_every_combination_is_a_cell_and_plain_decoding_is_first_in_each_setting() -> None:
    made = grid(
        "proposers=[suffix,none,{ngram: {max_ngram: 2}}]",
        "sweep.num_speculative_tokens=[1,4]",
        "sweep.temperature=[0,0.7]",
        "sweep.batch_size=[1,2]",
        "sweep.sampler=[rejection,block]",
    )
    assert made.settings == [Setting(0.0, 1), Setting(0.0, 2), Setting(0.7, 1), Setting(0.7, 2)]
    for setting in made.settings:
        first, *rest = made.cells(setting)
        assert first == Cell(setting, "none", None, 0)
        assert [(c.proposer, c.sampler, c.gamma) for c in rest] == [
            (proposer, sampler, gamma)
            for proposer in ("suffix", "ngram(max_ngram=2)")
            for sampler in ("rejection", "block")
            for gamma in (1, 4)
        ]
    assert made.longest == 4
    assert made.generation(Setting(0.7, 1)).temperature == 0.7


def test_a_key_that_has_no_value_of_its_own_can_be_given_one() -> None:
    (_, draft) = grid("proposers=[{draft: {model: DIR}}]").cells(Setting(0.0, 1))
    assert draft.proposer == "draft(model=DIR)"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("proposers=ngram", "proposers: 'ngram' is not a list of proposers"),
        ("proposers=[ngramm]", "proposers[0]: no option 'ngramm'"),
        ("proposers=[ngram,ngram]", "proposers: names one proposer twice."),
        ("proposers=[{ngram: {max_ngrams: 2}}]", "proposers[0]: ngram has no key 'max_ngrams'. Did you mean"),
        ("proposers=[{ngram: 2}]", "proposers[0]: {'ngram': 2} is not a proposer with its settings"),
        ("sweep.num_speculative_tokens=[0,1]", "sweep.num_speculative_tokens: 0 is plain decoding"),
        ("sweep.num_speculative_tokens=3", "sweep.num_speculative_tokens: 3 is not a list."),
        ("sweep.num_speculative_tokens=[]", "sweep.num_speculative_tokens: [] is empty or has a value twice."),
        ("sweep.batch_size=[1,1]", "sweep.batch_size: [1, 1] is empty or has a value twice."),
        ("sweep.batch_size=[x]", "sweep.batch_size: 'x'"),
        ("sweep.temperature=[-1]", "sweep.temperature: -1"),
        ("sweep.sampler=[rejecton]", "sweep.sampler: no option 'rejecton'"),
        ("peers=[vllm]", "peers: 'vllm' is not one of hf."),
        ("num_speculative_tokens=0", "num_speculative_tokens: 0 is plain decoding"),
    ],
)
def test_what_cannot_be_measured_is_named(words: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        grid(words)
    assert str(caught.value).startswith(message)


# ---- pairs ----


def test_a_paired_ratio_is_that_of_the_totals() -> None:
    value, low, high = paired_ratio([((10, 1), (10, 2)), ((30, 5), (30, 10))])
    assert value == pytest.approx((40 / 6) / (40 / 12)) == 2
    assert low == pytest.approx(2)  # each prompt says the same
    assert high == pytest.approx(2)


def test_a_slow_prompt_is_slow_on_both_sides_and_does_not_widen_the_interval() -> None:
    pairs = [((100, t), (100, 1.5 * t)) for t in (1.0, 10.0, 3.0, 30.0)]
    value, low, high = paired_ratio(pairs)
    assert (value, low, high) == pytest.approx((1.5, 1.5, 1.5))
    shuffled = [(ours, theirs) for (ours, _), (_, theirs) in zip(pairs, pairs[1:] + pairs[:1], strict=True)]
    assert paired_ratio(shuffled)[0] == pytest.approx(1.5)
    _, low, high = paired_ratio(shuffled)  # a wrong variant: pairs torn apart
    assert low is not None
    assert high is not None
    assert high / low > 10


def test_intervals_over_prompts_hold_the_truth_as_often_as_they_say() -> None:
    chance, held, runs = random.Random(5), 0, 400
    for _ in range(runs):
        pairs = []
        for _ in range(20):
            hard, gain = chance.lognormvariate(0, 0.8), 1.5 * chance.lognormvariate(-0.02, 0.2)
            pairs.append(((100, hard), (100, hard * gain)))
        _, low, high = paired_ratio(pairs)
        assert low is not None
        assert high is not None
        # of total times, gains weigh as the prompts do: their mean is 1.5
        held += low <= 1.5 <= high
    assert 0.9 <= held / runs <= 0.99


@pytest.mark.parametrize("pairs", [[], [((0, 1), (1, 1))], [((1, 0), (1, 1))]])
def test_without_work_there_is_no_ratio(pairs: Any) -> None:
    assert paired_ratio(pairs) == (None, None, None)


def test_one_prompt_has_a_ratio_and_no_interval() -> None:
    assert paired_ratio([((4, 1), (4, 2))]) == (2, None, None)


def test_the_prompt_pass_is_on_neither_side() -> None:
    plain = [request(0, step(), step(), step())]
    ours = [request(0, step(2, 2))]
    assert speedup(ours, plain)["mean"] == 3
    ours[0].steps[0].seconds["prefill"] = 100.0
    assert speedup(ours, plain)["mean"] == 3


def test_repeats_of_a_prompt_are_one_cluster() -> None:
    plain = [request(p, step(verify=v), repeat=r) for r in (0, 1) for p, v in ((0, 1.0), (1, 2.0))]
    ours = [request(p, step(1, 1, verify=1.5), repeat=r) for r in (0, 1) for p in (0, 1)]
    once = speedup(ours[:2], plain[:2])
    assert speedup(ours, plain) == pytest.approx(once)  # measuring twice is not knowing more prompts


def test_prompts_that_share_passes_do_not_make_their_common_time_sure() -> None:
    """All slow or all fast together: over prompts alone the interval would be too narrow, or have no width at all."""
    plain = [request(p, step(verify=1.0)) for p in range(4)]
    ours = [request(p, step(1, 0, verify=1.0 if p < 2 else 2.0)) for p in range(4)]
    alone, shared = speedup(ours, plain), speedup(ours, plain, stretch=2)
    assert shared["mean"] == alone["mean"]
    assert shared["high"] - shared["low"] > 2 * (alone["high"] - alone["low"]) > 0
    assert speedup(ours, plain, stretch=4) == {"mean": alone["mean"], "low": None, "high": None}
    again = [request(p, step(1, 0, verify=2.0), repeat=1) for p in range(4)]
    twice = [*plain, *(request(p, step(verify=1.0), repeat=1) for p in range(4))]
    assert speedup(ours[:2] + again[:2], twice[:2] + twice[4:6], stretch=4)["low"] is not None


# ---- figures of a cell ----


def test_a_cell_compares_its_costs_with_plain_steps() -> None:
    plain = [request(p, step(verify=2.0), step(verify=2.0)) for p in (0, 1)]
    ours = [request(p, step(4, 1, verify=3.0, draft=0.8)) for p in (0, 1)]
    figures = summary(NGRAM, ours, plain)
    assert figures["cost_ratio"] == pytest.approx(0.8 / 4 / 2.0)
    assert figures["operations"] == pytest.approx((4 * 1.1 + 1) / 2)
    alpha = figures["break_even_alpha"]
    assert sum(alpha**i for i in range(5)) == pytest.approx((0.8 + 3.0) / 2.0)
    assert figures["speedup"]["mean"] == pytest.approx((2 / 3.8) / (1 / 2.0))
    assert (figures["identical_texts"], figures["texts"]) == (2, 2)  # both say three sevens
    ours[0].steps[-1].tokens[-1] = 8
    assert summary(NGRAM, ours, plain)["identical_texts"] == 1


def test_steps_are_costed_by_what_they_drafted() -> None:
    shared = step(2, 0, verify=4.0, draft=2.0)
    shared.rows = 2
    costs = costs_by_drafted([step(prefill=True, verify=99.0), step(verify=1.0), step(verify=3.0), shared])
    assert {k: (cost.steps, cost.draft, cost.verify) for k, cost in costs.items()} == {
        0: (2, 0.0, 2.0),
        2: (1, 1.0, 2.0),
    }


# ---- what is kept ----


def recorded(folder: Path) -> tuple[Record, Path]:
    record, file = Record(), folder / "steps.jsonl"
    record.keep(file)
    first, second = Round(0, GREEDY), Round(1, GREEDY)
    for round_ in (first, second):
        for stretch in (0, 1):
            for cell in (PLAIN, NGRAM):
                if (round_, stretch, cell) != (second, 1, NGRAM):
                    made = request(stretch, step(3, 2), repeat=round_.repeat, category="math")
                    record.add(round_, stretch, cell, [made])
        if round_ is first:
            record.end(round_)
    return record, file


def test_a_round_that_was_cut_counts_as_far_as_all_cells_came(tmp_path: Path) -> None:
    record, _ = recorded(tmp_path)
    whole = record.whole([PLAIN, NGRAM])
    places = [(each.repeat, each.conversation) for each in whole[NGRAM]]
    assert places == [(0, 0), (0, 1), (1, 0)]
    assert [(each.repeat, each.conversation) for each in whole[PLAIN]] == places


def test_another_run_goes_on_behind_the_rounds_that_were_done(tmp_path: Path) -> None:
    record, file = recorded(tmp_path)
    record.close()
    with file.open("a") as lines:
        lines.write('{"round": {"repeat": 1, "tempe')  # a kill in the middle of a line
    later = Record()
    later.keep(tmp_path / "again.jsonl")
    later.take_over(file)
    assert later.done == [Round(0, GREEDY)]
    taken = later.whole([PLAIN, NGRAM])
    expected = [each for each in record.whole([PLAIN, NGRAM])[NGRAM] if each.repeat == 0]
    assert taken[NGRAM] == expected
    later.close()
    once_more = Record()
    once_more.take_over(tmp_path / "again.jsonl")
    assert once_more.whole([PLAIN, NGRAM]) == taken


# ---- the conclusion ----


def cell(proposer: str, mean: float, low: float | None, high: float | None, **more: Any) -> dict[str, Any]:
    figures = {
        "speedup": {"mean": mean, "low": low, "high": high},
        "alpha": {"mean": 0.5, "low": 0.4, "high": 0.6},
        "break_even_alpha": 0.31,
        "tokens_per_s": 10.0,
        "predicted_speedup": {"formula": mean, "costs": more.pop("predicted", mean)},
    }
    names = {"sampler": "rejection", "temperature": 0.0, "batch_size": 1, "num_speculative_tokens": 5, "peer": False}
    return {"proposer": proposer, **names, **more, "summary": figures}


def test_the_answer_names_the_fastest_with_its_interval_and_its_limit() -> None:
    cells = [cell("none", 1.0, None, None), cell("ngram", 1.2, 1.1, 1.3), cell("mlp", 1.9, 1.8, 2.0)]
    cells.append(cell("hf", 9.0, 8.0, 9.9, peer=True, num_speculative_tokens=None))
    [best] = best_cells(cells)
    assert (best["proposer"], best["pays"]) == ("mlp", True)
    said = (
        "mlp with 5 drafted tokens is 1.90x [1.80, 2.00] as fast as plain decoding; below alpha 0.31 it stops paying."
    )
    assert answer([best], []) == said


@pytest.mark.parametrize(
    ("mean", "low", "high", "verdict", "words"),
    [
        (1.1, 0.9, 1.3, None, "which may be chance"),
        (0.8, 0.7, 0.9, False, "No proposer is faster than plain decoding"),
        (1.4, None, None, None, "which may be chance"),
        (1.2, 1.1, 1.3, True, "as fast as plain decoding"),
    ],
)
def test_what_may_be_chance_is_not_called_faster(
    mean: float, low: float | None, high: float | None, verdict: bool | None, words: str
) -> None:
    best = best_cells([cell("none", 1.0, None, None), cell("ngram", mean, low, high)])
    assert pays(best[0]["speedup"]) is verdict
    assert words in answer(best, [])


def test_each_temperature_and_batch_size_has_its_own_best() -> None:
    cells = [
        cell(proposer, mean, mean - 0.05, mean + 0.05, temperature=t, batch_size=size)
        for t, size, means in ((0.0, 1, (1.2, 1.5)), (0.0, 8, (0.9, 0.8)), (1.0, 1, (1.3, 1.1)))
        for proposer, mean in (("none", 1.0), *zip(("ngram", "mlp"), means, strict=True))
    ]
    best = best_cells(cells)
    assert [(b["temperature"], b["batch_size"], b["proposer"], b["pays"]) for b in best] == [
        (0.0, 1, "mlp", True),
        (0.0, 8, "ngram", False),
        (1.0, 1, "ngram", True),
    ]
    assert answer(best, []).count("emperature") == 3


def test_what_was_predicted_to_be_best_is_said_beside_what_was() -> None:
    cells = [cell("none", 1.0, None, None), cell("ngram", 1.2, 1.1, 1.3, predicted=1.6), cell("mlp", 1.5, 1.4, 1.6)]
    assert best_cells(cells)[0]["predicted_best"]["proposer"] == "ngram"
    for each in cells:
        each["summary"]["predicted_speedup"] = {"formula": None, "costs": None}
    assert best_cells(cells)[0]["predicted_best"] is None


def test_nothing_is_said_of_nothing() -> None:
    assert best_cells([]) == []
    assert answer([], []) == "Nothing was measured yet."
    assert answer([], [cell("none", 1.0, None, None)]).startswith("Nothing with a draft was measured")


@pytest.mark.parametrize(
    ("low", "high", "chance"),
    [(0.6, 0.9, False), (0.6, 1.1, True), (None, None, True)],
    ids=["sure", "wide", "unknown"],
)
def test_an_answer_of_no_says_where_it_may_be_chance(low: float | None, high: float | None, chance: bool) -> None:
    best = {
        "temperature": 0.0,
        "batch_size": 4,
        "proposer": "suffix",
        "num_speculative_tokens": 5,
        "speedup": {"mean": 0.75, "low": low, "high": high},
        "pays": False,
        "break_even_alpha": None,
    }
    assert answer([best], []).endswith("which may be chance.") == chance
