"""`profile=true`: the split of a step, operation by operation, and a file for a trace viewer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from specpipe.clock import PARTS
from specpipe.profiling import FILE, LISTED, RECORDED, SKIPPED, Profiler
from tests.command_line import Run

WORDS = ["decode", "target=tiny", "wandb=none", "prompt=abcabcabc", "generation.ignore_eos=true", "profile=true"]


def profiled(specpipe: Run, *words: str) -> tuple[Any, str]:
    """The block of result.json, and what was printed."""
    ran = specpipe(*WORDS, *words, "hydra.run.dir=run")
    assert ran.code == 0
    return json.loads(Path("run/result.json").read_text())["profile"], ran.err


def test_the_parts_of_a_step_and_what_lies_between_their_operations(specpipe: Run) -> None:
    found, said = profiled(specpipe, "proposer=ngram", "generation.max_new_tokens=150")
    assert found["steps"] == RECORDED
    names = [part["name"] for part in found["parts"]]
    assert names == [name for name in PARTS if name in names]
    assert {"draft", "verify", "accept"} <= set(names)
    assert "prefill" not in names
    for part in found["parts"]:
        assert 0 <= part["between_operations_ms"] <= part["ms"]
    assert len(found["operations"]) == LISTED
    assert all(each["calls"] > 0 for each in found["operations"])
    assert not {each["name"] for each in found["operations"]} & set(PARTS)
    assert f"profile of {RECORDED} steps" in said
    assert "between operations" in said
    assert f"profile: {Path.cwd() / 'run' / FILE}\n" in said


def test_a_trace_viewer_finds_the_parts_and_their_operations(specpipe: Run) -> None:
    profiled(specpipe, "generation.max_new_tokens=60")
    with gzip.open(f"run/{FILE}", "rt") as file:
        events = json.load(file)["traceEvents"]
    names = [event.get("name") for event in events]
    assert names.count("verify") >= RECORDED
    assert any(str(name).startswith("aten::") for name in names)


def test_a_pass_over_several_requests_is_one_step(specpipe: Run) -> None:
    rows = "".join(json.dumps({"prompt": text}) + "\n" for text in ("abcabc", "xyz", "aabb"))
    Path("rows.jsonl").write_text(rows)
    words = [
        "prompts=jsonl",
        "prompts.path=rows.jsonl",
        "batch_size=3",
        "proposer=none",
        "generation.max_new_tokens=20",
    ]
    ran = specpipe(*[word for word in WORDS if not word.startswith("prompt=")], *words, "hydra.run.dir=run")
    assert ran.code == 0
    assert json.loads(Path("run/result.json").read_text())["profile"]["steps"] == 20 - SKIPPED


def test_a_run_of_few_steps_says_that_nothing_was_recorded(specpipe: Run) -> None:
    found, said = profiled(specpipe, "proposer=none", f"generation.max_new_tokens={SKIPPED}")
    assert found == {}
    assert "nothing was recorded" in said
    assert not Path("run", FILE).exists()


def test_nothing_is_recorded_unless_asked(specpipe: Run) -> None:
    assert specpipe(*WORDS[:-1], "generation.max_new_tokens=50", "hydra.run.dir=run").code == 0
    assert "profile" not in json.loads(Path("run/result.json").read_text())
    assert not Path("run", FILE).exists()


@pytest.mark.parametrize("steps", [0, 1, SKIPPED, SKIPPED + 1, SKIPPED + RECORDED + 5])
def test_a_profiler_counts_the_steps_behind_the_skipped_ones(steps: int) -> None:
    profiler = Profiler(torch.device("cpu"))
    for _ in range(steps):
        profiler.step()
    profiler.stop()
    assert profiler.steps == min(RECORDED, max(0, steps - SKIPPED))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_profile_that_does_not_fit_is_one_line_and_result_json_is_saved_all_the_same(specpipe: Run) -> None:
    Path("run").mkdir()
    Path("run", FILE).symlink_to("/dev/full")
    ran = specpipe(*WORDS, "generation.max_new_tokens=60", "hydra.run.dir=run")
    assert ran.code == 2
    assert "No space left on device" in ran.err
    assert "Traceback" not in ran.err
    assert json.loads(Path("run/result.json").read_text())["profile"]["steps"] > 0
