"""`train` as a person runs it: what it leaves, how it goes on when interrupted, on two processes, and its mistakes."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specpipe import cli
from tests.stand_ins import saved_tiny
from train import students
from train.module import DraftTraining

ROOT = Path(cli.__file__).resolve().parent.parent
STEPS, SAVED, KILLED = 10, 2, 7  # five batches are an epoch: the checkpoint at 6 is in the middle of the second
PROMPTS = [f"{'tell ' * (i % 5)}me of {i}" for i in range(20)]
QUICK = [
    "experiment=smoke",
    "target=tiny",
    "target.device=cpu",
    "wandb=none",
    "student.vocabulary=200",
    "trainer.precision=32-true",
    f"trainer.max_steps={STEPS}",
    "trainer.val_every=3",
    "data.max_new_tokens=10",
    "optimizer.lr=0.01",
]
TIMES = ("train/tokens_per_s", "train/minutes")

# Dies in the middle of a step, as on a machine that is switched off.
DYING = f"""
import os, signal, sys
from specpipe.cli import main
from train.module import DraftTraining

step = DraftTraining.training_step

def dies(self, batch, index):
    if self.global_step == {KILLED}:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batch, index)

DraftTraining.training_step = dies
sys.exit(main("train"))
"""


class Ran(SimpleNamespace):
    code: int
    err: str
    batches: list[tuple[int, ...]]


def run(*words: str, program: str = "specpipe", before: Callable[[int], None] = lambda step: None) -> Ran:
    """The command line in this process, with the batches that it trained on; `before` is told each step."""
    seen: list[tuple[int, ...]] = []
    train_step = DraftTraining.training_step

    def training_step(self: DraftTraining, batch: Any, index: int) -> Tensor:
        before(self.global_step)
        seen.append(tuple(batch.ids.sum(1).tolist()))
        return train_step(self, batch, index)

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(DraftTraining, "training_step", training_step)
        patch.setattr(sys, "argv", [program, *words])
        patch.setenv("HYDRA_FULL_ERROR", "0")
        said: list[str] = []
        patch.setattr(sys, "stderr", SimpleNamespace(write=said.append, flush=lambda: None, isatty=lambda: False))
        code = cli.main() if words[0] in cli.COMMANDS else cli.main("train")
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return Ran(code=code, err="".join(said), batches=seen)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words for text that is written once."""
    folder = tmp_path_factory.mktemp("text")
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    words = [f"data.prompts={file}", f"data.folder={folder / 'data'}"]
    told = run(*QUICK, *words, "task=generate", f"hydra.run.dir={folder / 'run'}")
    assert told.code == 0
    assert "tokens to train on" in told.err
    return words


