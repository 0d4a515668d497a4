"""`audit` as a person runs it: verdicts, exit codes, what lands in the run folder, other engines' output."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import specpipe
from specpipe import cli
from specpipe.audit import exact, sampled
from specpipe.audit.outputs import read_outputs
from specpipe.chance import Chance
from specpipe.commands import audit as command
from specpipe.distribution import Rows
from specpipe.draft import Draft
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.verifier.targets import tiny

HERE = "tests.test_audit_command"
QUICK = ["target=tiny", "target.device=cpu", "wandb=none", "generation.max_new_tokens=64", "generation.ignore_eos=true"]
SHORT = ["tokens=300", "greedy_tokens=100", "prompts.limit=3"]

Audit = Callable[..., int]


class AlwaysAccepts(Rejection):
    """A rule that keeps every draft: lossy."""

    def accept(self, x: list[int], p: Rows, q: torch.Tensor | None, chance: Chance) -> tuple[int, int]:
        return len(x), chance.draw(p[len(x)])


class Impossible:
    """Proposes what its own q excludes."""

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        draft = Draft.of([[5] * k for k in lengths])
        probs = torch.zeros(*draft.tokens.shape, tiny(device="cpu").vocabulary)
        probs[..., 6] = 1
        return Draft(draft.tokens, draft.lengths, probs)


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Audit:
    """Runs the command line in this process with few cases of the exact law, its run folder in tmp_path/run."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(exact, "SETTINGS", {"temperature 1": {"temperature": 1.0}})
    monkeypatch.setattr(exact, "GAMMAS", (2,))
    monkeypatch.setattr(sampled, "ENOUGH", 0.07)

    def run(*overrides: str, short: bool = True) -> int:
        given = {word.partition("=")[0] for word in overrides}
        quick = [word for word in (*QUICK, *SHORT[: 3 * short]) if word.partition("=")[0] not in given]
        monkeypatch.setattr(sys, "argv", ["specpipe", "audit", *quick, f"hydra.run.dir={tmp_path / 'run'}", *overrides])
        return cli.main()

    return run


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run" / "result.json").read_text("utf-8"))


def found(result: dict[str, Any]) -> dict[str, str]:
    return {test["test"]: test["result"] for test in result["tests"]}


