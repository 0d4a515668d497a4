"""Several runs of one command line (`-m`): one wandb group, and the same with a launcher whose jobs are processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specpipe import cli
from specpipe.commands import decode

ROOT = Path(cli.__file__).resolve().parent.parent
BROKEN = """
class Broken:
    def propose(self, sequences, lengths):
        raise RuntimeError("a bug")
"""


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str | None]:
    """Of the runs that were started, in their order; nothing is decoded."""
    seen: list[str | None] = []
    monkeypatch.setattr(decode, "run", lambda config: seen.append(config.wandb.group) or 0)
    monkeypatch.chdir(tmp_path)
    return seen


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["seed=1"], [None]),
        (["-m", "seed=1,2", "hydra.sweep.dir=out/mine"], ["mine", "mine"]),
        (["-m", "seed=1,2", "wandb.group=g"], ["g", "g"]),
        (["-m", "seed=1,2", "wandb.group=null"], [None, None]),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_jobs_of_a_multirun_are_a_group_of_its_folders_name(
    groups: list[str | None], words: list[str], expected: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["specpipe", "decode", *words])
    assert cli.main() == 0
    assert groups == expected


def test_the_folder_of_a_multirun_is_one_name_for_all_jobs(
    groups: list[str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["specpipe", "decode", "-m", "seed=1,2"])
    assert cli.main() == 0
    (folder,) = (tmp_path / "outputs" / "decode").iterdir()
    assert groups == [folder.name, folder.name]


def test_joblib_runs_jobs_in_processes_as_they_run_in_one(tmp_path: Path) -> None:
    """Their folders, their group, a user's own class, what went wrong, and the code of the first that failed."""
    (tmp_path / "mypkg.py").write_text(BROKEN)
    (tmp_path / "conf" / "proposer").mkdir(parents=True)
    (tmp_path / "conf" / "proposer" / "broken.yaml").write_text("_target_: mypkg.Broken\n")
    words = ["-m", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweep.dir=out/both"]
    words += ["--config-dir", "conf", "proposer=none,ngram,broken", "seed=0,-1"]
    quick = ["target=tiny", "target.device=cpu", "generation.max_new_tokens=4", "prompt=abcabc"]
    ran = subprocess.run(
        [sys.executable, "-m", "specpipe", "decode", *words, *quick],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 2, ran.stderr
    mistakes = {line for line in ran.stderr.splitlines() if line.startswith("specpipe: job")}
    raised = "Broken raised RuntimeError (a bug) where it had to return a Draft; an empty one is always allowed;"
    assert mistakes == {
        *(f"specpipe: job {job}: seed: -1 is not a whole number from 0 to 4294967295." for job in (1, 3, 5)),
        f"specpipe: job 4: {raised} HYDRA_FULL_ERROR=1 shows where.",
    }
    assert "Traceback" not in ran.stderr
    none, ngram, broken = (json.loads((tmp_path / "out/both" / job / "result.json").read_text()) for job in "024")
    assert (none["proposer"], ngram["proposer"]) == ("none", "ngram")
    assert none["requests"][0]["token_ids"] == ngram["requests"][0]["token_ids"]
    assert broken["requests"] == []  # it raised before its first step
    assert {result["config"]["wandb"]["group"] for result in (none, ngram, broken)} == {"both"}
