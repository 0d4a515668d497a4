"""`plan` as a person runs it: what is typed, what comes back, and what lands in the run folder."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specpipe import cli, theory
from specpipe.commands import plan
from specpipe.commands.measured import measured
from specpipe.config import compose
from specpipe.console import OutputClosed
from specpipe.errors import UserError
from specpipe.report.plan import plan_page
from tests.command_line import Run
from tests.test_report import Reader

ROOT = Path(cli.__file__).resolve().parent.parent
SUMMARY = ["expected_tokens_per_step", "speedup", "operations", "best_gamma", "best_speedup", "break_even_alpha"]

FromEarlier = Callable[..., list[dict[str, Any]]]
SETTLED = {"alpha": 0.5, "cost_ratio": 0.1, "operations_ratio": None, "gamma": None, "max_gamma": 16}


@pytest.fixture
def specpipe(specpipe: Run) -> Run:
    """Its run folder is `run`."""
    return lambda *words: specpipe(*words, "hydra.run.dir=run")


def result(folder: str = "run") -> dict[str, Any]:
    return json.loads(Path(folder, "result.json").read_text())


def measured_run(**changed: Any) -> str:
    """The folder of a decode that measured these numbers."""
    summary = {
        "alpha": {"mean": 0.7, "low": 0.6, "high": 0.8},
        "cost_ratio": 0.1,
        "spec_decode": {
            "num_spec_steps": 30,
            "num_plain_steps": 12,
            "per_position_acceptance": [0.5, 0.6, 0.1, None, None],
            "per_position_conditional": [0.8, 0.75, 0.5, None, None],
        },
    }
    content = {
        "command": "decode",
        "target": {"model": "SomeLM-1B"},
        "proposer": "ngram",
        "sampler": "block",
        "lossless": True,
        "summary": summary | changed,
    }
    Path("earlier").mkdir(exist_ok=True)
    Path("earlier", "result.json").write_text(json.dumps(content))
    return "earlier"


@pytest.fixture
def from_earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FromEarlier:
    """Cells for a run that measured what is changed, and for keys as they are given."""
    monkeypatch.chdir(tmp_path)

    def cells(changed: dict[str, Any] | None = None, **keys: Any) -> list[dict[str, Any]]:
        source = measured(measured_run(**changed or {}))
        return plan.predictions(SETTLED | {"alpha": None, "cost_ratio": None} | keys, source)

    return cells


# ---- from alpha and costs ----


def test_one_combination_is_a_summary_a_curve_and_a_page(specpipe: Run) -> None:
    ran = specpipe("plan", "alpha=0.8", "cost_ratio=0.05")
    assert ran.code == 0
    found = result()
    assert (found["command"], found["alpha"], found["cost_ratio"]) == ("plan", 0.8, 0.05)
    assert found["config"]["max_gamma"] == 16
    assert set(SUMMARY) <= set(found["summary"])
    assert "by_position" not in found["summary"]
    rounded = [round(found["summary"][name], 2) for name in SUMMARY]
    assert rounded == [4.33, 3.09, 2.17, 8, 3.09, 0.29]
    assert [row["gamma"] for row in found["curve"]] == list(range(17))
    assert [row["speedup"] for row in found["curve"]] == theory.speedup(0.8, np.arange(17), 0.05).tolist()
    assert found["curve"][0]["break_even_alpha"] is None
    assert {file.name for file in Path("run").iterdir()} >= {"result.json", "provenance.json", "report.html"}


def test_terminal_shows_the_answer_and_the_curve(specpipe: Run) -> None:
    ran = specpipe("plan", "alpha=0.8", "cost_ratio=0.05", "max_gamma=9")
    lines = ran.out.splitlines()
    assert "best gamma          8: 3.09 times as fast as plain decoding" in lines
    assert "break-even          alpha 0.286 at gamma 8" in lines
    assert [line.split() for line in lines[-2:]] == [
        ["8", "4.33", "3.09", "2.17", "0.286"],
        ["9", "4.46", "3.08", "2.34", "0.310"],
    ]
    assert ran.err == f"result: {Path('run').resolve() / 'result.json'}\n"


def test_a_gamma_of_ones_own_is_described_beside_the_best(specpipe: Run) -> None:
    ran = specpipe("plan", "alpha=0.8", "cost_ratio=0.05", "gamma=4")
    summary = result()["summary"]
    assert (summary["gamma"], round(summary["speedup"], 2)) == (4, 2.80)
    assert (summary["best_gamma"], round(summary["best_speedup"], 2)) == (8, 3.09)
    assert round(summary["break_even_alpha"], 3) == 0.167
    assert "speedup             2.80 at gamma 4" in ran.out


def test_operations_take_their_own_ratio_or_that_of_the_costs() -> None:
    keys = SETTLED | {"alpha": 0.8, "gamma": 5}
    (own,), (costs,) = (plan.predictions(keys | {"operations_ratio": ratio}, None) for ratio in (0, None))
    assert round(own["summary"]["operations"], 2) == 1.63
    assert costs["summary"]["operations"] == theory.operations_factor(0.8, 5, 0.1)


def test_where_no_draft_pays_it_says_from_which_alpha_one_would(specpipe: Run) -> None:
    ran = specpipe("plan", "alpha=0.1", "cost_ratio=0.2")
    summary = result()["summary"]
    assert (summary["best_gamma"], summary["best_speedup"], summary["expected_tokens_per_step"]) == (0, 1.0, 1.0)
    assert summary["break_even_alpha"] == pytest.approx(0.2)
    assert "best gamma          0: no draft is faster" in ran.out
    page = Reader(Path("run", "report.html").read_text()).text
    assert "no draft is faster than plain decoding: alpha must be above 0.2." in page


def test_it_says_when_a_longer_draft_may_be_better(specpipe: Run) -> None:
    ran = specpipe("plan", "alpha=0.9", "cost_ratio=0.01")
    assert "max_gamma=32 looks further" in ran.err
    assert "the longest draft looked at" in Path("run", "report.html").read_text()
    assert plan.predict(0.9, 0.01, 0.01, 32)["summary"]["best_gamma"] == 24


def test_lists_are_a_table_over_all_combinations(specpipe: Run) -> None:
    ran = specpipe("plan", "alpha=[0.6,0.8]", "cost_ratio=[0.05,0.5]")
    found = result()
    assert [(cell["alpha"], cell["cost_ratio"]) for cell in found["cells"]] == [
        (0.6, 0.05),
        (0.6, 0.5),
        (0.8, 0.05),
        (0.8, 0.5),
    ]
    assert [cell["summary"]["best_gamma"] for cell in found["cells"]] == [4, 1, 8, 2]
    assert found["summary"] == {}
    assert "curve" not in found
    assert ran.out.splitlines()[-2].split() == ["0.8", "0.05", "8", "4.33", "3.09", "2.17", "0.286"]
    page = Reader(Path("run", "report.html").read_text())
    assert sum(tag == "polyline" for tag, _ in page.tags) == 4


def test_the_widest_table_fits_eighty_columns_unbroken(specpipe: Run) -> None:
    ran = specpipe("plan", "alpha=[0.6,0.8]", "cost_ratio=[0.05,0.5]", "gamma=4")
    assert ran.out.splitlines()[-1].split() == ["0.8", "0.5", "4", "3.36", "1.12", "2.08", "0.741", "2", "1.22"]
    assert "…" not in ran.out
    assert max(len(line) for line in ran.out.splitlines()) <= 80


REFUSED = {
    "": ["alpha: has no value, and needs one: alpha=..., or from="],
    "alpha=1.5 cost_ratio=.1": ["alpha: 1.5 is not a number from 0 to 1."],
    "alpha=.5 cost_ratio=.1 gamma=a": ["gamma: 'a' is not a whole number."],
    "alpha=.5 cost_ratio=.1 form=x": ["form: no such key.", "Did you mean 'from'?"],
    "from=[1]": ["from: [1] is not a text."],
    "from=nowhere": ["from: 'nowhere' has no result.json that can be read: No such file"],
}


@pytest.mark.parametrize("words", REFUSED)
def test_wrong_input_is_one_line_and_code_2(specpipe: Run, words: str) -> None:
    ran = specpipe("plan", *shlex.split(words))
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1
    assert ran.err.startswith("specpipe: ")
    for part in REFUSED[words]:
        assert part in ran.err
    assert not Path("run", "result.json").exists()


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("alpha", [0.5, "x"], "alpha: 'x' is not a number from 0 to 1."),
        ("alpha", [], "alpha: is an empty list; it needs a number."),
        ("alpha", True, "alpha: True is not a number from 0 to 1."),
        ("cost_ratio", None, "cost_ratio: has no value, and needs one: cost_ratio=..., or from="),
        ("cost_ratio", -1, "cost_ratio: -1 is not a number from 0 up."),
        ("operations_ratio", -1, "operations_ratio: -1 is not a number from 0 up."),
        ("gamma", -1, "gamma: -1 is not a whole number from 0 to 16."),
        ("gamma", 17, "gamma: 17 is not a whole number from 0 to 16."),
        ("max_gamma", 0, "max_gamma: 0 is not a whole number from 1 to 1000."),
        ("max_gamma", 1001, "max_gamma: 1001 is not a whole number from 1 to 1000."),
    ],
)
def test_an_impossible_number_is_named(key: str, value: Any, line: str) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(line)}"):
        plan.predictions(SETTLED | {key: value}, None)


def test_help_names_the_keys_and_no_group(specpipe: Run) -> None:
    ran = specpipe("plan", "--help")
    assert (ran.code, ran.out.startswith("specpipe plan: ")) == (0, True)
    assert "cost_ratio: null" in ran.out
    assert "from: null" in ran.out
    assert "proposer" not in ran.out


def test_from_is_a_key_like_any_other() -> None:
    """A word of Python cannot be a field's name as it is written."""
    assert compose("plan", ["from=a/b"])["from"] == "a/b"


