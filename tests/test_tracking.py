"""specpipe.tracking: what a wandb run holds, that it stays in its folder, and that no failure reaches the decode.

Runs that share a process are read back from their `.wandb` files. What would spoil the test process (a killed service,
another HOME, no network) happens in a child process.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from specpipe.config import build, compose
from specpipe.errors import UserError
from specpipe.logged import TEXT_LIMIT, label, plain
from specpipe.tracking import NoRun, WandbRun, _upload, within
from tests.wandb_runs import Stored, stored

CONFIG = {"target": {"path": Path("/models/x"), "shape": (1, 2)}, "seed": None, "generation": {"temperature": 0.5}}
WARNING = "decode goes on without it"
DRAFT = {"model.safetensors": "weights", "text/config.json": "{}"}  # files of what was trained
ABOUT = {"tau": 1.5, "alpha": None, "command": "python -m train", "data": {"shards": [3, 4], "folder": Path("/d")}}


def request(**changes: Any) -> dict[str, Any]:
    """A request as it stands in result.json."""
    return {
        "prompt": "Once upon",
        "prompt_tokens": 2,
        "text": " a time" * 1000,
        "token_ids": [5, 6, 7],
        "finish_reason": "length",
        "timing": {"prefill": 0.1, "draft": 0.2, "verify": 0.3, "accept": 0.05, "other": 0.01},
        "spec_decode": {"num_spec_steps": 2, "draft_acceptance_rate": 0.25, "mean_acceptance_length": 1.5},
        "alpha": 0.75,
        "tokens_per_s": 12.5,
        "tokens_per_target_pass": None,
        **changes,
    }


def result() -> dict[str, Any]:
    """A result.json with two requests, the second of them interrupted before anything was measured."""
    counts = {"acceptance_histogram": [3, 2, 1], "per_position_acceptance": [0.5, None], "draft_acceptance_rate": 0.25}
    summary = {"new_tokens": 6, "alpha": {"mean": 0.7, "low": None}, "spec_decode": counts}
    return {"requests": [request(), {"prompt": "Twice", "finish_reason": "interrupted"}], "summary": summary}


def run_job(job: WandbRun | NoRun, folder: Path, config: dict[str, Any], *, requests: int = 2) -> None:
    job.start("decode", config, folder)
    for index in range(requests):
        job.log_request(index, request(), num_spec_tokens=2)
    job.finish(result(), 0)


def train_job(
    job: WandbRun | NoRun, folder: Path, *, steps: Sequence[int] = (10, 20), resume: str | None = None
) -> None:
    """A training that logs one point per step, the loss being the step, and ends with the draft."""
    job.start("train", CONFIG, folder, resume=resume)
    for step in steps:
        job.log_metrics({"train/loss": float(step), "val/alpha": 0.25}, step)
    for name, text in DRAFT.items():
        (folder / "draft" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "draft" / name).write_text(text)
    job.log_artifact("mlp on SomeLM/1B", "model", folder / "draft", ABOUT)
    job.finish({"command": "train", "summary": {"tau": 1.75, "alpha": 0.5, "alpha_low": None, "steps": 40}}, 0)


def offline_run(**changes: Any) -> WandbRun:
    return WandbRun(**{"mode": "offline", "project": "specpipe-tests", **changes})


# ---- two jobs in this process ---------------------------------------------------------------------------------------


class TwoJobs(NamedTuple):
    first: Stored
    second: Stored
    printed: str
    new_in_start_folder: set[str]


@pytest.fixture(scope="module")
def two_jobs(tmp_path_factory: pytest.TempPathFactory) -> TwoJobs:
    """Job 1 raises after its first request and is never finished; job 2 runs to its end."""
    root = tmp_path_factory.mktemp("multirun")
    patch = pytest.MonkeyPatch()
    (root / "start").mkdir()
    patch.chdir(root / "start")
    printed = _Tee()
    patch.setattr(sys, "stderr", printed)
    patch.setattr(sys, "stdout", printed)
    patch.delenv("WANDB_MODE", raising=False)
    left_open = offline_run(name="one")
    left_open.start("decode", {**CONFIG, "job": 1}, root / "0")
    left_open.log_request(0, request(), num_spec_tokens=2)
    run_job(offline_run(name="two", group="g", tags=["a", "b"]), root / "1", {**CONFIG, "job": 2})
    created = {str(path) for path in (root / "start").rglob("*")}
    patch.undo()
    return TwoJobs(stored(root / "0"), stored(root / "1"), printed.text, created)


class _Tee:
    """A stream that keeps what is written to it."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        """Nothing is held back."""

    def isatty(self) -> bool:
        return True  # the strictest case: wandb would prompt and draw


def test_each_job_of_a_multirun_has_its_own_run_and_config(two_jobs: TwoJobs) -> None:
    """D5; `stored` also checks that each folder holds exactly one run."""
    assert (two_jobs.first.config["job"], two_jobs.second.config["job"]) == (1, 2)


def test_a_job_that_raised_does_not_take_the_next_one_with_it(two_jobs: TwoJobs) -> None:
    """D5: the open run of job 1 was closed when job 2 began, with what it had logged."""
    assert [row["request/index"] for row in _requests(two_jobs.first)] == [0]
    assert two_jobs.first.exit_code == 0
    assert [row["request/index"] for row in _requests(two_jobs.second)] == [0, 1]


def test_config_is_stored_as_plain_nested_values(two_jobs: TwoJobs) -> None:
    """D7: a Path, a tuple and None."""
    assert two_jobs.second.config["target"] == {"path": "/models/x", "shape": [1, 2]}
    assert two_jobs.second.config["seed"] is None
    assert two_jobs.second.config["generation"] == {"temperature": 0.5}
    assert plain({3: {Path("a")}, "b": b"x"}) == {"3": ["a"], "b": "b'x'"}


def test_request_metrics_have_their_own_step_axis(two_jobs: TwoJobs) -> None:
    """D8."""
    assert two_jobs.second.metrics["request/*"] == "request/index"


def test_a_request_is_one_row_without_what_was_not_measured(two_jobs: TwoJobs) -> None:
    row = {key: value for key, value in _requests(two_jobs.second)[0].items() if not key.startswith("_")}
    assert row == {
        "request/index": 0,
        "request/num_spec_tokens": 2,
        "request/new_tokens": 3,
        "request/alpha": 0.75,
        "request/draft_acceptance_rate": 0.25,
        "request/mean_acceptance_length": 1.5,
        "request/tokens_per_s": 12.5,
        "request/prefill_s": 0.1,
        "request/draft_s": 0.2,
        "request/verify_s": 0.3,
        "request/accept_s": 0.05,
        "request/other_s": 0.01,
    }


def test_finish_logs_table_charts_and_summary(two_jobs: TwoJobs) -> None:
    run = two_jobs.second
    charts = run.history[-1]
    assert charts["requests.nrows"] == 2
    assert charts["per_position_acceptance_table.nrows"] == 1  # the position without data has no bar
    assert charts["acceptance_histogram_table.nrows"] == 3
    assert run.summary["new_tokens"] == 6
    assert run.summary["alpha/mean"] == 0.7
    assert "alpha/low" not in run.summary
    assert run.summary["spec_decode/acceptance_histogram"] == [3, 2, 1]
    assert (run.job_type, run.group, run.exit_code) == ("decode", "g", 0)


def test_tables_lie_in_the_folder_and_their_texts_are_cut(two_jobs: TwoJobs) -> None:
    assert sum(name.endswith(".table.json") for name in two_jobs.second.files) == 3
    rows = two_jobs.second.table("requests")
    assert [len(row["text"]) for row in rows] == [TEXT_LIMIT, 0]
    assert (rows[0]["prompt"], rows[0]["alpha"], rows[1]["alpha"]) == ("Once upon", 0.75, None)


def test_a_run_prints_nothing_and_leaves_the_start_folder_alone(two_jobs: TwoJobs) -> None:
    assert two_jobs.printed == ""
    assert two_jobs.new_in_start_folder == set()


def _requests(run: Stored) -> list[dict[str, Any]]:
    return [row for row in run.history if "request/index" in row]


# ---- a training in two parts ----------------------------------------------------------------------------------------


class TwoParts(NamedTuple):
    first: Stored
    second: Stored
    run_ids: list[str | None]  # before the first part, after each
    folder: Path
    errors: str


@pytest.fixture(scope="module")
def two_parts(tmp_path_factory: pytest.TempPathFactory) -> TwoParts:
    """Steps 10 to 40, killed there; then from the checkpoint of step 20 on. One step of each goes back, for wandb."""
    root = tmp_path_factory.mktemp("training")
    patch = pytest.MonkeyPatch()
    printed = _Tee()
    patch.setattr(sys, "stderr", printed)
    patch.setattr(sys, "stdout", printed)
    patch.delenv("WANDB_MODE", raising=False)
    part, rest = offline_run(), offline_run()
    run_ids = [part.run_id]
    train_job(part, root / "0", steps=(10, 20, 40, 30))
    run_ids.append(part.run_id)
    train_job(rest, root / "1", steps=(40, 30, 50), resume=part.run_id)
    run_ids.append(rest.run_id)
    patch.undo()
    return TwoParts(stored(root / "0"), stored(root / "1"), run_ids, root / "1", printed.text)


def test_a_resumed_training_is_the_same_run(two_parts: TwoParts, two_jobs: TwoJobs) -> None:
    before, first, second = two_parts.run_ids
    assert before is None
    assert first == second == two_parts.first.run_id == two_parts.second.run_id
    assert first not in (two_jobs.first.run_id, two_jobs.second.run_id, "")


def test_a_resumed_training_drops_no_point_below_the_last_step(two_parts: TwoParts) -> None:
    for part, steps in ((two_parts.first, [10, 20, 40, 30]), (two_parts.second, [40, 30, 50])):
        rows = [row for row in part.history if "train/loss" in row]
        assert [row["trainer/global_step"] for row in rows] == [row["train/loss"] for row in rows] == steps


def test_every_curve_is_drawn_over_optimizer_steps(two_parts: TwoParts) -> None:
    assert {name: two_parts.second.metrics[name] for name in ("train/*", "val/*")} == {
        "train/*": "trainer/global_step",
        "val/*": "trainer/global_step",
    }


def test_draft_is_noted_with_its_figures_and_read_where_it_lies(two_parts: TwoParts) -> None:
    (artifact,) = two_parts.second.artifacts
    assert (artifact.name, artifact.type) == ("mlp-on-SomeLM-1B", "model")
    assert json.loads(artifact.metadata) == {**ABOUT, "data": {"shards": [3, 4], "folder": "/d"}}
    files = {entry.path: Path(entry.local_path) for entry in artifact.manifest.contents}
    assert files == {name: two_parts.folder / "draft" / name for name in DRAFT}
    copies = [path for path in (two_parts.folder / "wandb").rglob("*") if path.is_file() and _holds(path, "weights")]
    assert copies == []


def _holds(path: Path, text: str) -> bool:
    return path.stat().st_size == len(text) and path.read_text() == text


def test_a_training_ends_with_its_summary_and_no_tables(two_parts: TwoParts) -> None:
    run = two_parts.second
    own = {key: value for key, value in run.summary.items() if key in ("tau", "alpha", "alpha_low", "steps")}
    assert own == {"tau": 1.75, "alpha": 0.5, "steps": 40}
    assert (run.job_type, run.exit_code) == ("train", 0)
    assert not [name for name in run.files if name.endswith(".table.json")]
    assert two_parts.errors == ""


@pytest.mark.parametrize(("resume", "asked"), [(None, (None, None)), ("abc", ("abc", "allow"))])
def test_online_a_resumed_run_may_be_there_already_or_not(
    resume: str | None,
    asked: tuple[str | None, str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also: a part without tracking hands the id on to the next."""
    import wandb

    arguments: dict[str, Any] = {}

    def refuse(**given: Any) -> None:
        arguments.update(given)
        raise OSError("not today")

    monkeypatch.setattr(wandb, "init", refuse)
    job = offline_run()
    train_job(job, tmp_path, resume=resume)
    assert (arguments["id"], arguments["resume"]) == asked
    assert job.run_id == resume
    assert capsys.readouterr().err == "wandb: not today (OSError) - train goes on without it\n"


