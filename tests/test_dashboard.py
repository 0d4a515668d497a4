"""`dashboard`: the workspace names nothing that no run holds, is written first, and saved at wandb or says why not."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specpipe import cli
from specpipe.commands import dashboard
from tests.test_tracking import bench_job, in_child, offline_run
from tests.wandb_runs import Stored, stored
from train.module import figures

pytest.importorskip("wandb_workspaces")
from specpipe.workspace import serialised, workspace

ROOT = Path(cli.__file__).resolve().parent.parent
REGEX = re.compile(r"\w+/[\w/]+\.\*")  # as the workspace writes them: a beginning, then anything
HEADS, GAMMA = 2, 4


def specpipe(*words: str, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["specpipe", *words])
    return cli.main()


# ---- what is named, and what is logged -------------------------------------------------------------------------------


def named(spec: Any) -> Iterator[str]:
    """All metrics, tables and pages that panels and columns of a workspace name, wherever they stand in it."""
    if isinstance(spec, list):
        for each in spec:
            yield from named(each)
    if not isinstance(spec, dict):
        return
    for key, value in spec.items():
        if key in ("metrics", "mediaKeys"):
            yield from value
        elif key in ("xAxis", "yAxis", "metricRegex"):
            yield str(value)
        elif key == "columnOrder":
            yield from (column for column in value if column != "run:displayName")
        elif key == "name" and value == "tableKey":
            yield str(spec["value"])
        elif key == "key" and isinstance(value, dict) and "val" in value:  # of a table's panel
            yield str(value["val"])
        else:
            yield from named(value)


def held_by(run: Stored) -> set[str]:
    rows = {key.partition(".")[0] for row in run.history for key in row}
    return rows | {f"summary:{key}" for key in run.summary} | {"_step"}


def missing(spec: Any, logged: set[str]) -> set[str]:
    """Names in a workspace that no run holds."""
    bare = logged | {name.removeprefix("summary:") for name in logged}

    def is_held(name: str) -> bool:
        if REGEX.fullmatch(name):
            return any(re.fullmatch(name, each) for each in bare)
        return name in bare

    return {name for name in named(spec) if not is_held(name)}


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What a decode, a bench and a training log."""
    root = tmp_path_factory.mktemp("logged")
    patch = pytest.MonkeyPatch()
    patch.delenv("WANDB_MODE", raising=False)
    words = ["decode", "target=tiny", "target.device=cpu", "prompt=abcabcabc", "generation.max_new_tokens=12"]
    assert specpipe(*words, f"hydra.run.dir={root / 'decode'}", monkeypatch=patch) == 0
    bench_job(offline_run(), root / "bench")
    patch.undo()
    names = held_by(stored(root / "decode")) | held_by(stored(root / "bench"))
    sums = 4 * HEADS + 2 * GAMMA + 7
    validated = figures([1.0] * sums, HEADS, GAMMA)
    sources = [file.read_text() for file in (ROOT / "train").glob("*.py")]
    written = {word for source in sources for word in re.findall(r'"(train/\w+)"', source)}
    return names | set(validated) | written | {"trainer/global_step", "summary:tau"}


SPEC = serialised(workspace("me", "specpipe", "specpipe"))


def test_no_panel_names_what_no_run_holds(logged: set[str]) -> None:
    assert missing(SPEC, logged) == set()


@pytest.mark.parametrize(
    "name",
    [
        "request/alpha",
        "round/speedup/.*",
        "val/tau_.*",
        "train/loss",
        "request/index",
        "report",
        "cells",
        "speedup/mean",
    ],
)
def test_a_panel_that_names_what_no_run_holds_is_found(name: str, logged: set[str]) -> None:
    text = json.dumps(SPEC)
    assert f'"{name}"' in text or f':{name}"' in text
    slipped = json.loads(text.replace(f'"{name}"', '"no/such"').replace(f':{name}"', ':no/such"'))
    assert {each.removeprefix("summary:") for each in missing(slipped, logged)} == {"no/such"}


def test_there_is_an_open_section_for_each_command() -> None:
    sections = SPEC["section"]["panelBankConfig"]["sections"]
    assert [(each["name"], each["isOpen"]) for each in sections] == [("decode", True), ("bench", True), ("train", True)]
    assert all(len(each["panels"]) > 3 for each in sections)


# ---- the command -----------------------------------------------------------------------------------------------------


def test_what_is_saved_has_its_address_on_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dashboard, "_upload", lambda made, entity, folder: f"https://w/{entity}/{made.project}")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    words = ["dashboard", "entity=me", "project=mine", "name=view", f"hydra.run.dir={tmp_path}"]
    assert specpipe(*words, monkeypatch=monkeypatch) == 0
    printed = capsys.readouterr()
    assert printed.out == "https://w/me/mine\n"
    assert printed.err == f"result: {tmp_path / 'result.json'}\n"
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["command"], result["summary"]) == ("dashboard", {"url": "https://w/me/mine"})
    assert json.loads((tmp_path / "workspace.json").read_text())["section"].keys() == SPEC["section"].keys()


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_wandb_mode_keeps_it_here(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    assert specpipe("dashboard", f"hydra.run.dir={tmp_path}", monkeypatch=monkeypatch) == 2
    printed = capsys.readouterr()
    assert printed.err == (
        f"specpipe: the workspace is in '{tmp_path / 'workspace.json'}', and not at wandb: WANDB_MODE is {mode}.\n"
    )
    assert (tmp_path / "workspace.json").exists()


def test_a_missing_package_is_one_line_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.delitem(sys.modules, "specpipe.workspace")
    assert specpipe("dashboard", f"hydra.run.dir={tmp_path}", monkeypatch=monkeypatch) == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert "pip install 'specpipe[dashboard]'" in printed.err


DASHBOARD = """
    from specpipe.commands import dashboard
    from specpipe import cli
    dashboard.SAVE_SECONDS = 5.0
    sys.argv = ["specpipe", "dashboard", f"hydra.run.dir={FOLDER}"]
    print(cli.main(), (FOLDER / "workspace.json").exists())
"""


def test_without_a_login_it_says_so_and_asks_nothing(tmp_path: Path) -> None:
    child = in_child(DASHBOARD, tmp_path, WANDB_BASE_URL="http://127.0.0.1:9")
    assert child.output == "2 True\n"
    assert child.errors.count("\n") == 1
    assert "wandb login" in child.errors


def test_without_a_network_it_says_so_in_bounded_time(tmp_path: Path) -> None:
    child = in_child(DASHBOARD, tmp_path, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_API_KEY="a" * 40)
    assert child.output == "2 True\n"
    assert child.errors.count("\n") == 1
    assert "not at wandb" in child.errors
    assert child.seconds < 25