def test_a_reader_that_has_gone_costs_no_result(specpipe: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> None:
        raise OutputClosed

    monkeypatch.setattr(plan, "_show", gone)
    assert specpipe("plan", "alpha=0.8", "cost_ratio=0.05").code == 141
    assert result()["summary"]["best_gamma"] == 8


WITHOUT_MODELS = """
import atexit, sys
from specpipe import cli
heavy = {"torch", "transformers", "wandb", "scipy", "lightning"}
atexit.register(lambda: print(sorted(heavy & set(sys.modules)), file=sys.stderr))
sys.argv = ["specpipe", "plan", "alpha=0.8", "cost_ratio=0.05", "hydra.run.dir=run"]
sys.exit(cli.main())
"""


def test_no_model_library_is_imported(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT_MODELS]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.splitlines()[-1] == "[]"
    made = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert made["machine"]["threads"] is None
    assert made["packages"]["numpy"] == np.__version__


# ---- from what a run measured ----


def test_a_real_decode_says_what_plan_needs(specpipe: Run) -> None:
    words = ["target=tiny", "wandb=none", "proposer=ngram", "num_speculative_tokens=3", "prompt=abcabcabcabcabc"]
    assert specpipe("decode", *words, "generation.max_new_tokens=24").code == 0
    os.rename("run", "earlier")
    earlier = result("earlier")
    assert specpipe("plan", "from=earlier", "gamma=2").code == 0
    found, counts = result(), earlier["summary"]["spec_decode"]
    assert found["alpha"] == earlier["summary"]["alpha"]["mean"]
    assert found["cost_ratio"] == earlier["summary"]["cost_ratio"]
    assert (found["target"], found["proposer"], found["lossless"]) == (earlier["target"], "ngram", True)
    assert found["from"]["folder"] == str(Path("earlier").resolve())
    assert found["from"]["num_spec_steps"] == counts["num_spec_steps"]
    assert found["curve"][1]["expected_tokens_by_position"] == 1 + counts["per_position_conditional"][0]


def test_acceptance_by_position_predicts_beside_alpha(specpipe: Run) -> None:
    """P(N >= i) is the product of the conditional rates: the shares over whole drafts suffer from shorter ones."""
    ran = specpipe("plan", f"from={measured_run()}", "gamma=3")
    found = result()
    survival = [0.8, 0.6, 0.3]
    assert (found["alpha"], found["cost_ratio"]) == (0.7, 0.1)
    assert found["from"]["per_position_acceptance"] == pytest.approx(survival)
    assert found["summary"]["expected_tokens_per_step"] == pytest.approx(theory.expected_tokens(0.7, 3))
    assert found["summary"]["by_position"] == pytest.approx(
        {
            "expected_tokens_per_step": 2.7,
            "speedup": 2.7 / 1.3,
            "best_gamma": 3,
            "best_speedup": 2.7 / 1.3,
            "max_gamma": 3,
        }
    )
    by_position = [row["expected_tokens_by_position"] for row in found["curve"]]
    assert by_position[:4] == pytest.approx([1.0, 1.8, 2.4, 2.7])
    assert set(by_position[4:]) == {None}
    assert "by position         best gamma 3 of 0 to 3: 2.08 times as fast" in ran.out
    assert "30 of the 42 steps of the measured run drafted something" in ran.err


def test_by_position_stops_at_the_longest_draft_looked_at(from_earlier: FromEarlier) -> None:
    assert from_earlier(max_gamma=2)[0]["summary"]["by_position"]["max_gamma"] == 2


def test_a_cost_of_ones_own_takes_the_place_of_the_measured_one(from_earlier: FromEarlier) -> None:
    (cell,) = from_earlier({"cost_ratio": None}, cost_ratio=0.5, gamma=2)
    assert (cell["alpha"], cell["cost_ratio"]) == (0.7, 0.5)
    assert cell["summary"]["by_position"]["speedup"] == pytest.approx(2.4 / 2)


def test_an_alpha_of_ones_own_is_not_mixed_with_measured_positions(from_earlier: FromEarlier) -> None:
    cells = from_earlier({"alpha": {"mean": None}}, alpha=[0.2, 0.9])
    assert [(cell["alpha"], cell["cost_ratio"]) for cell in cells] == [(0.2, 0.1), (0.9, 0.1)]
    assert not any("by_position" in cell["summary"] for cell in cells)


def test_an_alpha_that_rounding_left_above_one_is_one(from_earlier: FromEarlier) -> None:
    assert from_earlier({"alpha": {"mean": 1 + 1e-7}})[0]["alpha"] == 1


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"alpha": {"mean": None}}, "alpha: the run of `from` has none (nothing was drafted); give it: alpha=..."),
        ({"alpha": None}, "alpha: the run of `from` has none (nothing was drafted); give it: alpha=..."),
        (
            {"cost_ratio": None},
            "cost_ratio: the run of `from` has none (it has no step without a draft to compare with; a bench has); "
            "give it: cost_ratio=...",
        ),
    ],
)
def test_a_number_that_the_run_lacks_is_asked_for(
    from_earlier: FromEarlier, changed: dict[str, Any], line: str
) -> None:
    with pytest.raises(UserError, match=f"^{re.escape(line)}$"):
        from_earlier(changed)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"command": "audit"}', "is a run of audit; a run of decode or bench measures alpha and cost_ratio."),
        ("{", "is not JSON."),
        ("[]", "is not that of a run."),
    ],
)
def test_a_folder_of_something_else_is_named(tmp_path: Path, content: str, line: str) -> None:
    (tmp_path / "result.json").write_text(content)
    with pytest.raises(UserError, match=f"^from: .*{re.escape(str(tmp_path))}' {re.escape(line)}$"):
        measured(str(tmp_path))


