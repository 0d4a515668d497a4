"""The page of a training: it says what result.json says, draws what was logged, and stands whatever is missing."""

from __future__ import annotations

import math
import shlex
from typing import Any

import pytest

from specpipe.report.page import BOTTOM, DOT, HEIGHT, LEFT, MOST_DOTS, STYLE, TOP, WIDTH, curves
from specpipe.report.training import training_page
from tests.test_report import Reader


def training(**changed: Any) -> dict[str, Any]:
    """result.json of a training."""
    return {
        "command": "train",
        "version": "9.8.7",
        "seed": 41,
        "target": {"model": "SomeLM-1B", "dtype": "bfloat16", "device": "cuda"},
        "student": "mlp",
        "proposer": "mlp",
        "loss": "lk_hybrid",
        "num_speculative_tokens": 4,
        "config": {"student": {"_target_": "x.Y", "heads": 3, "init": None}, "loss": {"eta": 2.5}},
        "data": {"train_documents": 812, "train_generated": 77123, "val_generated": 4321, "temperatures": [0.0, 1.0]},
        "summary": {"tau": 1.875, "tau_T1": 1.625, "alpha": 0.4375, "coverage": 0.9125, "minutes": 4.5, "steps": 360},
        "curves": [
            {"step": 10, "train/loss": 3.0},
            {
                "step": 20,
                "train/loss": 2.0,
                "val/loss": 2.5,
                "val/tau_g4": 1.5,
                "val/tau_g4_T1": 1.25,
                "val/alpha": 0.25,
            },
            {"step": 30, "train/loss": None},
            {
                "step": 40,
                "train/loss": 1.0,
                "val/loss": 2.25,
                "val/tau_g4": 1.75,
                "val/tau_g4_T1": 1.5,
                "val/alpha": 0.5,
            },
        ],
        "artifact": "/runs/a b/draft",
        "check": {"decoded": 1.8, "walked": 1.8125, "tokens": 640, "holds": True},
        **changed,
    }


def read(**changed: Any) -> Reader:
    return Reader(training_page(training(**changed)))


def lines(reader: Reader) -> list[list[tuple[float, float]]]:
    drawn = [attributes["points"] or "" for tag, attributes in reader.tags if tag == "polyline"]
    return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in line.split())] for line in drawn]


def labels(reader: Reader) -> list[str | None]:
    return [attributes["aria-label"] for tag, attributes in reader.tags if tag == "svg"]


def test_page_says_what_was_trained_and_what_it_gives() -> None:
    text = read().text
    for words in (
        "SomeLM-1B, bfloat16, cuda",
        "mlp (heads 3)",
        "lk_hybrid (eta 2.5)",
        "gives 1.88 tokens per pass in greedy decoding, instead of 1",
        "with 4 drafted tokens a step",
        "sampling 1.62",
        "alpha 0.438",
        "coverage) 0.912",
        "answers to train on 812",
        "77,123",
        "0.0, 1.0",
        "360",
        "9.8.7",
    ):
        assert words in text, words


def test_alpha_has_its_interval_where_there_is_one() -> None:
    summary = {"tau": 1.5, "alpha": 0.4375, "alpha_low": 0.25, "alpha_high": 0.625}
    assert "alpha 0.438 (0.25 to 0.625)" in read(summary=summary).text


def test_command_decodes_with_the_draft() -> None:
    reader = read()
    (command,) = [words for words in reader.words if words.startswith("python -m specpipe decode")]
    assert shlex.split(command)[3:] == ["decode", "proposer=mlp", "proposer.path=/runs/a b/draft"]


