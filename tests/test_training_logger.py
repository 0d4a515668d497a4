"""train.logger: the curves of a real Lightning fit, and of one that was killed and goes on."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader

from specpipe.tracking import NoRun
from train.logger import FILE, TrackerLogger

pytestmark = [
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
]

ROWS = list(torch.arange(12.0)[:, None])


class Spy(NoRun):
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.told.append((step, dict(metrics)))


class Line(lightning.LightningModule):
    """Logs at each step the number of steps done, and at each validation `quality`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.quality = 7.0

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        self.log("train/done", float(self.global_step + 1))
        return (batch * self.weight).mean()

    def validation_step(self, batch: Tensor, index: int) -> None:
        self.log("val/tau", self.quality)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer_of(logger: TrackerLogger, folder: Path, max_steps: int) -> lightning.Trainer:
    """Logs every second step, validates every third, and saves at every fourth."""
    saved = ModelCheckpoint(folder, "{step}", every_n_train_steps=4, save_top_k=-1)
    return lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=max_steps,
        log_every_n_steps=2,
        val_check_interval=3,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=logger,
        callbacks=[logger, saved],
    )


def fit(folder: Path, max_steps: int, *, goes_on_from: int | None = None) -> tuple[TrackerLogger, Spy, Any, Any]:
    spy = Spy()
    logger = TrackerLogger(spy, folder)
    trainer, module = trainer_of(logger, folder, max_steps), Line()
    checkpoint = None if goes_on_from is None else folder / f"step={goes_on_from}.ckpt"
    trainer.fit(module, DataLoader(ROWS), DataLoader(ROWS[:1]), ckpt_path=checkpoint)
    return logger, spy, trainer, module


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


EIGHT_STEPS = [
    {"step": 2, "train/done": 2.0},
    {"step": 3, "val/tau": 7.0},
    {"step": 4, "train/done": 4.0},
    {"step": 6, "train/done": 6.0, "val/tau": 7.0},
    {"step": 8, "train/done": 8.0},
]


def test_points_are_numbered_by_optimizer_steps_done_and_each_step_has_one(tmp_path: Path) -> None:
    """`train/done` is the number itself; Lightning would have told the logger one less. No `epoch` among them."""
    logger, _, _, _ = fit(tmp_path, 8)
    assert logger.points == EIGHT_STEPS
    assert lines(tmp_path) == EIGHT_STEPS


def test_tracker_is_told_each_figure_once(tmp_path: Path) -> None:
    _, spy, _, _ = fit(tmp_path, 8)
    told = [(step, name, value) for step, metrics in spy.told for name, value in metrics.items()]
    expected = [(point["step"], name, value) for point in EIGHT_STEPS for name, value in point.items()]
    assert told == [each for each in expected if each[1] != "step"]


def test_a_training_that_goes_on_has_every_point_once(tmp_path: Path) -> None:
    """The first part was killed after step 6, and goes on from the checkpoint of step 4."""
    fit(tmp_path, 6)
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 8, "trai')
    logger, spy, _, _ = fit(tmp_path, 8, goes_on_from=4)
    assert lines(tmp_path) == logger.points == EIGHT_STEPS
    assert [step for step, _ in spy.told] == [6, 6, 8]


def test_what_will_be_logged_again_is_gone_before_that(tmp_path: Path) -> None:
    """So that nobody reads it as a part of this run, if this part is killed early."""
    fit(tmp_path, 6)
    TrackerLogger(NoRun(), tmp_path).on_train_start(SimpleNamespace(global_step=4), Line())  # type: ignore[arg-type]
    assert lines(tmp_path) == EIGHT_STEPS[:3]


def test_a_new_training_in_an_old_folder_has_only_its_own_points(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"step": 1, "old": 1}\n{"step": 9, "old": 1}\n')
    assert fit(tmp_path, 2)[0].points == lines(tmp_path) == EIGHT_STEPS[:1]


@pytest.mark.parametrize("damage", ['{"step": 4}', "\0\0\n", "\xff\n", "[4]\n", '{"no": 1}\n', '{"step": "4"}\n'])
def test_a_damaged_line_ends_what_is_taken_over(damage: str, tmp_path: Path) -> None:
    """Half a line counts as damaged even where it parses: more of it may be missing."""
    fit(tmp_path, 4)
    whole = (tmp_path / FILE).read_bytes().splitlines(keepends=True)
    rest = whole[1] if damage.endswith("\n") else b""
    (tmp_path / FILE).write_bytes(whole[0] + damage.encode("latin-1") + rest)
    logger, _, _, _ = fit(tmp_path, 8, goes_on_from=4)
    kept = [EIGHT_STEPS[0], *EIGHT_STEPS[3:]]
    assert logger.points == lines(tmp_path) == kept


def test_a_validation_of_other_weights_after_the_last_step_is_not_on_the_curve(tmp_path: Path) -> None:
    """A first validation at the last step is its point; a second one is not."""
    logger, spy, trainer, module = fit(tmp_path, 8)
    trainer.validate(module, DataLoader(ROWS[:1]), verbose=False)
    module.quality = 9.0
    trainer.validate(module, DataLoader(ROWS[:1]), verbose=False)
    expected = [*EIGHT_STEPS[:-1], {"step": 8, "train/done": 8.0, "val/tau": 7.0}]
    assert logger.points == lines(tmp_path) == expected
    assert spy.told[-1] == (8, {"val/tau": 7.0})


def test_a_figure_that_is_not_finite_is_null_in_the_file_and_as_it_is_for_wandb(tmp_path: Path) -> None:
    logger, spy, _, _ = fit(tmp_path, 8)
    logger.log_metrics({"val/kl": math.inf, "val/loss": math.nan, "epoch": 0.0})
    assert lines(tmp_path)[-1] == logger.points[-1] == {**EIGHT_STEPS[-1], "val/kl": None, "val/loss": None}
    assert spy.told[-1][1]["val/kl"] == math.inf


def test_only_rank_zero_touches_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy()
    logger = TrackerLogger(spy, tmp_path)
    trainer = trainer_of(logger, tmp_path, 2)
    (tmp_path / FILE).write_text('{"step": 9, "of": 0}')
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger.on_train_start(trainer, Line())
    logger.log_metrics({"train/loss": 1.0}, 0)
    assert (logger.points, spy.told, lines(tmp_path)) == ([], [], [{"step": 9, "of": 0}])


def test_a_file_that_cannot_be_written_costs_one_line_and_not_the_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / FILE).mkdir()
    logger, spy, _, _ = fit(tmp_path, 8)
    assert logger.points == EIGHT_STEPS
    assert len(spy.told) == 6
    assert capsys.readouterr().err.count("training goes on without it") == 1


def test_a_logger_that_is_no_callback_says_so(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="callbacks"):
        TrackerLogger(NoRun(), tmp_path).log_metrics({"train/loss": 1.0}, 0)