@pytest.mark.parametrize("offline", [True, False])
def test_only_online_a_draft_is_waited_for(offline: bool) -> None:
    waited = []
    logged = SimpleNamespace(wait=lambda: waited.append(True))
    _upload(SimpleNamespace(offline=offline, log_artifact=lambda artifact: logged), "an artifact")
    assert waited == ([] if offline else [True])


def test_a_draft_that_is_not_there_costs_the_tracking_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = offline_run()
    job.start("train", CONFIG, tmp_path)
    job.log_artifact("m", "model", tmp_path / "nowhere", {})
    job.log_metrics({"train/loss": 1.0}, 1)
    job.finish({}, 1)
    errors = capsys.readouterr().err
    assert errors.count("\n") == errors.count("train goes on without it") == 1


def test_a_point_that_wandb_refuses_costs_the_tracking_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = offline_run()
    job.start("train", CONFIG, tmp_path)
    for step in (1, 2):
        job.log_metrics({1: 1.0}, step)  # type: ignore[dict-item]
    errors = capsys.readouterr().err
    assert errors.count("\n") == errors.count("train goes on without it") == 1


# ---- a bench ----


def measured(speedup: float, alpha: float | None = 0.5, rates: Sequence[float | None] = (0.5, 0.25)) -> dict[str, Any]:
    """Figures of a cell or of a category of it, as in result.json."""
    return {
        "new_tokens": 64,
        "tokens_per_s": 20.0 * speedup,
        "tokens_per_target_pass": 1.5,
        "time_to_first_token_s": 0.1,
        "timing": {"prefill": 0.1, "draft": 0.2, "verify": 0.3, "accept": 0.05, "other": 0.01},
        "spec_decode": {"mean_acceptance_length": 1.75, "per_position_acceptance": list(rates)},
        "alpha": {"mean": alpha, "low": alpha and alpha - 0.125, "high": alpha and alpha + 0.125},
        "cost_ratio": 0.05,
        "speedup": {"mean": speedup, "low": speedup - 0.25, "high": None},
        "predicted_speedup": {"formula": 1.5, "costs": None},
        "break_even_alpha": 0.3,
        "operations": 1.9,
        "identical_texts": 2,
        "texts": 2,
    }


