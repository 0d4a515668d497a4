"""`decode` as a person runs it: what lands in the run folder, and that nothing finished is lost, however a run ends."""

from __future__ import annotations

import json
import math
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import specpipe
from specpipe import cli, results
from specpipe.draft import Draft
from specpipe.pipeline import Pipeline
from specpipe.sequence import Sequence
from specpipe.text import Piece
from tests.command_line import result_of

HERE = "tests.test_decode_command"
QUICK = ["target=tiny", "target.device=cpu", "wandb=none"]
SHORT = "generation.max_new_tokens=6"
TIMING = ["prefill", "draft", "verify", "accept", "other"]

Decode = Callable[..., int]


class InTheMiddle:
    """Never proposes; in the middle of the third request it does what the test wants to happen there."""

    happening: Callable[[], None] = staticmethod(lambda: time.sleep(60))

    def __init__(self) -> None:
        self._seen: list[Sequence] = []

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        self._seen += [sequence for sequence in sequences if sequence not in self._seen]
        if len(self._seen) == 3 and len(sequences[0].steps) == 2:
            type(self).happening()
        return Draft.of([[] for _ in sequences])


class UntilNobodyReads(InTheMiddle):
    """In the middle of the third request, waits until stdout is a pipe whose other end is closed."""

    @staticmethod
    def happening() -> None:
        pipe = select.poll()
        pipe.register(sys.stdout, 0)  # a closed pipe reports itself, asked for or not
        pipe.poll(60_000)


IN_THE_MIDDLE = ["proposer=none", f"proposer._target_={HERE}.InTheMiddle"]


@pytest.fixture
def decode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Decode]:
    """Runs the command line in this process, with quick settings and its run folder in tmp_path/run."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*overrides: str) -> int:
        short = [] if any("max_new_tokens" in override for override in overrides) else [SHORT]
        words = ["specpipe", "decode", *QUICK, f"hydra.run.dir={tmp_path / 'run'}", *short, *overrides]
        monkeypatch.setattr(sys, "argv", words)
        return cli.main()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # faster for a model this small
    yield run
    torch.set_num_threads(threads)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def twelve(tmp_path: Path) -> list[str]:
    """Overrides for twelve prompts."""
    file = tmp_path / "twelve.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"prompt {n} [x]"}) + "\n" for n in range(12)))
    return ["prompts=jsonl", f"prompts.path={file}"]


def test_result_json_keeps_its_contract(decode: Decode, tmp_path: Path, twelve: list[str]) -> None:
    """DESIGN section 6."""
    assert decode(*twelve, "prompts.limit=3", "num_speculative_tokens=2", "seed=5") == 0
    result = result_of(tmp_path / "run")
    assert result["command"] == "decode"
    assert result["version"] == specpipe.__version__
    assert result["seed"] == 5
    assert result["target"] == {
        "model": "tiny",
        "path": None,
        "dtype": "float32",
        "parameters": result["target"]["parameters"],
        "device": "cpu",
    }
    assert [result[part] for part in ("proposer", "sampler")] == ["ngram", "rejection"]
    assert result["verifier"] in ("compiled", "packed")  # what `auto` came to
    assert result["config"]["proposer"]["max_ngram"] == 3
    assert result["config"]["generation"]["max_new_tokens"] == 6
    assert result["lossless"] is True
    assert len(result["requests"]) == 3
    for request in result["requests"]:
        assert {"prompt", "prompt_tokens", "text", "token_ids", "finish_reason", "timing", "spec_decode"} <= set(
            request
        )
        assert request["finish_reason"] in ("stop", "length")
    summary = result["summary"]
    assert {"new_tokens", "tokens_per_s", "tokens_per_target_pass", "time_to_first_token_s"} <= set(summary)
    assert {"timing", "spec_decode", "alpha", "cost_ratio"} <= set(summary)
    assert list(summary["timing"]) == TIMING
    assert set(summary["alpha"]) == {"mean", "low", "high"}
    assert summary["new_tokens"] == sum(len(request["token_ids"]) for request in result["requests"])
    for part in TIMING:
        assert math.isclose(summary["timing"][part], sum(request["timing"][part] for request in result["requests"]))


def test_the_run_folder_holds_config_and_provenance_and_a_trace_when_asked(decode: Decode, tmp_path: Path) -> None:
    """C45, D1."""
    before = sorted(os.listdir())
    assert decode("prompt=hello", "trace=true") == 0
    run = tmp_path / "run"
    assert {"config.yaml", "hydra.yaml", "overrides.yaml"} <= {file.name for file in (run / ".hydra").iterdir()}
    assert "decode" in json.loads((run / "provenance.json").read_text())["command_line"]
    steps = [json.loads(line) for line in (run / "trace.jsonl").read_text().splitlines()]
    (request,) = result_of(run)["requests"]
    assert [token for step in steps for token in step["token_ids"]] == request["token_ids"]
    counts = request["spec_decode"]
    assert len(steps) == counts["num_spec_steps"] + counts["num_plain_steps"]
    assert sorted(os.listdir()) == before


def test_standard_output_is_the_text_and_the_rest_is_beside_it(
    decode: Decode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert decode("prompt=hello") == 0
    out, err = capsys.readouterr()
    assert out == result_of(tmp_path / "run")["requests"][0]["text"] + "\n"
    assert "tokens/target pass" in err
    assert f"result: {tmp_path / 'run' / 'result.json'}\n" in err


def test_no_new_tokens_is_an_empty_answer_and_no_error(
    decode: Decode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert decode("prompt=hello", "generation.max_new_tokens=0") == 0
    out, err = capsys.readouterr()
    assert out == "\n"
    assert "tokens/s            n/a" in err
    result = result_of(tmp_path / "run")
    assert result["requests"][0]["text"] == ""
    assert result["requests"][0]["finish_reason"] == "length"
    assert result["summary"]["tokens_per_target_pass"] is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_in_the_third_of_twelve_keeps_two_answers_and_what_there_is_of_the_third(
    decode: Decode,
    tmp_path: Path,
    twelve: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: signal.Signals,
) -> None:
    monkeypatch.setattr(InTheMiddle, "happening", staticmethod(lambda: signal.raise_signal(number)))
    assert decode(*twelve, *IN_THE_MIDDLE) == 130
    result = result_of(tmp_path / "run")
    assert [request["finish_reason"] for request in result["requests"]] == ["length", "length", "interrupted"]
    assert len(result["requests"][2]["token_ids"]) == 2
    assert result["summary"]["new_tokens"] == 6 + 6 + 2
    others = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]
    assert others == ["interrupted"]


def test_a_killed_run_has_left_the_requests_finished_before(
    decode: Decode, tmp_path: Path, twelve: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a SIGKILL in the third request would leave; SAVE_EVERY_S seconds are taken to be over."""
    monkeypatch.setattr(results, "SAVE_EVERY_S", 0.0)
    monkeypatch.setattr(results, "SAVE_SHARE", math.inf)
    left: list[dict[str, Any]] = []
    monkeypatch.setattr(InTheMiddle, "happening", staticmethod(lambda: left.append(result_of(tmp_path / "run"))))
    assert decode(*twelve, *IN_THE_MIDDLE, "prompts.limit=3") == 0
    assert [request["finish_reason"] for request in left[0]["requests"]] == ["length", "length"]
    assert left[0]["summary"]["new_tokens"] >= 12


