"""The page of a bench: the answer first, charts of what result.json holds, a table that sorts, whatever is missing."""

from __future__ import annotations

import copy
import html
import json
import math
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from specpipe.report import charts
from specpipe.report.bench import NOTHING, bench_page
from specpipe.report.bench_charts import PARTS, View
from specpipe.report.charts import COLOURS, GREY, Look, Point, Series, crossings, looks
from specpipe.report.page import ABSENT
from tests.test_report import Reader

CATEGORIES = [
    *("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities"),
    *("translation", "summarization", "qa", "math_reasoning", "rag"),
]
# alpha at temperature 0 and 1, and what drafting one token costs in plain steps
PROPOSERS = {
    "ngram": (0.52, 0.34, 0.002),
    "suffix": (0.6, 0.4, 0.004),
    "distilled": (0.68, 0.62, 0.13),
    "mlp": (0.55, 0.47, 0.05),
    "cascade": (0.66, 0.5, 0.045),
}
GAMMAS = range(1, 9)
EVIL = "</script><script>alert(1)</script><!-- <b>\"'&amp;"
PLAIN_SPEED = 28.5  # tokens/s of one request


def spread(mean: float, reach: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - reach, "high": mean + reach}


def block(alpha: float, c: float, gamma: int, batch_size: int, texts: int) -> dict[str, Any]:
    """The figures of a proposer that follows the formula, on a machine where checking long drafts is not free."""
    tokens = (1 - alpha ** (gamma + 1)) / (1 - alpha)
    verify = 1 + 0.035 * gamma * batch_size**0.8
    faster = tokens / (verify + gamma * c + 0.02)
    share = [alpha**i for i in range(1, gamma + 1)]
    reach = 0.4 / math.sqrt(texts)
    return {
        "new_tokens": 128 * texts,
        "tokens_per_s": PLAIN_SPEED * batch_size**0.7 * faster,
        "tokens_per_target_pass": tokens,
        "time_to_first_token_s": 0.21,
        "timing": {"prefill": 4.0, "draft": gamma * c, "verify": verify, "accept": 0.015, "other": 0.005},
        "spec_decode": {
            "num_spec_steps": 900,
            "draft_acceptance_rate": sum(share) / gamma,
            "mean_acceptance_length": tokens,
            "per_position_acceptance": share,
            "per_position_conditional": [alpha] * gamma,
        },
        "alpha": spread(alpha, 0.2 / math.sqrt(texts)),
        "cost_ratio": c,
        "speedup": spread(faster, reach * faster),
        "predicted_speedup": {
            "formula": tokens / (gamma * c + 1),
            "costs": faster * (1 + 0.03 * math.sin(7 * gamma + 90 * alpha)),
        },
        "break_even_alpha": 0.05 * gamma + c,
        "operations": 1.0 + 0.2 * gamma,
        "identical_texts": texts,
        "texts": texts,
    }


def drafting(
    name: str, gamma: int, temperature: float, batch_size: int, categories: Sequence[str] = CATEGORIES
) -> dict[str, Any]:
    greedy, sampled, c = PROPOSERS[name]
    alpha = sampled if temperature else greedy
    kinds = {
        kind: block(min(0.95, alpha + 0.16 * math.sin(3 * i + len(name))), c, gamma, batch_size, 2)
        for i, kind in enumerate(categories)
    }
    cell = {
        "proposer": name,
        "peer": False,
        "sampler": "rejection",
        "temperature": temperature,
        "batch_size": batch_size,
        "num_speculative_tokens": gamma,
        "repeats": 2,
        "lossless": True,
        "summary": block(alpha, c, gamma, batch_size, 26),
        "categories": kinds,
    }
    if temperature:
        for each in (cell["summary"], *kinds.values()):
            each["identical_texts"] = None
    return cell if categories else {key: value for key, value in cell.items() if key != "categories"}