# ---- the page ----


def planned(**changed: Any) -> dict[str, Any]:
    """result.json of a plan."""
    return {"command": "plan", **plan.predict(0.8, 0.05, 0.05, 10, None, [0.75, 0.5]), **changed}


def test_page_says_the_answer_first_and_draws_the_curve() -> None:
    reader = Reader(plan_page(planned()))
    assert (
        "3.09x At alpha 0.8 and cost ratio 0.05, drafting 8 tokens a step is best: 4.33 tokens per pass" in reader.text
    )
    assert "Below alpha 0.286 it stops paying." in reader.text
    dots = [words for words in reader.words if ", gamma " in words]
    assert dots[8] == "by alpha, gamma 8: 3.09"
    assert dots[-1] == f"by position, gamma 2: {2.25 / 1.1:.3g}"
    assert [attributes["class"] for tag, attributes in reader.tags if tag == "polyline"] == ["", "second"]


def test_page_reads_what_result_json_holds() -> None:
    """Where no alpha breaks even the file has null."""
    result_file = planned()
    result_file["curve"][0]["break_even_alpha"] = None
    assert plan_page(result_file) == plan_page(planned())


def test_page_needs_no_network_and_no_script_and_is_escaped() -> None:
    evil = '"><script>alert(1)</script>'
    source = {"folder": evil, "num_spec_steps": 1, "num_plain_steps": 2}
    html = plan_page(planned(**{"from": source, "target": {"model": evil}, "proposer": evil}))
    reader = Reader(html)
    assert reader.open == []
    assert not {tag for tag, _ in reader.tags} & {"script", "img", "link", "iframe"}
    assert "http" not in html
    assert reader.text.count(evil) == 3


