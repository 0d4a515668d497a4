"""The run folder: result.json is whole at any moment, and nothing that was finished is lost."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from specpipe import results
from specpipe.errors import UserError
from specpipe.results import RunFolder, provenance, undisturbed
from specpipe.sequence import Step

HEAD = {"command": "decode", "seed": 7}


def read(folder: Path) -> dict[str, Any]:
    """result.json as strict JSON: no NaN, no Infinity."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return json.loads((folder / "result.json").read_text("utf-8"), parse_constant=refuse)


def run_folder(folder: Path, *, trace: bool = False, **summary: Any) -> RunFolder:
    return RunFolder(folder, HEAD, lambda: {"new_tokens": 0, **summary}, trace=trace)


def fail_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)


def test_result_json_is_complete_from_the_first_moment(tmp_path: Path) -> None:
    run_folder(tmp_path / "run")
    result = read(tmp_path / "run")
    assert list(result) == ["command", "version", "seed", "requests", "summary"]
    assert result["requests"] == []
    assert result["summary"] == {"new_tokens": 0}


def test_a_finished_request_is_on_disk_after_two_seconds_though_no_other_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may be killed (SIGKILL) in the middle of a long request."""
    now = [0.0]
    monkeypatch.setattr(results.time, "monotonic", lambda: now[0])
    folder = run_folder(tmp_path)
    step = Step(drafted=0, accepted=0, tokens=[1], overlaps=[])
    for number in range(3):
        folder.request({"number": number})
    assert read(tmp_path)["requests"] == []  # saved a moment ago
    now[0] = 2.1
    folder.step(3, 0, step)
    assert [request["number"] for request in read(tmp_path)["requests"]] == [0, 1, 2]
    assert {file.name for file in tmp_path.iterdir()} == {"result.json", "provenance.json"}


def test_saving_takes_a_small_part_of_the_time_however_much_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    saves: list[float] = []

    def slow_write(file: Path, content: Any) -> None:
        saves.append(now[0])
        now[0] += 1.0

    folder = run_folder(tmp_path)
    monkeypatch.setattr(results.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(results, "_write_json", slow_write)
    folder._next_save = 0.0
    for _ in range(1000):
        now[0] += 0.1
        folder.request({})
    assert len(saves) <= 6


def test_trace_has_one_line_per_step_and_is_not_there_unless_asked_for(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "with", trace=True)
    step = Step(2, 1, [4, 5], [0.5, float("nan")], asked=3, seconds={"draft": 0.25})
    folder.step(0, 0, step)
    folder.step(0, 1, step)
    assert folder.finish() is None
    lines = [json.loads(line) for line in (tmp_path / "with" / "trace.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert lines[0] == {
        "request": 0,
        "step": 0,
        "asked": 3,
        "drafted": 2,
        "accepted": 1,
        "token_ids": [4, 5],
        "kinds": ["accepted", "correction"],
        "overlaps": [0.5, None],
        "has_q": False,
        "source": None,
        "draft_token_ids": None,
        "log_p": None,
        "log_q": None,
        "seconds": {"draft": 0.25},
    }
    run_folder(tmp_path / "without").step(0, 0, step)
    assert not (tmp_path / "without" / "trace.jsonl").exists()


def test_nan_becomes_null_and_bytes_that_are_no_text_do_not_cost_the_results(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, alpha=float("nan"), list=[float("inf"), 1.5])
    folder.request({"prompt": "bad byte \udcff, 日本", "text": "\ufffd\x1b\x00"})
    assert folder.finish() is None
    result = read(tmp_path)
    assert result["summary"] == {"new_tokens": 0, "alpha": None, "list": [None, 1.5]}
    assert result["requests"] == [{"prompt": "bad byte \udcff, 日本", "text": "\ufffd\x1b\x00"}]


def test_a_full_disk_while_decoding_is_no_reason_to_stop_and_is_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = run_folder(tmp_path)
    folder.request({"number": 0})
    folder.finish()
    monkeypatch.setattr(folder, "_next_save", 0.0)
    with monkeypatch.context() as full:
        fail_to_write(full)
        folder.request({"number": 1})
        problem = folder.finish()
    assert problem == f"not all results could be saved in '{tmp_path}': No space left on device."
    assert [request["number"] for request in read(tmp_path)["requests"]] == [0]  # the last whole one
    assert not list(tmp_path.glob(".result*"))
    folder.finish()  # there is room again
    assert len(read(tmp_path)["requests"]) == 2


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_trace_that_does_not_fit_is_told_and_result_json_is_saved_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").symlink_to("/dev/full")
    folder = run_folder(tmp_path, trace=True)
    for number in range(3):
        folder.step(0, number, Step(drafted=0, accepted=0, tokens=list(range(5000)), overlaps=[]))
    folder.request({})
    assert "No space left on device" in (folder.finish() or "")
    assert len(read(tmp_path)["requests"]) == 1


def test_a_folder_that_cannot_be_written_is_one_line_before_anything_is_decoded(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"hydra\.run\.dir: '.*file/run' cannot be written: Not a directory"):
        run_folder(tmp_path / "file" / "run")


def test_a_second_ctrl_c_while_saving_waits_until_result_json_is_whole(tmp_path: Path) -> None:
    folder = run_folder(tmp_path)
    folder.request({"text": "kept"})

    def impatient() -> None:
        with undisturbed():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            folder.finish()

    with pytest.raises(KeyboardInterrupt):
        impatient()
    assert read(tmp_path)["requests"] == [{"text": "kept"}]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_results_can_be_put_away_from_a_thread_too() -> None:
    seen = []

    def work() -> None:
        with undisturbed():
            seen.append(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [1]


def test_provenance_names_code_versions_machine_and_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/x/specpipe/__main__.py", "decode", "prompt=a b"])
    found = provenance()
    assert found["command_line"] == "python -m specpipe decode 'prompt=a b'"
    assert found["packages"]["torch"]
    assert found["machine"]["cores"] == os.cpu_count()
    json.dumps(found, allow_nan=False)
    monkeypatch.setattr(sys, "argv", ["specpipe", "decode"])
    assert provenance()["command_line"] == "specpipe decode"