@pytest.mark.parametrize("traced", ["0", "1"])
def test_a_bug_in_a_users_proposer_is_one_line_and_keeps_the_requests_before_it(
    decode: Decode,
    tmp_path: Path,
    twelve: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    traced: str,
) -> None:
    """It names the class, what it raised and what was due; HYDRA_FULL_ERROR=1 shows where."""

    def bug() -> None:
        raise ZeroDivisionError("mine")

    monkeypatch.setattr(InTheMiddle, "happening", staticmethod(bug))
    monkeypatch.setenv("HYDRA_FULL_ERROR", traced)
    assert decode(*twelve, *IN_THE_MIDDLE) == 2
    err = capsys.readouterr().err
    line = "specpipe: InTheMiddle raised ZeroDivisionError (mine) where it had to return a Draft"
    assert err.splitlines()[-1] == f"{line}; an empty one is always allowed; HYDRA_FULL_ERROR=1 shows where."
    assert ('raise ZeroDivisionError("mine")' in err) == (traced == "1")
    result = result_of(tmp_path / "run")
    assert [request["finish_reason"] for request in result["requests"]] == ["length", "length", "interrupted"]
    assert result["summary"]["new_tokens"] == 14


def test_a_disk_that_fills_up_is_one_line_and_the_text_was_shown(
    decode: Decode,
    tmp_path: Path,
    twelve: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    def fill() -> None:
        monkeypatch.setattr(Path, "write_bytes", full)

    monkeypatch.setattr(InTheMiddle, "happening", staticmethod(fill))
    assert decode(*twelve, *IN_THE_MIDDLE, "prompts.limit=4") == 2
    out, err = capsys.readouterr()
    assert out.count("\f\n") == 3
    (line,) = [line for line in err.splitlines() if "No space left" in line]
    assert line == f"specpipe: not all results could be saved in '{tmp_path / 'run'}': No space left on device."
    assert "Traceback" not in err
    assert "tokens/s" in err


def test_the_name_of_a_users_own_option_is_in_the_result(decode: Decode, tmp_path: Path) -> None:
    (tmp_path / "conf" / "proposer").mkdir(parents=True)
    (tmp_path / "conf" / "proposer" / "mine.yaml").write_text(f"_target_: {HERE}.InTheMiddle\n")
    assert decode("proposer=mine", "prompt=hello", "--config-dir", str(tmp_path / "conf")) == 0
    result = result_of(tmp_path / "run")
    assert result["proposer"] == "mine"
    assert result["config"]["proposer"] == {"_target_": f"{HERE}.InTheMiddle"}


def test_two_sources_of_prompts_are_refused(
    decode: Decode, twelve: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """C45: neither is ignored in silence."""
    assert decode(*twelve, "prompt=hello") == 2
    assert "given beside prompts=jsonl" in capsys.readouterr().err
    assert decode("prompt=hello", "prompts.limit=3") == 2
    assert "given beside prompts.limit=3" in capsys.readouterr().err


def test_load_gives_the_pipeline_of_the_command_line() -> None:
    pipeline: Pipeline = specpipe.load("target=tiny", "target.device=cpu", "wandb=none", "generation.max_new_tokens=8")
    (first, second) = pipeline.generate(["hello", [1, 2, 3]])
    assert len(first.token_ids) == len(second.token_ids) == 8
    assert second.prompt == [1, 2, 3]
    pieces: list[Piece] = list(pipeline.stream("hello"))
    assert "".join(piece.text for piece in pieces) == first.text


def start(folder: Path, *overrides: str, **streams: Any) -> subprocess.Popen[bytes]:
    root = Path(__file__).resolve().parent.parent
    words = [sys.executable, "-m", "specpipe", "decode", *QUICK, SHORT, f"hydra.run.dir={folder}", *overrides]
    environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(words, cwd=root, env=environment, stdin=subprocess.DEVNULL, **streams)


def test_a_closed_pipe_ends_quietly_with_results_saved(tmp_path: Path, twelve: list[str]) -> None:
    """As in `decode | head -1`."""
    waits = ["proposer=none", f"proposer._target_={HERE}.UntilNobodyReads"]
    with start(tmp_path / "run", *twelve, *waits, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        err = process.stderr.read().decode()
        code = process.wait(60)
    assert code == 141
    assert all(line.startswith("[") for line in err.splitlines()), err
    result = result_of(tmp_path / "run")
    assert result["requests"][-1]["finish_reason"] == "interrupted"
    assert "alpha" in result["summary"]


def test_ctrl_c_on_a_terminal_leaves_it_whole(tmp_path: Path, twelve: list[str]) -> None:
    """The cursor is shown again, the colour is off, and the last line is the one that says so."""
    terminal, side = pty.openpty()
    process = start(tmp_path / "run", *twelve, *IN_THE_MIDDLE, stdout=side, stderr=side)
    os.close(side)
    shown = b""
    while b"[3/12]" not in shown:
        shown += os.read(terminal, 4096)
    time.sleep(0.3)  # into the third request, which sleeps
    process.send_signal(signal.SIGINT)
    try:
        while chunk := os.read(terminal, 4096):
            shown += chunk
    except OSError:  # how Linux reports that the other side was closed
        pass
    assert process.wait(60) == 130
    os.close(terminal)
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") == 1
    assert shown.rstrip().endswith(b"interrupted")
    assert b"Traceback" not in shown
    assert [request["finish_reason"] for request in result_of(tmp_path / "run")["requests"]][2:] == ["interrupted"]


def test_a_rule_that_could_not_run_as_asked_says_so(
    decode: Decode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C45: block verification needs q, and n-gram drafts have none; the result names the rule that ran."""
    for sampler, note in (("block", True), ("rejection", False)):
        assert decode(f"sampler={sampler}", "prompt=abcabcabcabc", "generation.max_new_tokens=30") == 0
        assert ("ngram gives no q, so the rule of sampler=rejection judged" in capsys.readouterr().err) == note
        result = result_of(tmp_path / "run")
        assert result["sampler"] == sampler
        assert list(result["summary"]["steps_by_rule"]) == ["rejection"]


@pytest.mark.parametrize("generation", ["greedy", "sample"])
def test_a_batch_writes_and_shows_what_single_requests_do(
    decode: Decode, tmp_path: Path, twelve: list[str], generation: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """C33, C37: in float32 ids, texts and their order are those of batch_size=1."""
    results, shown = [], []
    for size in (1, 5):
        words = [f"generation={generation}", "proposer=layer_skip", "proposer.layers=1", "generation.max_new_tokens=12"]
        assert decode(*twelve, *words, f"batch_size={size}", "trace=true") == 0
        results.append(result_of(tmp_path / "run"))
        shown.append(capsys.readouterr().out)
    alone, together = results
    assert shown[0] == shown[1]
    assert (alone["batch_size"], together["batch_size"]) == (1, 5)
    for key in ("prompt", "text", "token_ids", "finish_reason", "spec_decode"):
        assert [each[key] for each in alone["requests"]] == [each[key] for each in together["requests"]]
    counts = together["summary"]["spec_decode"]
    assert counts == alone["summary"]["spec_decode"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "trace.jsonl").read_text().splitlines()]
    assert sum(len(line["token_ids"]) for line in lines) == 12 * 12
    assert {line["request"] for line in lines[:5]} == set(range(5))


def test_an_interrupted_batch_keeps_what_was_decoded(
    decode: Decode, tmp_path: Path, twelve: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request of the batch as far as it got; those that had not begun are not there."""
    monkeypatch.setattr(InTheMiddle, "happening", staticmethod(lambda: signal.raise_signal(signal.SIGINT)))
    assert decode(*twelve, *IN_THE_MIDDLE, "batch_size=3") == 130
    requests = result_of(tmp_path / "run")["requests"]
    assert [(each["finish_reason"], len(each["token_ids"])) for each in requests] == [("interrupted", 2)] * 3