def test_nothing_pays_at_no_alpha_and_everything_at_one() -> None:
    never, always = plan.predict(0.0, 0.1, 0.1, 5), plan.predict(1.0, 0.1, 0.1, 5)
    assert never["summary"]["best_gamma"] == 0
    assert always["summary"]["best_gamma"] == 5
    assert math.isclose(always["summary"]["best_speedup"], 6 / 1.5)


# ---- from a bench ----


def bench_run(folder: Path, **more: Any) -> str:
    """A bench of ngram with 1 and 3 drafts at batch sizes 1 and 2; in the larger batch each draft costs a pass."""
    kept = {1: [0.5], 3: [0.5, 0.5, 0.5]}
    cells = [
        {
            **{"proposer": "ngram", "sampler": "rejection", "temperature": 0.0, "batch_size": size, "peer": False},
            "num_speculative_tokens": gamma,
            "summary": {
                "alpha": {"mean": 0.5, "low": None, "high": None},
                "cost_ratio": 0.1,
                "spec_decode": {"num_spec_steps": 7, "num_plain_steps": 3, "per_position_conditional": rates},
            },
        }
        for size in (1, 2)
        for gamma, rates in kept.items()
    ]
    best = {
        key: cells[0][key] for key in ("proposer", "sampler", "temperature", "batch_size", "num_speculative_tokens")
    }
    costs = [
        {
            **{"proposer": name, "sampler": sampler, "temperature": 0.0, "batch_size": size},
            "by_drafted": [
                {"drafted": k, "steps": 9, "draft": 0.1 * k, "verify": 1 + slope * k, "other": 0.0} for k in ks
            ],
        }
        for size, slope in ((1, 0.0), (2, 1.0))
        for name, sampler, ks in (("none", None, (0,)), ("ngram", "rejection", (1, 3)))
    ]
    result = {"command": "bench", "summary": {"best": [best]}, "cells": cells, "costs": costs, **more}
    folder.mkdir()
    (folder / "result.json").write_text(json.dumps(result))
    return str(folder)