def cell(proposer: str, speedup: float, k: int | None, sampler: str | None = "rejection", **of: Any) -> dict[str, Any]:
    return {
        "proposer": proposer,
        "peer": k is None,
        "sampler": sampler,
        "temperature": 0.7,
        "batch_size": 1,
        "num_speculative_tokens": k,
        "repeats": 2,
        "lossless": True,
        "summary": measured(speedup, **of),
        "categories": {"math": measured(speedup + 0.5), "chat": measured(speedup - 0.5)},
    }


PLAIN = cell("none", 1.0, 0, None, alpha=None, rates=())
SLOW = cell("ngram(max_ngram=4)", 1.25, 1, rates=(0.5,))
FAST = cell("ngram(max_ngram=4)", 1.5, 3, rates=(0.5, 0.25, None))
PEER = cell("hf prompt lookup", 1.125, None, None, alpha=None, rates=())
CELLS = [PLAIN, SLOW, FAST, PEER]
BEST = {key: FAST[key] for key in ("proposer", "sampler", "temperature", "batch_size", "num_speculative_tokens")}
BENCHED = {
    "command": "bench",
    "cells": CELLS,
    "summary": {
        "answer": "Use it.",
        "best": [{**BEST, "pays": True}],
        "speedup": {"mean": 1.5, "low": 1.25, "high": None},
        "alpha": {"mean": 0.5, "low": 0.375, "high": 0.625},
        "tokens_per_s": 30.0,
        "prediction_error": {"formula": 0.125, "costs": 0.0625, "cells": 2},
    },
}
PAGE = "<!doctype html><title>ä</title><script>let x = 1 < 2</script>"