def test_a_right_pipeline_is_lossless(audit: Audit, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert audit("tokens=1500") == 0
    result = result_of(tmp_path)
    assert (result["command"], result["verdict"], result["lossless"]) == ("audit", "lossless", True)
    assert found(result) == {
        "exact law": "passed",
        "greedy identity": "passed",
        "sampled law": "passed",
        "proposal contract": "not applicable",
    }
    assert len(result["reasons"]) == 3
    assert result["summary"]["new_tokens"] >= 1500
    assert result["summary"]["spec_decode"]["num_draft_tokens"] > 0
    assert result["config"]["tokens"] == 1500
    said = capfd.readouterr()
    assert [line.split()[0] for line in said.out.splitlines()] == ["exact", "greedy", "sampled", "proposal", "verdict"]
    assert said.out.splitlines()[-1].split() == ["verdict", "lossless"]
    assert "result.json" in said.err
    assert "report.html" in said.err
    assert "lossless" in (tmp_path / "run" / "report.html").read_text("utf-8")


def test_too_few_tokens_are_not_enough_data(audit: Audit, tmp_path: Path) -> None:
    assert audit("proposer=none") == 3
    result = result_of(tmp_path)
    assert result["verdict"] == "not enough data"
    assert "it takes about" in result["reasons"][0]


def test_a_users_own_sampler_that_is_lossy_is_biased(
    audit: Audit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """C6: through --config-dir; the exact law, greedy identity and the sampled law all see it."""
    (tmp_path / "conf" / "sampler").mkdir(parents=True)
    (tmp_path / "conf" / "sampler" / "mine.yaml").write_text(f"_target_: {HERE}.AlwaysAccepts\n")
    assert audit("--config-dir", str(tmp_path / "conf"), "sampler=mine", "tokens=1500") == 1
    result = result_of(tmp_path)
    assert (result["verdict"], result["sampler"]) == ("biased", "mine")
    assert found(result)["exact law"] == found(result)["greedy identity"] == "failed"
    assert capfd.readouterr().out.splitlines()[-1].split() == ["verdict", "biased"]


def test_a_proposer_that_breaks_its_contract_is_biased(audit: Audit, tmp_path: Path) -> None:
    assert audit("proposer=none", f"proposer._target_={HERE}.Impossible") == 1
    result = result_of(tmp_path)
    assert result["tests"][-1]["test"] == "proposal contract"
    assert "Impossible" in result["tests"][-1]["reason"]


def test_at_temperature_zero_the_sampled_law_is_skipped(audit: Audit, tmp_path: Path) -> None:
    assert audit("generation.temperature=0") == 0
    assert found(result_of(tmp_path))["sampled law"] == "not applicable"


def test_what_was_sampled_can_be_judged_again_as_a_file(audit: Audit, tmp_path: Path) -> None:
    """The same tokens, without knowing the proposer: right under their own settings, biased under others."""
    audit("tokens=1500")
    file = tmp_path / "sampled.jsonl"
    (tmp_path / "run" / "outputs.jsonl").rename(file)
    assert audit(f"file={file}", short=False) == 0
    result = result_of(tmp_path)
    assert (result["verdict"], result["proposer"], result["sampler"]) == ("lossless", None, None)
    assert list(found(result)) == ["sampled law"]
    assert audit(f"file={file}", "generation.temperature=0.8", short=False) == 1
    assert audit(f"file={file}", "generation.top_k=5", short=False) == 1
    assert "probability 0" in result_of(tmp_path)["reasons"][0]
    assert audit(f"file={file}", "generation.temperature=0", short=False) == 1


def test_greedy_output_of_another_engine_is_compared_token_by_token(audit: Audit, tmp_path: Path) -> None:
    pipeline = specpipe.load(*QUICK[:3], "generation.max_new_tokens=60", "generation.ignore_eos=true")
    done = pipeline.generate(["abc", "Hello"])
    lines = [
        {"prompt_ids": pipeline.text.encode(text), "output_ids": each.token_ids}
        for text, each in zip(["abc", "Hello"], done, strict=True)
    ]
    file = tmp_path / "greedy.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    assert audit(f"file={file}", "generation.temperature=0", short=False) == 0
    lines[1]["output_ids"][3] = (lines[1]["output_ids"][3] + 1) % 250
    file.write_text("\n".join(map(json.dumps, lines)))
    assert audit(f"file={file}", "generation.temperature=0", short=False) == 1


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "holds no outputs"),
        ("{", "line 1: not JSON"),
        ('{"prompt_ids": [1]}', "line 1: needs lists of token ids"),
        ('{"prompt_ids": [1], "output_ids": [1.5]}', "line 1: needs lists"),
        ('{"prompt_ids": [1], "output_ids": [true]}', "line 1: needs lists"),
        ('{"prompt_ids": [], "output_ids": [1]}', "line 1: prompt_ids is empty"),
        (
            '{"prompt_ids": [1], "output_ids": [1]}\n{"prompt_ids": [1], "output_ids": [99999]}',
            "line 2: output_ids holds",
        ),
        ('{"prompt_ids": [1], "output_ids": [' + "1," * 600 + "1]}", "do not fit the target's context"),
    ],
)
def test_a_file_that_cannot_be_judged_is_one_line(
    audit: Audit, tmp_path: Path, capfd: pytest.CaptureFixture[str], content: str, said: str
) -> None:
    file = tmp_path / "outputs.jsonl"
    file.write_text(content)
    assert audit(f"file={file}", short=False) == 2
    error = capfd.readouterr().err
    assert said in error
    assert error.startswith("specpipe: file: ")
    assert len(error.splitlines()) == 1