def plain(temperature: float, batch_size: int, **changed: Any) -> dict[str, Any]:
    figures = {
        "tokens_per_s": PLAIN_SPEED * batch_size**0.7,
        "tokens_per_target_pass": 1.0,
        "time_to_first_token_s": 0.2,
        "timing": {"prefill": 4.0, "draft": 0.0, "verify": 110.0, "accept": 1.5, "other": 0.5},
        "spec_decode": {"num_spec_steps": 0, "draft_acceptance_rate": None, "per_position_acceptance": []},
        "alpha": {"mean": None, "low": None, "high": None},
        "cost_ratio": None,
        "speedup": {"mean": 1.0, "low": None, "high": None},
        "predicted_speedup": None,
        "break_even_alpha": None,
        "operations": 1.0,
    }
    settings = {"proposer": "none", "peer": False, "sampler": None, "num_speculative_tokens": 0, "repeats": 2}
    return settings | {
        "temperature": temperature,
        "batch_size": batch_size,
        "lossless": True,
        "summary": figures,
        **changed,
    }


def peer(name: str, faster: float, temperature: float = 0.0, batch_size: int = 1) -> dict[str, Any]:
    figures = {"tokens_per_s": PLAIN_SPEED * faster, "speedup": spread(faster, 0.05), "time_to_first_token_s": 0.3}
    settings = {"proposer": name, "peer": True, "sampler": None, "num_speculative_tokens": None, "lossless": True}
    settings |= {"temperature": temperature, "batch_size": batch_size, "repeats": 2}
    return settings | {"summary": figures, "categories": dict.fromkeys(CATEGORIES, figures)}


def best_of(cells: Sequence[dict[str, Any]], temperature: float, batch_size: int) -> dict[str, Any]:
    """The entry of summary.best for a setting."""
    here = [
        each
        for each in cells
        if (each["temperature"], each["batch_size"]) == (temperature, batch_size)
        and each["proposer"] != "none"
        and not each["peer"]
    ]
    cell = max(here, key=lambda each: each["summary"]["speedup"]["mean"])
    guess = max(here, key=lambda each: each["summary"]["predicted_speedup"]["costs"])
    low, high = (cell["summary"]["speedup"][end] for end in ("low", "high"))
    names = ("proposer", "sampler", "num_speculative_tokens")
    return {
        "temperature": temperature,
        "batch_size": batch_size,
        **{name: cell[name] for name in names},
        **{name: cell["summary"][name] for name in ("speedup", "alpha", "break_even_alpha")},
        "pays": True if low > 1 else False if high < 1 else None,
        "predicted_best": {name: guess[name] for name in names},
    }


def bench(
    proposers: Sequence[str] = tuple(PROPOSERS),
    gammas: Sequence[int] = GAMMAS,
    temperatures: Sequence[float] = (0.0, 1.0),
    batch_sizes: Sequence[int] = (1, 2, 4, 8),
    categories: Sequence[str] = CATEGORIES,
    peers: Sequence[dict[str, Any]] = (),
    **changed: Any,
) -> dict[str, Any]:
    """result.json of a bench over all these."""
    cells = []
    for temperature in temperatures:
        for size in batch_sizes:
            cells.append(plain(temperature, size))
            cells += [drafting(name, g, temperature, size, categories) for name in proposers for g in gammas]
    best = [best_of(cells, temperature, size) for temperature in temperatures for size in batch_sizes]
    first = best[0]
    said = f"{first['speedup']['mean']:.2f}x [{first['speedup']['low']:.2f}, {first['speedup']['high']:.2f}]"
    sentence = (
        f"{first['proposer']} with {first['num_speculative_tokens']} drafted tokens is {said} as fast as plain decoding"
    )
    return {
        "command": "bench",
        "version": "9.8.7",
        "seed": 41,
        "target": {"model": "SomeLM-1B", "dtype": "bfloat16", "device": "cpu"},
        "verifier": "eager",
        "draft_length": "fixed",
        "generation": "greedy",
        "prompts": {"count": 26, "categories": list(categories) or None, "max_new_tokens": 128},
        "rounds": {"done": 16, "wanted": 16},
        "cells": [*cells, *peers],
        "summary": {
            "answer": f"{sentence}; below alpha {first['break_even_alpha']:.2f} it stops paying.",
            "best": best,
            "speedup": first["speedup"],
            "alpha": first["alpha"],
            "prediction_error": {"formula": 0.213, "costs": 0.0187, "cells": len(cells)},
        },
        **changed,
    }


