"""sweeps/: wandb takes the files, specpipe every value in them; an agent's command logs what the sweep optimises."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args, load_sweep_config

from specpipe.config import compose
from specpipe.logged import summary
from tests.test_tracking import BENCHED
from tests.wandb_runs import Stored, stored

ROOT = Path(__file__).parents[1]
FILES = sorted(ROOT.glob("sweeps/*.yaml"))
QUICK = ["target=tiny", "target.device=cpu", "generation.max_new_tokens=4", "prompts.limit=1", "hydra.run.dir=run"]
ID = "sweep-run"


def sweep_of(file: Path) -> dict[str, Any]:
    sweep = load_sweep_config(str(file))
    assert sweep is not None
    return sweep


def values_of(parameter: dict[str, Any]) -> list[Any]:
    """All that a parameter may be; of a range its ends."""
    return parameter["values"] if "values" in parameter else [parameter["min"], parameter["max"]]


def command_line(sweep: dict[str, Any], chosen: dict[str, Any]) -> list[str]:
    """As wandb's agent starts a run (`wandb_agent.Agent._command_run`), with this Python for `python`."""
    words = create_sweep_command_args({"args": {key: {"value": value} for key, value in chosen.items()}})
    words |= {"env": ["/usr/bin/env"], "interpreter": [sys.executable], "program": [sweep["program"]]}
    line = []
    for word in map(str, create_sweep_command(list(sweep["command"]))):
        line += words[word[2:-1]] if word.startswith("${") else [word]
    return line


def test_there_is_a_sweep_for_decode_and_one_for_bench() -> None:
    assert [file.stem for file in FILES] == ["bench", "decode"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_file_is_a_sweep_as_wandb_defines_one(file: Path) -> None:
    """Its own schema is in the package `sweeps`, which needs numpy 1."""
    sweep = sweep_of(file)
    known = {"name", "project", "program", "command", "method", "run_cap", "metric", "parameters"}
    assert set(sweep) <= known
    assert sweep["method"] in ("grid", "random", "bayes")
    assert set(sweep["metric"]) == {"name", "goal"}
    assert sweep["metric"]["goal"] in ("maximize", "minimize")
    for parameter in sweep["parameters"].values():
        assert set(parameter) in ({"values"}, {"min", "max"})
        assert "values" in parameter or sweep["method"] != "grid"  # a range has no end of combinations


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_specpipe_takes_every_value(file: Path) -> None:
    sweep = sweep_of(file)
    for name, parameter in sweep["parameters"].items():
        for value in values_of(parameter):
            words = command_line(sweep, {name: value})
            assert words[1:5] == [sys.executable, "-m", "specpipe", file.stem]
            config = compose(file.stem, words[5:])
            assert config.wandb.mode == "online"  # an agent reads the metric from the server


@pytest.fixture(scope="module")
def agents_run(tmp_path_factory: pytest.TempPathFactory) -> Stored:
    """The first combination of sweeps/decode.yaml, as an agent starts it; WANDB_MODE keeps it from the network."""
    folder = tmp_path_factory.mktemp("sweep")
    sweep = sweep_of(ROOT / "sweeps/decode.yaml")
    chosen = {name: parameter["values"][0] for name, parameter in sweep["parameters"].items()}
    (folder / "parameters.yaml").write_text(yaml.safe_dump({key: {"value": value} for key, value in chosen.items()}))
    own = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    told = {"WANDB_SWEEP_ID": "s1", "WANDB_RUN_ID": ID, "WANDB_SWEEP_PARAM_PATH": str(folder / "parameters.yaml")}
    environment = own | told | {"WANDB_MODE": "offline", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command_line(sweep, chosen), *QUICK], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr
    assert "wandb" not in ran.stderr, ran.stderr
    return stored(folder / "run")


def test_an_agents_run_is_the_sweeps_and_holds_its_metric(agents_run: Stored) -> None:
    sweep = sweep_of(ROOT / "sweeps/decode.yaml")
    assert (agents_run.run_id, agents_run.job_type) == (ID, "decode")
    assert isinstance(agents_run.summary[sweep["metric"]["name"]], float)
    assert agents_run.config["num_speculative_tokens"] == 1


def test_a_bench_holds_the_metric_of_its_sweep() -> None:
    assert isinstance(summary(BENCHED)[sweep_of(ROOT / "sweeps/bench.yaml")["metric"]["name"]], float)