@pytest.fixture(scope="module")
def killed(data: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A process that is killed, at work while the tests before it run."""
    folder = tmp_path_factory.mktemp("killed")
    words = [*QUICK, *data, f"save_every={SAVED}", f"hydra.run.dir={folder / 'first'}"]
    with started([sys.executable, "-c", DYING, *words]) as process:
        yield folder, process


@pytest.fixture(scope="module")
def straight(data: list[str], killed: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    folder = tmp_path_factory.mktemp("straight") / "run"
    return folder, run(*QUICK, *data, "save_every=5", f"hydra.run.dir={folder}")


@pytest.fixture(scope="module")
def interrupted(data: list[str], straight: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    folder = tmp_path_factory.mktemp("interrupted") / "first"
    ran = run(*QUICK, *data, f"save_every={SAVED}", f"hydra.run.dir={folder}", before=pressing_ctrl_c_at(KILLED))
    return folder, ran


@pytest.fixture(scope="module")
def two_processes(
    data: list[str], interrupted: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, Any]]:
    """Two ranks that go on with what one process began, with half of its batch each; at work meanwhile."""
    folder = tmp_path_factory.mktemp("two") / "run"
    ranks = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=2", "data.batch_size=2"]
    words = [*QUICK, *data, *ranks, f"save_every={SAVED}", f"resume={interrupted[0]}", f"hydra.run.dir={folder}"]
    with started([sys.executable, "-m", "train", *words]) as process:
        yield folder, process


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **streams) as process:
        yield process
        process.kill()


def pressing_ctrl_c_at(step: int) -> Callable[[int], None]:
    return lambda done: signal.raise_signal(signal.SIGINT) if done == step else None


def result_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "result.json").read_text("utf-8"), parse_constant=lambda word: pytest.fail(word))


def points_of(folder: Path) -> list[dict[str, Any]]:
    """The curves, without what the clock has a part in."""
    points = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in point.items() if name not in TIMES} for point in points]


def last_of(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)


def tensors_of(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        value = [value[key] for key in sorted(value, key=str)]
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in tensors_of(each)]
    return [value] if isinstance(value, Tensor) else []


def same_training(a: Path, b: Path) -> bool:
    """Weights and moments, bit by bit."""
    ours, theirs = (last_of(each) for each in (a, b))
    parts = [tensors_of([each["state_dict"], each["optimizer_states"]]) for each in (ours, theirs)]
    same = all(torch.equal(x, y) for x, y in zip(*parts, strict=True))
    return same and ours["global_step"] == theirs["global_step"] == STEPS


# ---- a run ----


def test_a_run_ends_with_a_draft_that_decodes_as_validation_says(straight: tuple[Path, Ran]) -> None:
    folder, ran = straight
    assert ran.code == 0, ran.err
    result = result_of(folder)
    assert result["command"] == "train"
    assert (result["student"], result["loss"], result["num_speculative_tokens"]) == ("mlp", "lk_hybrid", 3)
    assert result["check"]["holds"]
    summary = result["summary"]
    assert summary["steps"] == STEPS
    best = max(point["val/tau_g3"] for point in points_of(folder))
    assert summary["tau"] == pytest.approx(best)  # the curves are in float32
    assert {"tau_T1", "alpha", "coverage", "p_mass", "minutes", "tokens"} <= summary.keys()
    assert result["curves"][-1]["step"] == STEPS
    assert [point["step"] for point in points_of(folder)] == [3, 6, 9, 10]
    assert sorted(file.name for file in (folder / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    assert f"proposer=mlp proposer.path={folder / 'draft'}" in ran.err
    assert len(ran.batches) == STEPS
    assert len(set(ran.batches[:5])) == 5


def test_tokens_are_counted(straight: tuple[Path, Ran]) -> None:
    """Of five steps a whole epoch: each answer has ten tokens at most."""
    ledger = next(state for name, state in last_of(straight[0])["callbacks"].items() if name.startswith("Ledger"))
    assert ledger["tokens"] == result_of(straight[0])["summary"]["tokens"]
    assert 0.9 * 40 * STEPS <= ledger["tokens"] <= 40 * STEPS


# ---- interruptions ----


def test_ctrl_c_is_130_and_leaves_a_result(interrupted: tuple[Path, Ran]) -> None:
    folder, ran = interrupted
    assert ran.code == 130
    assert ran.err.rstrip().endswith("interrupted")
    assert "Traceback" not in ran.err
    assert result_of(folder)["command"] == "train"
    assert last_of(folder)["global_step"] == 6


def test_a_resumed_run_is_the_straight_run(
    data: list[str], straight: tuple[Path, Ran], interrupted: tuple[Path, Ran], two_processes: Any
) -> None:
    """The same batches, weights bit by bit, and curves, from the middle of an epoch; `last` is the newest beside it."""
    first, before = interrupted
    ran = run(*QUICK, *data, f"save_every={SAVED}", "resume=last", f"hydra.run.dir={first.parent / 'second'}")
    assert ran.code == 0, ran.err
    assert before.batches[:6] + ran.batches == straight[1].batches
    assert same_training(first.parent / "second", straight[0])
    assert points_of(first.parent / "second") == points_of(straight[0])
    assert result_of(first.parent / "second")["summary"]["tokens"] == result_of(straight[0])["summary"]["tokens"]


def test_a_run_goes_on_between_two_epochs_from_a_folder_elsewhere(
    data: list[str], straight: tuple[Path, Ran], tmp_path: Path
) -> None:
    """Also one that was moved, and is found by another path than it was written to."""
    words = [*QUICK, *data, "save_every=5"]
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    ran = run(*words, f"hydra.run.dir={tmp_path / 'link' / 'first'}", before=pressing_ctrl_c_at(8))
    assert ran.code == 130
    assert last_of(tmp_path / "real" / "first")["global_step"] == 5
    shutil.move(tmp_path / "real" / "first", tmp_path / "moved")
    best = last_of(tmp_path / "moved")["callbacks"]
    score = next(state["best_model_score"] for name, state in best.items() if "tau" in name)
    ran = run(*words, f"resume={tmp_path / 'link' / '..' / 'moved'}", f"hydra.run.dir={tmp_path / 'link' / 'second'}")
    assert ran.code == 0, ran.err
    assert ran.batches == straight[1].batches[5:]
    assert same_training(tmp_path / "link" / "second", straight[0])
    assert points_of(tmp_path / "link" / "second") == points_of(straight[0])
    assert result_of(tmp_path / "link" / "second")["summary"]["tau"] >= float(score)


def test_a_killed_run_goes_on_as_if_nothing_had_happened(
    data: list[str], straight: tuple[Path, Ran], killed: tuple[Path, Any]
) -> None:
    folder, process = killed
    _, err = process.communicate(timeout=200)
    assert process.returncode == -signal.SIGKILL, err
    assert last_of(folder / "first")["global_step"] == 6
    assert result_of(folder / "first")["command"] == "train"
    ran = run(*QUICK, *data, f"save_every={SAVED}", "resume=last", f"hydra.run.dir={folder / 'second'}")
    assert ran.code == 0, ran.err
    assert same_training(folder / "second", straight[0])
    assert points_of(folder / "second") == points_of(straight[0])


def test_a_run_does_not_go_on_with_other_text(data: list[str], straight: tuple[Path, Ran], tmp_path: Path) -> None:
    other = [word for word in data if "folder" not in word] + [f"data.folder={tmp_path / 'data'}", "data.seed=1"]
    ran = run(*QUICK, *other, f"resume={straight[0]}", f"hydra.run.dir={tmp_path / 'run'}")
    assert ran.code == 2
    assert "specpipe: resume: the checkpoint was trained on other text" in ran.err


# ---- other ways to run ----


def test_two_processes_train_what_one_does_with_twice_the_batch(
    straight: tuple[Path, Ran], two_processes: tuple[Path, Any]
) -> None:
    """On documents of unequal lengths, resumed in the middle of an epoch."""
    folder, process = two_processes
    _, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    assert result_of(folder)["check"]["holds"]
    ours, theirs = (tensors_of(last_of(each)["state_dict"]) for each in (folder, straight[0]))
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-5)
    assert last_of(folder)["global_step"] == STEPS
    for point, expected in zip(points_of(folder), points_of(straight[0]), strict=True):
        assert point == pytest.approx(expected, rel=1e-3)
    assert sorted(file.name for file in (folder / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Words for a target in a directory, with text of its own."""
    folder = tmp_path_factory.mktemp("hf")
    target = ["target=hf", f"target.model={saved_tiny(folder / 'model')}", "target.dtype=float32"]
    own = ("target=", "trainer.max_steps", "optimizer.lr")
    words = [word for word in QUICK if not word.startswith(own)]
    return [*words, *target, f"data.folder={folder / 'data'}", "trainer.max_steps=2"]


STUDENTS = {
    "mlp": ["student=mlp"],
    "distilled": ["student=distilled", "student.layers=[0,1]", "optimizer.lr=1e-6"],
}


@pytest.mark.parametrize("kind", STUDENTS)
def test_specpipe_train_makes_a_draft_for_any_model_and_decode_takes_it(
    kind: str, hf: list[str], data: list[str], tmp_path: Path
) -> None:
    """All of the target's layers are as good as the target, for what they can say."""
    words = [*hf, data[0], *STUDENTS[kind]]
    ran = run("train", *words, f"hydra.run.dir={tmp_path / 'run'}")
    assert ran.code == 0, ran.err
    result = result_of(tmp_path / "run")
    assert result["student"] == kind
    assert result["check"]["holds"]
    assert (result["check"]["decoded"] > 2) is (kind == "distilled")
    target = [word for word in words if word.startswith("target")]
    draft = [f"proposer={kind}", f"proposer.path={tmp_path / 'run' / 'draft'}"]
    decoding = ["prompt=hello", "generation.max_new_tokens=8", "wandb=none", f"hydra.run.dir={tmp_path / 'decoded'}"]
    assert run("decode", *target, *draft, *decoding).code == 0
    assert result_of(tmp_path / "decoded")["summary"]["spec_decode"]["num_draft_tokens"] > 0


def test_a_draft_that_does_not_decode_as_validated_is_code_1(
    hf: list[str], data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose kept ids were written down wrong."""
    save = students.save_draft

    def wrong(folder: Path, model: Any, card: Any, ids: Tensor) -> None:
        others = torch.ones(257, dtype=torch.bool)
        others[ids] = False
        save(folder, model, card, others.nonzero()[:, 0])

    monkeypatch.setattr(students, "save_draft", wrong)
    ran = run("train", *hf, data[0], *STUDENTS["distilled"], f"hydra.run.dir={tmp_path / 'run'}")
    assert ran.code == 1
    assert "NOT as walked over" in ran.err
    assert result_of(tmp_path / "run")["check"]["holds"] is False


# ---- mistakes ----


MISTAKES = {
    "task=foo": "task: 'foo' is not one of fit, generate.",
    "student.heads=0": "student.heads: 0 is not a whole number from 1 up.",
    "student.form=x": "student.form: 'x' is not one of mlp, medusa.",
    "student.vocabulary=3": "student.vocabulary: 3 ids are too few",
    "student=distilled student.layers=99": "student.layers: 99 is more than the target's 2 layers.",
    "student=distilled student.layers=[0,9]": "student.layers: the target has no layer 9",
    "data.temperatures=[]": "data.temperatures: []",
    "data.prompts=nowhere.jsonl": "data.prompts: 'nowhere.jsonl' cannot be read",
    "data.seed=1": "data.folder: ",
    "data.batch_size=1000": "data.batch_size: ",
    "trainer.max_steps=0": "trainer.max_steps: 0 is not a whole number from 1 up.",
    "trainer.precision=foo": "trainer.precision: 'foo' is not one of auto,",
    "trainer.accelerator=foo": "trainer: Lightning refuses it: ",
    "trainer.max_time=foo": "trainer: Lightning refuses it: ",
    "optimizer.lr=0": "optimizer.lr: 0 is not a number above 0 up.",
    "optimizer.betas=[0.9]": "optimizer.betas: ",
    "num_speculative_tokens=0": "num_speculative_tokens: 0 is not a whole number from 1 to 1000.",
    "save_every=0": "save_every: 0 is not a whole number from 1 up.",
    "resume=nowhere": "resume: there is no checkpoints/last.ckpt in ",
    "resume=last": "resume: there is no checkpoints/last.ckpt in ",
    "loss=foo": "loss: no option 'foo'; there are ce,",
    "student=foo": "student: no option 'foo'; there are distilled,",
    "loss=mixture loss.weights.ce=-1": "loss.weights.ce: -1 is not a number from 0 up.",
    "epochs=3": "epochs: no such key.",
}


@pytest.mark.parametrize("typed", MISTAKES)
def test_a_wrong_value_is_one_line_and_code_2(typed: str, data: list[str], tmp_path: Path) -> None:
    words = typed.split()
    given = {word.partition("=")[0] for word in words}
    usual = [word for word in (*QUICK, *data) if word.partition("=")[0] not in given]
    usual = [word for word in usual if "student=distilled" not in words or "student.vocabulary" not in word]
    ran = run(*usual, *words, f"hydra.run.dir={tmp_path / 'run'}")
    assert ran.code == 2
    lines = [line for line in ran.err.splitlines() if line.startswith("specpipe: ")]
    assert len(lines) == 1
    assert lines[0].startswith(f"specpipe: {MISTAKES[typed]}")
    assert "Traceback" not in ran.err
    assert not ran.batches