def test_tokens_behind_an_end_of_text_are_named(
    audit: Audit, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Batches of other engines are padded with the end-of-text id; those tokens were never drawn."""
    [eos] = tiny(device="cpu").eos_ids
    file = tmp_path / "outputs.jsonl"
    file.write_text(json.dumps({"prompt_ids": [1], "output_ids": [1, eos, eos]}))
    assert audit(f"file={file}", "generation.ignore_eos=false", short=False) == 2
    assert "go on behind" in capfd.readouterr().err


@pytest.mark.parametrize("override", ["proposer=none", "sampler=block", "tokens=5", "prompts.limit=2", "prompt=hello"])
def test_what_describes_our_pipeline_is_refused_beside_a_file(
    audit: Audit, tmp_path: Path, capfd: pytest.CaptureFixture[str], override: str
) -> None:
    """A setting that cannot be honoured is an error, never silence."""
    file = tmp_path / "outputs.jsonl"
    file.write_text('{"prompt_ids": [1], "output_ids": [1]}')
    assert audit(f"file={file}", override, short=False) == 2
    assert override.partition("=")[0].partition(".")[0] in capfd.readouterr().err


def test_a_line_may_hold_any_text_beside_its_ids(audit: Audit, tmp_path: Path) -> None:
    """Other engines write their text too; line separators of Unicode do not end a line of JSON."""
    file = tmp_path / "outputs.jsonl"
    row = {"prompt_ids": [1], "output_ids": [2], "text": "a\u2028b\u0085c"}
    file.write_text(json.dumps(row, ensure_ascii=False) + "\r\n", encoding="utf-8")
    assert audit(f"file={file}", short=False) == 3


class Raises(Rejection):
    """Fails where it is asked."""

    def accept(self, x: list[int], p: Rows, q: torch.Tensor | None, chance: Chance) -> tuple[int, int]:
        raise ValueError("my bug")


def test_a_sampler_that_raises_is_told_once(audit: Audit, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert audit(f"sampler._target_={HERE}.Raises") == 1
    result = result_of(tmp_path)
    assert list(found(result)) == ["exact law"]
    assert "my bug" in result["reasons"][0]
    assert "Traceback" not in capfd.readouterr().err


def test_a_crash_is_not_a_verdict(
    audit: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1 means biased, and a program that dies of a bug would give it."""

    def broken(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(command.PipelineAudit, "_sample", broken)
    assert audit() == 70
    assert "a bug" in capfd.readouterr().err
    assert result_of(tmp_path)["verdict"] is None


@pytest.mark.parametrize("override", ["tokens=0", "batch_size=0", "greedy_tokens=-1", "tokens=many", "trace=true"])
def test_wrong_values_are_one_line(audit: Audit, capfd: pytest.CaptureFixture[str], override: str) -> None:
    assert audit(override, short=False) == 2
    assert override.partition("=")[0] in capfd.readouterr().err


def test_an_interrupted_audit_keeps_the_tests_that_were_done(
    audit: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command.PipelineAudit, "_sample", interrupted)
    assert audit() == 130
    result = result_of(tmp_path)
    assert result["verdict"] is None
    assert list(found(result)) == ["exact law", "greedy identity"]
    assert (tmp_path / "run" / "report.html").exists()


def test_a_reader_that_leaves_ends_the_audit(audit: Audit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    assert audit() == 141
    assert result_of(tmp_path)["tests"]


def test_a_seed_fixes_what_is_sampled(audit: Audit, tmp_path: Path) -> None:
    outputs = []
    for seed in (1, 1, 2):
        audit(f"seed={seed}", "tokens=64", "greedy_tokens=1")
        outputs.append(read_outputs(str(tmp_path / "run" / "outputs.jsonl")))
    assert outputs[0] == outputs[1] != outputs[2]


def test_batches_do_not_change_what_is_sampled(audit: Audit, tmp_path: Path) -> None:
    """Seeds belong to requests: in float32 a request's ids are the same alone and among others."""
    outputs = []
    for size in (1, 4):
        audit(f"batch_size={size}", "tokens=190", "greedy_tokens=1")
        outputs.append(read_outputs(str(tmp_path / "run" / "outputs.jsonl"))[:3])
    assert outputs[0] == outputs[1]