def small(**changed: Any) -> dict[str, Any]:
    """One setting, two proposers, two kinds of prompt."""
    given: dict[str, Any] = {"gammas": [4], "temperatures": [0.0], "batch_sizes": [1], "categories": CATEGORIES[:2]}
    return bench(**{"proposers": ["ngram", "mlp"], **given, **changed})


class Page(Reader):
    """A page with its figures as plotly gets them, and its tables' rows as texts; scripts are no words."""

    def __init__(self, page: str) -> None:
        self.figures: list[dict[str, Any]] = []
        self.headings: list[str] = []
        self.scripts = 0
        super().__init__(page)

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["h2"]:
            self.headings.append(data)
        if self.open[-1:] != ["script"]:
            super().handle_data(data)
        elif self.tags[-1][1].get("type") == "application/json":
            self.figures.append(json.loads(data))
        else:
            self.scripts += 1

    def figure(self, axis: str) -> dict[str, Any]:
        """The one whose values have this name, or begin with it."""
        [found] = [
            each
            for each in self.figures
            if any(
                each["layout"][side].get("title", {}).get("text", "").startswith(axis) for side in ("xaxis", "yaxis")
            )
        ]
        return found


HEADINGS = [
    "Speedup by kind of prompt",
    "Speedup",
    "Speedup by draft length",
    "Acceptance by temperature",
    "Speedup by batch size",
    "Acceptance by place in the draft",
    "Where the time goes",
    "All that was measured",
    "What was run",
    "How to read this",
]