def test_a_bench_is_planned_by_its_answers_proposer_and_each_batch_size_by_its_costs(tmp_path: Path) -> None:
    source = measured(bench_run(tmp_path / "bench"))
    assert (source.alpha, source.cost_ratio) == (0.5, 0.1)
    assert source.per_position_acceptance == [0.5, 0.25, 0.125]  # of its longest drafts
    alone, batch = source.about["by_batch"]
    tokens = [1, 1.5, 1.75, 1.875]
    assert alone["speedup"] == pytest.approx([t / (1 + 0.1 * k) for k, t in enumerate(tokens)])
    assert batch["speedup"] == pytest.approx([t / (1 + 1.1 * k) for k, t in enumerate(tokens)])
    assert (alone["best_gamma"], batch["best_gamma"]) == (2, 0)


def test_a_bench_that_has_compared_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has compared nothing yet"):
        measured(bench_run(tmp_path / "bench", summary={}))


def test_batch_sizes_stand_on_the_page_and_in_the_terminal(specpipe: Any, tmp_path: Path) -> None:
    ran = specpipe("plan", f"from={bench_run(tmp_path / 'bench')}")
    assert ran.code == 0
    assert "batch size 2: best gamma 0, speedup 1.00" in ran.err
    assert "Speedup by batch size" in Path("run/report.html").read_text()