def test_each_figure_is_drawn_from_its_points() -> None:
    """A point without the figure, or with none that is finite, is no point of its curve."""
    assert labels(read()) == [
        "loss by step: training 3 to 1, validation 2.5 to 2.25",
        "tokens per pass by step: greedy 1.5 to 1.75, sampling 1.25 to 1.5",
        "alpha by step: validation 0.25 to 0.5",
    ]
    assert [len(line) for line in lines(read())] == [3, 2, 2, 2, 2]
    titles = [words for words in read().words if ", step " in words]
    assert titles[:3] == ["training, step 10: 3", "training, step 20: 2", "training, step 40: 1"]


def test_curves_fill_the_chart_from_the_lowest_value_to_the_highest() -> None:
    reader = Reader(curves({"a": [(0, 1.0), (5, 2.0), (10, 3.0)], "b": [(10, 1.5)]}, "words"))
    bottom, right = HEIGHT - BOTTOM - TOP, WIDTH - DOT
    first, second = lines(reader)
    assert first == [(LEFT, bottom), ((LEFT + right) / 2, (bottom + TOP) / 2), (right, TOP)]
    assert second == [(right, bottom - (bottom - TOP) / 4)]
    assert [word for word in reader.text.split() if word in ("1", "3", "0", "10")][-4:] == ["3", "1", "0", "10"]


def test_two_curves_differ_in_more_than_colour() -> None:
    reader = Reader(curves({"a": [(1, 1.0)], "b": [(1, 2.0)]}, "words"))
    assert [attributes["class"] for tag, attributes in reader.tags if tag == "polyline"] == ["", "second"]
    assert "polyline.second { stroke: var(--out); stroke-dasharray" in STYLE
    assert ".key.second { border-top: 2px dashed var(--out)" in STYLE


@pytest.mark.parametrize("points", [[(0, 2.0)], [(3, 2.0)], [(3, 2.0), (6, 2.0)]])
def test_a_curve_without_a_slope_can_be_drawn(points: list[tuple[int, float]]) -> None:
    reader = Reader(curves({"a": points}, "words"))
    assert all(math.isfinite(value) for line in lines(reader) for place in line for value in place)
    assert sum(tag == "circle" for tag, _ in reader.tags) == len(points)
    assert reader.text.split().count("2") == 1 + len(points)  # on the axis once, and in each dot's words


def test_a_long_curve_has_no_dots() -> None:
    reader = Reader(curves({"a": [(step, 1.0) for step in range(MOST_DOTS + 1)]}, "words"))
    assert len(lines(reader)[0]) == MOST_DOTS + 1
    assert not [tag for tag, _ in reader.tags if tag == "circle"]


@pytest.mark.parametrize(("holds", "word", "tone"), [(True, "agrees", "good"), (False, "disagrees", "bad")])
def test_real_decode_is_told(holds: bool, word: str, tone: str) -> None:
    check = {"decoded": 1.8, "walked": 1.8125, "tokens": 640, "holds": holds}
    html = training_page(training(check=check))
    assert f'<span class="badge {tone}">{word}</span>' in html
    assert ("do not hold" in Reader(html).text) is not holds


@pytest.mark.parametrize("missing", [*training(), "everything"])
def test_page_stands_whatever_is_missing(missing: str) -> None:
    """Also an interrupted run, which has neither curves nor a summary."""
    result = {} if missing == "everything" else training()
    result.pop(missing, None)
    reader = Reader(training_page(result))
    assert reader.open == []
    assert "None" not in reader.text


def test_a_run_that_ended_early_claims_nothing() -> None:
    text = read(summary={"tau": None, "alpha": None}, curves=[], check=None, artifact=None).text
    assert "not measured" in text
    assert "No curves" in text
    assert "python -m specpipe decode" not in text


def test_page_needs_no_network_and_no_script_and_is_escaped() -> None:
    html = training_page(training(student="<script>x</script>", artifact="<img src=x>"))
    tags = Reader(html).tags
    assert not {tag for tag, _ in tags} & {"script", "img", "link", "iframe"}
    assert not [name for _, attributes in tags for name in attributes if name in ("src", "href")]
    assert "http" not in html
    assert "url(" not in html