def bench_job(job: WandbRun | NoRun, folder: Path) -> None:
    job.start("bench", CONFIG, folder)
    job.log_round(0, [PLAIN, SLOW])
    job.log_round(1, CELLS)
    folder.mkdir(exist_ok=True)
    (folder / "report.html").write_text(PAGE, encoding="utf-8")
    job.log_page(folder / "nowhere.html")
    job.log_page(folder / "report.html")
    job.finish(BENCHED, 0)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    folder = tmp_path_factory.mktemp("bench")
    bench_job(offline_run(), folder)
    return stored(folder)


def test_a_bench_has_a_point_for_each_round(bench: Stored) -> None:
    slow, fast, peer = "ngram_max_ngram_4_k1_rejection", "ngram_max_ngram_4_k3_rejection", "hf_prompt_lookup"
    slow, fast, peer = (f"{name}_T0_7_b1" for name in (slow, fast, peer))
    first = {"round/index": 0, f"round/speedup/{slow}": 1.25, f"round/alpha/{slow}": 0.5}
    rest = {f"round/speedup/{fast}": 1.5, f"round/alpha/{fast}": 0.5, f"round/speedup/{peer}": 1.125}
    points = [{key: value for key, value in row.items() if key.startswith("round/")} for row in bench.history]
    assert [point for point in points if point] == [first, {**first, "round/index": 1, **rest}]
    assert bench.metrics["round/*"] == "round/index"
    assert bench.job_type == "bench"