@pytest.fixture(autouse=True)
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four megabytes are read where they are looked at."""
    monkeypatch.setattr(charts, "library", lambda: Markup("/* plotly.js */"))


def read(result: dict[str, Any]) -> Page:
    return Page(bench_page(result))


def traces(figure: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {each["name"]: each for each in figure["data"] if "name" in each}


# ---- the answer ----


def test_the_answer_comes_first() -> None:
    result = small()
    best, words = result["summary"]["best"][0], read(result).text
    assert words.index(f"{best['speedup']['mean']:.2f}x") < words.index(result["summary"]["answer"])
    assert words.index(result["summary"]["answer"]) < words.index("Speedup by kind of prompt")
    assert f"95 % interval {best['speedup']['low']:.2f} to {best['speedup']['high']:.2f}" in words
    assert f"stops paying below alpha {best['break_even_alpha']:.2f}" in words


@pytest.mark.parametrize(
    ("pays", "word", "tone"), [(True, "faster", "good"), (False, "not faster", "bad"), (None, "may be chance", "warn")]
)
def test_how_sure_the_answer_is_stands_beside_it(pays: bool | None, word: str, tone: str) -> None:
    result = small()
    result["summary"]["best"][0]["pays"] = pays
    page = bench_page(result)
    assert f'<span class="badge {tone}">{word}</span>' in page
    assert f'<h1 class="{tone}">' in page


def test_several_settings_have_a_best_each() -> None:
    result = bench(gammas=[2, 4], temperatures=[0.0, 1.0], batch_sizes=[1, 8])
    page = bench_page(result)
    rows = re.findall(r"<tr><th scope=\"row\">(.*?)</tr>", page.split("</header>")[0], re.DOTALL)
    assert len(rows) == len(result["summary"]["best"]) == 4
    for row, best in zip(rows, result["summary"]["best"], strict=True):
        assert f"{best['proposer']}, gamma {best['num_speculative_tokens']}" in row
        assert f"{best['predicted_best']['proposer']}, gamma" in row
    assert "The best at each" not in bench_page(small())


@pytest.mark.parametrize(("done", "told"), [(3, True), (16, False)])
def test_an_unfinished_bench_says_so_before_its_charts(done: int, told: bool) -> None:
    page = bench_page(small(rounds={"done": done, "wanted": 16}))
    assert ("unfinished" in page.split("<section>")[0]) is told


# ---- the charts ----


@pytest.mark.parametrize(
    ("changed", "missing"),
    [
        ({}, {"Speedup"}),
        ({"gammas": [4]}, {"Speedup", "Speedup by draft length"}),
        ({"temperatures": [1.0]}, {"Speedup", "Acceptance by temperature"}),
        ({"batch_sizes": [2]}, {"Speedup", "Speedup by batch size"}),
        ({"categories": []}, {"Speedup by kind of prompt"}),
    ],
)
def test_there_is_a_chart_for_what_was_varied(changed: dict[str, Any], missing: set[str]) -> None:
    given = {"gammas": [2, 4], "temperatures": [0.0, 1.0], "batch_sizes": [1, 2], "proposers": ["mlp"]}
    assert set(HEADINGS) - set(read(bench(**{**given, **changed})).headings) == missing


def test_speedup_by_kind_shows_each_proposers_best_length() -> None:
    result = bench(["ngram", "distilled"], [2, 4, 7], categories=CATEGORIES[:3])
    figure = read(result).figure("speedup (1")
    bars = traces(figure)
    assert list(bars) == ["ngram", "distilled"]
    cells = [each for each in result["cells"] if (each["temperature"], each["batch_size"]) == (0.0, 1)]
    for name, bar in bars.items():
        best = max(
            (each for each in cells if each["proposer"] == name), key=lambda each: each["summary"]["speedup"]["mean"]
        )
        blocks = [best["summary"], *best["categories"].values()]
        assert bar["y"] == ["all prompts", *CATEGORIES[:3]]
        assert bar["x"] == [each["speedup"]["mean"] for each in blocks]
        assert bar["error_x"]["array"] == [each["speedup"]["high"] - each["speedup"]["mean"] for each in blocks]
        assert bar["error_x"]["arrayminus"] == [each["speedup"]["mean"] - each["speedup"]["low"] for each in blocks]
    [line] = figure["layout"]["shapes"]
    assert line["x0"] == line["x1"] == 1


def test_speedup_by_length_stands_beside_both_predictions() -> None:
    result = bench(["suffix"], temperatures=[0.0], batch_sizes=[1])
    measured, costs, formula = read(result).figure("drafted tokens")["data"]
    figures = [each["summary"] for each in result["cells"] if each["proposer"] == "suffix"]
    for line, dash, values in (
        (measured, "solid", [each["speedup"]["mean"] for each in figures]),
        (costs, "dash", [each["predicted_speedup"]["costs"] for each in figures]),
        (formula, "dot", [each["predicted_speedup"]["formula"] for each in figures]),
    ):
        assert (line["line"]["dash"], line["x"], line["y"]) == (dash, list(GAMMAS), values)
    assert ("error_y" in measured, "error_y" in costs) == (True, False)
    found = [max(range(8), key=lambda i, line=line: line["y"][i]) + 1 for line in (measured, costs, formula)]
    told = "fastest with {} drafted tokens, predicted from costs: {}, predicted by the paper's formula: {}."
    assert told.format(*found) in read(result).text


def test_charts_of_lengths_span_the_same_heights() -> None:
    page = read(bench(temperatures=[0.0], batch_sizes=[1]))
    spans = [
        each["layout"]["yaxis"]["range"]
        for each in page.figures
        if each["layout"]["xaxis"].get("title", {}).get("text", "").startswith("drafted")
    ]
    assert len(spans) == 5
    assert spans == [spans[0]] * 5


def test_alpha_by_temperature_has_its_intervals() -> None:
    result = bench(["mlp"], [3], batch_sizes=[1])
    [line] = read(result).figure("alpha")["data"]
    alphas = [each["summary"]["alpha"] for each in result["cells"] if each["proposer"] == "mlp"]
    assert line["y"] == [each["mean"] for each in alphas]
    assert line["error_y"]["array"] == pytest.approx([0.2 / math.sqrt(26)] * 2)
    assert read(result).figure("alpha")["layout"]["xaxis"]["ticktext"] == ["0", "1"]


def test_break_even_is_where_the_curve_meets_the_line() -> None:
    result = bench(["ngram"], [8], temperatures=[0.0])
    for cell in result["cells"]:
        if cell["proposer"] == "ngram":
            cell["summary"]["speedup"] = spread({1: 1.75, 2: 1.25, 4: 0.75, 8: 0.5}[cell["batch_size"]], 0.1)
    page = read(result)
    curve, cross = page.figure("batch size")["data"]
    assert curve["y"] == [1.75, 1.25, 0.75, 0.5]
    assert (cross["x"], cross["y"]) == ([1.5], [1])
    assert "ngram stops paying between 2 and 4." in page.text


def test_crossings_are_found_in_both_directions_and_not_where_a_curve_only_touches() -> None:
    def found(*values: float) -> list[tuple[int, float]]:
        return [(before.at, share) for before, _, share in crossings([Point(*each) for each in enumerate(values)], 1)]

    assert found(0.5, 1.5, 0.75) == [(0, 0.5), (1, 2 / 3)]
    assert found(2, 1, 2) == found(2, 3) == found(2) == found() == []


def test_acceptance_ends_where_no_draft_was_so_long() -> None:
    result = small(proposers=["mlp"])
    counts = result["cells"][1]["summary"]["spec_decode"]
    counts["per_position_acceptance"] = [0.75, 0.5, None, None]
    counts["per_position_conditional"] = [0.75, None, None, None]
    [line] = read(result).figure("place in the draft")["data"]
    assert line["y"] == [0.75, 0.5]
    assert "75% of those" in line["hovertext"][0]
    assert "of those" not in line["hovertext"][1]


def test_time_per_token_adds_up_to_one_over_the_speedup() -> None:
    result = small()
    parts = traces(read(result).figure("time per new token"))
    assert list(parts) == list(PARTS)
    speedups = {each["proposer"]: each["summary"]["speedup"]["mean"] for each in result["cells"]}
    assert parts["verify"]["y"] == list(speedups) == ["none", "ngram", "mlp"]
    totals = [sum(parts[name]["x"][i] for name in parts) for i in range(3)]
    assert totals == pytest.approx([1 / each for each in speedups.values()])


def test_a_proposer_has_one_colour_in_all_charts() -> None:
    page = read(bench(gammas=[2, 4]))
    colours: dict[str, set[str]] = {name: set() for name in PROPOSERS}
    for figure in page.figures:
        for name, trace in traces(figure).items():
            if name in colours:
                colours[name].add(trace["marker"]["color"])
    assert sorted(map(len, colours.values())) == [1] * 5
    assert len(set.union(*colours.values())) == 5


def test_looks_differ_by_more_than_colour_when_colours_run_out() -> None:
    names = [str(i) for i in range(8)]
    found = looks(names, ["none", "hf"])
    assert len({(each.colour, each.hatch) for each in found.values()}) == len(found)
    assert found["6"].colour == found["0"].colour == COLOURS[0]
    assert found["none"].colour == found["hf"].colour == GREY


def test_charts_look_where_the_first_answer_is() -> None:
    result = bench(["mlp"], [3], temperatures=[0.7, 1.0], batch_sizes=[2, 4])
    view = View.of(result)
    assert (view.temperature, view.batch_size) == (0.7, 2)
    result["summary"]["best"].reverse()
    view = View.of(result)
    assert (view.temperature, view.batch_size) == (1.0, 4)
    result["summary"] = {}
    assert View.of(result).temperature == 0.7


# ---- the table and the rest ----


def rows(page: str) -> list[list[tuple[str, str]]]:
    """Of the sorting table: (what sorts, what is read) for each cell."""
    body = page.split('<table class="sortable">')[1].split("</table>")[0].split("<tbody>")[1]
    found = [re.findall(r'data-by="(.*?)">(.*?)</t[hd]>', row, re.DOTALL) for row in body.split("</tr>")[:-1]]
    return [[(by, re.sub(r"<.*?>", "", words)) for by, words in row] for row in found]


def heads(page: str) -> list[str]:
    return re.findall(r'<button type="button">(.*?)</button>', page)


def test_the_table_has_every_cell_with_its_numbers() -> None:
    result = bench(gammas=[2, 5], batch_sizes=[1, 4])
    page = bench_page(result)
    found = [dict(zip(heads(page), row, strict=True)) for row in rows(page)]
    assert [row["proposer"][0] for row in found] == [cell["proposer"] for cell in result["cells"]]
    for row, cell in zip(found, result["cells"], strict=True):
        block = cell["summary"]
        assert row["speedup"][0] == str(block["speedup"]["mean"])
        assert row["gamma"] == (str(cell["num_speculative_tokens"]),) * 2
        assert row["tokens/s"][0] == str(block["tokens_per_s"])
    first = result["cells"][1]["summary"]
    interval = "{mean:.2f} [{low:.2f}, {high:.2f}]".format(**first["speedup"])
    assert found[1]["speedup"][1] == interval
    assert found[1]["same texts"][1] == "26 of 26"


def test_what_could_not_be_measured_is_a_dash_and_sorts_last() -> None:
    page = bench_page(small(peers=[peer("hf", 0.9)]))
    found = dict(zip(heads(page), rows(page)[-1], strict=True))
    assert found["alpha"] == found["gamma"] == found["c"] == ("", ABSENT)
    assert found["speedup"][1] == "0.90 [0.85, 0.95]"


def test_settings_that_are_the_same_in_all_rows_need_no_column_and_columns_without_a_number_neither() -> None:
    result = small()
    assert "sampler" not in heads(bench_page(result))
    other = copy.deepcopy(result["cells"][1])
    result["cells"].append(other | {"sampler": "block"})
    assert "sampler" in heads(bench_page(result))
    assert "same texts" not in heads(bench_page(small(temperatures=[1.0])))


def test_rows_of_other_programs_are_marked() -> None:
    page = bench_page(small(peers=[peer("hf", 0.9), peer("hf assisted", 1.2)]))
    assert page.count('<tr class="marked">') == 2
    assert page.count('<span class="badge">peer</span>') == 2
    assert "other programs" in Page(page).text
    bars = traces(Page(page).figure("speedup (1"))
    assert bars["hf"]["marker"]["color"] == bars["hf assisted"]["marker"]["color"] == GREY


def test_speedups_are_toned_by_what_their_intervals_say() -> None:
    result = small(proposers=["ngram", "mlp", "suffix"])
    for cell, mean in zip(result["cells"][1:], (1.5, 1.05, 0.5), strict=True):
        cell["summary"]["speedup"] = spread(mean, 0.1)
    tones = re.findall(r'<td(?: class="(\w+)")? data-by="[\d.]+">\d\.\d\d \[', bench_page(result))
    assert tones[::2] == ["good", "", "bad"]  # every other one is alpha's


def test_a_rule_that_loses_something_is_marked_in_rows_and_charts() -> None:
    result = small(proposers=["mlp"])
    result["cells"][1]["lossless"] = False
    page = bench_page(result)
    assert rows(page)[1][0][1] == "mlp (not lossless)"
    assert "mlp (not lossless)" in traces(Page(page).figure("speedup (1"))


def test_page_says_what_was_run() -> None:
    text = read(small()).text
    for words in (
        "SomeLM-1B, bfloat16, cpu",
        "prompts 26",
        "writing, roleplay",
        "at most 128",
        "16 of 16",
        "ngram, mlp",
        "off by 1.9% on average",
        "the formula is off by 21.3% on average",
        "9.8.7",
        "41",
    ):
        assert words in text, words


# ---- half a result ----


def hollow(value: Any) -> Any:
    """The same keys, with nothing in them."""
    if isinstance(value, dict):
        return {key: hollow(each) for key, each in value.items()}
    return None


@pytest.mark.parametrize("missing", [*small(), "everything"])
def test_page_stands_whatever_is_missing(missing: str) -> None:
    result = {} if missing == "everything" else small()
    result.pop(missing, None)
    page = read(result)
    assert page.open == []
    assert "None" not in page.text


@pytest.mark.parametrize("name", [*small()["cells"][1]["summary"], "all of them"])
def test_page_stands_whatever_could_not_be_measured(name: str) -> None:
    result = bench(["mlp"], [2, 4], categories=CATEGORIES[:2])
    for cell in result["cells"]:
        for figures in (cell["summary"], *cell.get("categories", {}).values()):
            for key in figures if name == "all of them" else [name]:
                figures[key] = hollow(figures.get(key)) if cell["batch_size"] > 1 else None
    page = read(result)
    assert page.open == []
    assert "None" not in page.text
    if name == "all of them":
        assert page.figures == []


def test_a_bench_that_has_nothing_yet_claims_nothing() -> None:
    page = read(small(cells=[], summary={}, rounds={"done": 0, "wanted": 4}))
    assert "no answer" in page.text
    assert NOTHING in page.text
    assert page.figures == []


def test_one_prompt_has_no_intervals_and_says_why() -> None:
    result = small(categories=[])
    for figure in [result["summary"]["best"][0], *(cell["summary"] for cell in result["cells"])]:
        figure["speedup"] |= {"low": None, "high": None}
    page = read(result)
    assert "nobody can say how sure" in page.text
    assert all("error_x" not in trace for trace in page.figure("speedup (1")["data"])


def test_other_programs_alone_are_compared() -> None:
    """Peers beside plain decoding, and no draft of ours: a chart and a table, and no answer."""
    result = small(cells=[plain(0.0, 1), peer("hf", 0.9), peer("hf assisted", 1.2)], summary={"best": []})
    page = read(result)
    assert list(traces(page.figure("speedup (1"))) == ["hf", "hf assisted"]
    assert "no answer" in page.text
    assert len(rows(bench_page(result))) == 3


def test_numbers_that_json_has_not_are_as_if_they_were_missing() -> None:
    result = small()
    result["cells"][1]["summary"] |= {"break_even_alpha": math.nan, "speedup": spread(math.inf, 1.0)}
    page = bench_page(result)
    assert all(value is not None for each in Page(page).figures for trace in each["data"] for value in trace["x"])
    assert dict(zip(heads(page), rows(page)[1], strict=True))["speedup"] == ("", ABSENT)


def test_no_name_becomes_part_of_the_page() -> None:
    result = json.loads(json.dumps(small()).replace('"mlp"', json.dumps(EVIL)).replace('"writing"', json.dumps(EVIL)))
    result["summary"]["answer"] = EVIL
    page = read(result)
    assert page.open == []
    assert page.scripts == 3
    [name] = [each for each in traces(page.figure("speedup (1")) if "alert" in each]
    assert html.unescape(name) == EVIL
    assert "<" not in name


def test_page_needs_nothing_from_outside_and_holds_the_library_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    page = bench_page(small())
    assert page.count("plotly.js v") == 1
    assert len(page) < 6_000_000
    assert not [name for _, attributes in Page(page).tags for name in attributes if name in ("src", "href", "srcset")]
    around = page.replace(charts.library(), "")
    assert not re.search(r"https?:|url\(|@import|fetch\(|innerHTML", around)


# ---- in a browser ----

PROBE = """
<pre id="seen"></pre>
<script>
addEventListener("load", () => setTimeout(() => {
  const seen = {};
  const table = document.querySelector("table.sortable");
  const heads = [...table.tHead.rows[0].cells];
  const column = (word) => heads.findIndex((head) => head.textContent === word);
  const read = (word) => [...table.tBodies[0].rows].map((row) => row.cells[column(word)].textContent);
  const press = (word) => heads[column(word)].querySelector("button").click();
  const sorts = () => heads.map((head) => head.getAttribute("aria-sort")).filter((each) => each);
  seen.plots = [...document.querySelectorAll(".plot")].map((plot) => ({
    drawn: Boolean(plot.querySelector("svg.main-svg")),
    points: plot.querySelectorAll(".point").length,
    fits: plot.querySelector("svg.main-svg").getBoundingClientRect().width <= plot.clientWidth + 1,
  }));
  seen.before = [read("proposer"), sorts()];
  press("alpha");
  seen.down = [read("alpha"), sorts()];
  press("alpha");
  seen.up = [read("alpha"), sorts()];
  press("proposer");
  seen.words = [read("proposer"), sorts()];
  seen.tab = heads.every((head) => head.firstElementChild.tabIndex === 0);
  seen.ink = [getComputedStyle(document.body).color, getComputedStyle(document.querySelector(".xtick text")).fill];
  seen.wide = document.documentElement.scrollWidth <= document.documentElement.clientWidth;
  document.getElementById("seen").textContent = JSON.stringify(seen);
}, 50));
</script>
"""

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--v=0", "--dump-dom"]
OFFLINE = ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=300"]


def looked_at(page: str, folder: Path, *words: str) -> dict[str, Any]:
    """What a browser without a network shows of a page that is used, and what it complains of."""
    if BROWSER is None:
        pytest.skip("no chromium here")
    file = folder / "report.html"
    file.write_text(page.replace("</body>", f"{PROBE}</body>"), "utf-8")
    line = [BROWSER, *OPTIONS, *OFFLINE, f"--user-data-dir={folder / 'profile'}", *words, file.as_uri()]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None
    complaints = [each for each in done.stderr.splitlines() if "CONSOLE" in each]
    return {**json.loads(html.unescape(found[1]) or "{}"), "complaints": complaints}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    result = bench(["ngram", "mlp"], [2, 4], categories=CATEGORIES[:3], batch_sizes=[1, 8], peers=[peer("hf", 0.9)])
    return looked_at(bench_page(result), tmp_path_factory.mktemp("page"), "--window-size=500,900")


def test_a_browser_has_nothing_to_complain_of(seen: dict[str, Any]) -> None:
    assert seen["complaints"] == []
    assert seen["wide"]


def test_every_chart_is_drawn_in_the_width_there_is_and_in_the_pages_ink(seen: dict[str, Any]) -> None:
    assert len(seen["plots"]) == 7  # two of draft lengths
    assert all(each["drawn"] and each["fits"] and each["points"] for each in seen["plots"])
    body, text = seen["ink"]
    assert body == text


def test_the_table_sorts_and_says_so(seen: dict[str, Any]) -> None:
    assert seen["before"][1] == []
    known = sorted((each for each in seen["down"][0] if each != ABSENT), reverse=True)
    absent = [ABSENT] * seen["down"][0].count(ABSENT)
    assert absent
    assert seen["down"] == [known + absent, ["descending"]]
    assert seen["up"] == [known[::-1] + absent, ["ascending"]]
    assert seen["words"] == [sorted(seen["before"][0]), ["ascending"]]
    assert seen["tab"]


def test_an_interval_of_few_prompts_leaves_room_for_the_bars() -> None:
    """Of two prompts it reaches far beyond anything: it is cut off at the chart's edge, and the caption says so."""
    points = [Point("a", 1.5, 0.2, 300.0, ""), Point("b", 1.2, 1.1, 1.3, "")]
    figure = charts.bars([Series("ngram", Look("black"), points)], ["a", "b"], "speedup", level=1)
    start, end = figure.layout.xaxis.range
    assert start == 0
    assert 1.5 < end < 2
    whole = charts.bars([Series("ngram", Look("black"), points[1:])], ["b"], "speedup", level=2)
    assert 2 < whole.layout.xaxis.range[1] < 2.2