def test_a_bench_ends_with_a_row_for_each_cell_and_each_category_of_it(bench: Stored) -> None:
    cells, categories = bench.table("cells"), bench.table("categories")
    assert [(row["proposer"], row["num_speculative_tokens"]) for row in cells] == [
        ("none", 0),
        ("ngram(max_ngram=4)", 1),
        ("ngram(max_ngram=4)", 3),
        ("hf prompt lookup", None),
    ]
    assert cells[2] == {
        **BEST,
        "repeats": 2,
        "lossless": True,
        "new_tokens": 64,
        "tokens_per_s": 30.0,
        "speedup": 1.5,
        "speedup_low": 1.25,
        "speedup_high": None,
        "alpha": 0.5,
        "alpha_low": 0.375,
        "alpha_high": 0.625,
        "draft_acceptance_rate": None,
        "mean_acceptance_length": 1.75,
        "tokens_per_target_pass": 1.5,
        "time_to_first_token_s": 0.1,
        "cost_ratio": 0.05,
        "predicted_speedup_formula": 1.5,
        "predicted_speedup_costs": None,
        "break_even_alpha": 0.3,
        "operations": 1.9,
        "identical_texts": 2,
        "texts": 2,
    }
    assert set(categories[0]) == {"category", *cells[0]}
    assert [(row["category"], row["speedup"]) for row in categories[4:6]] == [("math", 2.0), ("chat", 1.0)]


def test_a_bench_shows_the_best_cell_by_category_and_of_each_proposer_by_position(bench: Stored) -> None:
    assert bench.table("speedup_by_category_table") == [
        {"category": "math", "speedup": 2.0},
        {"category": "chat", "speedup": 1.0},
    ]
    line = label(FAST)
    assert bench.table("acceptance_by_position_table") == [
        {"step": 1, "lineKey": line, "lineVal": 0.5},
        {"step": 2, "lineKey": line, "lineVal": 0.25},
    ]


def test_a_bench_is_summed_up_by_the_rule_of_every_command(bench: Stored) -> None:
    own = {key: value for key, value in bench.summary.items() if key.partition("/")[0] in BENCHED["summary"]}
    assert own == {
        "answer": "Use it.",
        "best": [{**BEST, "pays": True}],
        "speedup/mean": 1.5,
        "speedup/low": 1.25,
        "alpha/mean": 0.5,
        "alpha/low": 0.375,
        "alpha/high": 0.625,
        "tokens_per_s": 30.0,
        "prediction_error/formula": 0.125,
        "prediction_error/costs": 0.0625,
        "prediction_error/cells": 2,
    }


def test_the_page_is_a_panel_and_an_artifact_as_it_was_written(bench: Stored) -> None:
    assert bench.logged("report")["_type"] == "html-file"
    assert bench.media("report") == PAGE
    (artifact,) = (each for each in bench.artifacts if each.type == "report")
    assert artifact.name == "bench-report"
    (entry,) = artifact.manifest.contents
    assert (entry.path, Path(entry.local_path)) == ("report.html", bench.folder / "report.html")


def test_an_interrupted_bench_is_finished_with_what_there_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = offline_run()
    job.start("bench", CONFIG, tmp_path)
    job.log_round(0, [])
    job.finish({"cells": [], "summary": {}}, 130)
    run = stored(tmp_path)
    assert (run.exit_code, [row["round/index"] for row in run.history]) == (130, [0])
    assert capsys.readouterr().err == ""


# ---- a run that must stay away, or cannot be written ----------------------------------------------------------------


def test_no_run_writes_nothing_and_imports_nothing(tmp_path: Path) -> None:
    script = """
        run_job(NoRun(), FOLDER, CONFIG)
        NoRun().log_metrics({}, 1)
        NoRun().log_artifact("m", "model", FOLDER, {})
        bench_job(NoRun(), FOLDER.parent / "bench")
        NoRun().start("train", CONFIG, FOLDER, resume="abc")
        print(NoRun().run_id, "wandb" in sys.modules, list(FOLDER.iterdir()))
    """
    child = in_child(script, tmp_path)
    assert (child.output, child.errors) == ("None False []\n", "")


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_wandb_mode_disabled_in_the_environment_writes_nothing(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D6."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run_job(offline_run(mode=mode), tmp_path, CONFIG)
    job = offline_run(mode=mode)
    job.start("train", CONFIG, tmp_path, resume="abc")
    job.log_metrics({"train/loss": 1.0}, 1)
    job.log_artifact("m", "model", tmp_path, {})
    assert job.run_id == "abc"
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_the_folder_gives_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    run_job(offline_run(), tmp_path / "file", CONFIG)
    errors = capsys.readouterr().err
    assert errors.count("\n") == errors.count(WARNING) == 1
    assert (tmp_path / "file").read_text() == "mine"


def test_a_file_in_place_of_the_wandb_folder_gives_one_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wandb").write_text("mine")
    run_job(offline_run(), tmp_path, CONFIG)
    errors = capsys.readouterr().err
    assert errors.count("\n") == errors.count(WARNING) == 1


def test_a_broken_result_costs_the_tracking_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = offline_run()
    job.start("decode", CONFIG, tmp_path)
    job.log_request(0, {"timing": 5}, num_spec_tokens=2)
    job.log_request(1, request(), num_spec_tokens=2)
    job.finish({}, 1)
    errors = capsys.readouterr().err
    assert errors.count("\n") == errors.count(WARNING) == 1


def test_an_interrupted_job_is_finished_with_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also shows that a run follows a failed one: the tests before this one broke theirs."""
    job = offline_run()
    job.start("decode", CONFIG, tmp_path)
    job.finish({"requests": []}, 130)
    job.finish({"requests": []}, 130)
    assert stored(tmp_path).exit_code == 130
    assert capsys.readouterr().err == ""


def test_a_call_that_hangs_is_left_after_its_time() -> None:
    go_on = threading.Event()
    begin = time.monotonic()
    _, problem = within(0.1, go_on.wait)
    go_on.set()
    assert isinstance(problem, TimeoutError)
    assert time.monotonic() - begin < 2


def test_keyboard_interrupt_passes_through(tmp_path: Path) -> None:
    script = """
        main = threading.get_ident()
        threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
        try:
            WandbRun(mode="offline", project="p")._guard(lambda: time.sleep(20), 20)
        except KeyboardInterrupt:
            print("interrupted")
    """
    child = in_child(script, tmp_path)
    assert (child.output, child.errors) == ("interrupted\n", "")
    assert child.seconds < 10


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("mode", {"mode": "onlin"}),
        ("project", {"project": "a/b"}),
        ("project", {"project": ""}),
        ("name", {"name": True}),
        ("tags", {"tags": "ngram"}),
        ("tags", {"tags": ["x" * 65]}),
    ],
)
def test_wrong_arguments_are_named(key: str, changes: dict[str, Any]) -> None:
    with pytest.raises(UserError) as caught:
        offline_run(**changes)
    assert caught.value.key == key


@pytest.mark.parametrize(("name", "kind"), [("offline", WandbRun), ("online", WandbRun), ("none", NoRun)])
def test_each_file_of_the_wandb_group_is_one_call(name: str, kind: type) -> None:
    assert type(build(compose("decode", [f"wandb={name}"]).wandb, "wandb")) is kind


# ---- child processes ------------------------------------------------------------------------------------------------


class Child(NamedTuple):
    output: str
    errors: str
    seconds: float


def in_child(script: str, folder: Path, **environment: str) -> Child:
    """Runs `script` with the names of this module and FOLDER, an empty folder; HOME and the start folder are new."""
    for name in ("home", "start", "run"):
        (folder / name).mkdir()
    head = f"""
        import os, signal, sys, threading, time
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from test_tracking import *
        from test_tracking import service_pid
        FOLDER = Path({str(folder / "run")!r})
    """
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    kept |= {"HOME": str(folder / "home"), "PYTHONPATH": str(Path(__file__).parents[1]), **environment}
    begin = time.monotonic()
    with open(folder / "output", "w") as output, open(folder / "errors", "w") as errors:  # a hung service holds a pipe
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(script)],
            cwd=folder / "start",
            env=kept,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
            timeout=60,
            check=False,
        )
    seconds = time.monotonic() - begin
    child = Child((folder / "output").read_text(), (folder / "errors").read_text(), seconds)
    assert done.returncode == 0, child.errors
    assert list((folder / "start").iterdir()) == []
    return child


def service_pid() -> int:
    """The process id of wandb's service, which it tells in WANDB_SERVICE as version-parent-kind-socket."""
    return int(os.environ["WANDB_SERVICE"].rsplit("/", 2)[1].split("-")[2])


def no_network(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook that tells and refuses every name lookup and every socket but the service's own kind."""
    if event == "socket.getaddrinfo" or (event == "socket.connect" and arguments[0].family != socket.AF_UNIX):
        print(event, arguments, flush=True)
        raise OSError("blocked")


def test_offline_needs_no_network_and_ends_quickly(tmp_path: Path) -> None:
    """D6: Python's sockets are watched, also those of wandb's telemetry; the service gets a proxy that is dead."""
    script = """
        sys.addaudithook(no_network)
        run_job(offline_run(), FOLDER, CONFIG)
        train_job(offline_run(), FOLDER / "training")
    """
    dead = "http://127.0.0.1:9"
    child = in_child(script, tmp_path, HTTP_PROXY=dead, HTTPS_PROXY=dead, WANDB_BASE_URL=dead)
    assert (child.output, child.errors) == ("", "")
    assert child.seconds < 30
    assert len(_requests(stored(tmp_path / "run"))) == 2
    assert len(stored(tmp_path / "run" / "training").artifacts) == 1
    assert list((tmp_path / "home").iterdir()) == []


def test_online_without_a_login_warns_once_and_never_asks(tmp_path: Path) -> None:
    script = """
        run_job(WandbRun(mode="online", project="p"), FOLDER, CONFIG)
    """
    child = in_child(script, tmp_path, WANDB_BASE_URL="http://127.0.0.1:9")
    assert child.errors.count("\n") == child.errors.count(WARNING) == 1
    assert "wandb login" in child.errors
    assert child.output == ""


def test_online_without_a_network_warns_once_in_bounded_time(tmp_path: Path) -> None:
    script = """
        from specpipe import tracking
        tracking.INIT_SECONDS = 1.0
        run_job(WandbRun(mode="online", project="p"), FOLDER, CONFIG)
    """
    child = in_child(script, tmp_path, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="a" * 40)
    assert child.errors.count("\n") == child.errors.count(WARNING) == 1
    assert child.seconds < 20


def test_wandb_mode_offline_in_the_environment_wins_over_online(tmp_path: Path) -> None:
    script = """
        run_job(WandbRun(mode="online", project="p"), FOLDER, CONFIG)
    """
    child = in_child(script, tmp_path, WANDB_MODE="offline")
    assert child.errors == ""
    assert len(_requests(stored(tmp_path / "run"))) == 2


def test_a_service_killed_in_the_middle_costs_one_warning_and_the_next_job_has_its_run(tmp_path: Path) -> None:
    """Also: nothing is printed at exit, where wandb's own hook would fail on the dead service."""
    script = """
        job = offline_run()
        job.start("decode", CONFIG, FOLDER / "0")
        job.log_request(0, request(), num_spec_tokens=2)
        os.kill(service_pid(), signal.SIGKILL)
        time.sleep(0.2)
        begin = time.monotonic()
        for index in range(1, 4):
            job.log_request(index, request(), num_spec_tokens=2)
        job.finish(result(), 0)
        print(time.monotonic() - begin < 5)
        run_job(offline_run(), FOLDER / "1", CONFIG)
    """
    child = in_child(script, tmp_path)
    assert child.output == "True\n"
    assert child.errors.count("\n") == child.errors.count(WARNING) == 1
    assert len(_requests(stored(tmp_path / "run" / "1"))) == 2


def test_a_service_that_hangs_holds_up_neither_finish_nor_exit(tmp_path: Path) -> None:
    script = """
        from specpipe import tracking
        tracking.FINISH_SECONDS, tracking.ABANDON_SECONDS = 1.0, 1.0
        job = offline_run()
        job.start("decode", CONFIG, FOLDER)
        print(service_pid(), flush=True)
        os.kill(service_pid(), signal.SIGSTOP)
        job.log_request(0, request(), num_spec_tokens=2)
        job.finish(result(), 0)
    """
    child = in_child(script, tmp_path)
    os.kill(int(child.output), 9)
    assert child.errors.count("\n") == child.errors.count(WARNING) == 1
    assert child.seconds < 20
