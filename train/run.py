"""`train`: the target writes its text, a student is trained on it, and what came out is decoded with."""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from omegaconf import DictConfig

from specpipe.commands.parts import ending
from specpipe.config import build, plain
from specpipe.errors import UserError, choice, integer
from specpipe.report.training import training_page
from specpipe.results import RunFolder, provenance
from specpipe.settings import LONGEST_DRAFT
from specpipe.verifier.targets import Target
from train.batches import DraftData
from train.check import Agreement, decoded_as_walked
from train.generate import Corpus, TargetText
from train.ledger import Ledger
from train.logger import TrackerLogger
from train.module import DraftTraining
from train.resume import BEST, CHECKPOINTS, LAST, brought_over, checkpoint_of, loaded, place, wandb_run
from train.students import Student

TASKS = ("fit", "generate")
GAMMA = 4  # drafted tokens of a step, where nothing else is said
DRAFT = "draft"  # the folder of what was trained
DISAGREES = 1
# Keys that say how weights are trained. The others of `trainer` also say where validation runs.
TRAINING = ("loss", "optimizer", "trainer.max_steps", "trainer.max_time", "trainer.val_every", "save_every", "resume")


def run(config: DictConfig) -> int:
    """Train as configured; 0, or 1 if a real decode does not take the steps that validation says."""
    choice("task", config.task, TASKS)
    if config.num_speculative_tokens is not None:
        integer("num_speculative_tokens", config.num_speculative_tokens, 1, LONGEST_DRAFT)
    quiet_lightning()
    folder = Path(HydraConfig.get().runtime.output_dir)
    checkpoint = checkpoint_of(config.resume, folder)
    data: TargetText = build(config.data, "data")
    parts = {name: build(config[name], name) for name in ("student", "loss", "optimizer")}
    if not parts["student"].trains:
        _refuse_what_trains()
    build(config.trainer, "trainer")  # its mistakes show before hours of writing
    target: Target = build(config.target, "target")
    corpus = data.prepare(target, note)
    if config.task == "generate":
        note(f"{corpus.train.generated:,} tokens to train on, {corpus.val.generated:,} to validate, in {corpus.folder}")
        return 0
    lightning.seed_everything(config.seed, verbose=False)
    if corpus.fresh:  # the linear layers of who wrote it are compiled or packed
        target = build(config.target, "target")
    return Fit(config, data, corpus, target, folder, **parts).run(checkpoint)


def _refuse_what_trains() -> None:
    """A student without weights is counted; what was typed for a training would be ignored."""
    for override in HydraConfig.get().overrides.task:
        key = override.lstrip("+~").partition("=")[0]
        if any(key == each or key.startswith(f"{each}.") for each in TRAINING):
            student = HydraConfig.get().runtime.choices.get("student")
            raise UserError(f"says how weights are trained, and student={student} has none.", key=key)


def quiet_lightning() -> None:
    """Its remarks are about choices that are made here, and not by who reads them; what goes wrong is still said."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")


def note(line: str) -> None:
    """Tell the person at the terminal; standard output stays free."""
    print(line, file=sys.stderr, flush=True)


class Fit:
    """One training run, from a text that is there to a draft that was decoded with."""

    def __init__(
        self,
        config: DictConfig,
        data: TargetText,
        corpus: Corpus,
        target: Target,
        folder: Path,
        *,
        student: Student,
        loss: Any,
        optimizer: Any,
    ) -> None:
        self.config, self.settled, self.data, self.corpus = config, plain(config), data, corpus
        self.hydra = HydraConfig.get().runtime
        self.folder = folder
        student.prepare(target, corpus.train)
        gamma = GAMMA if config.num_speculative_tokens is None else config.num_speculative_tokens
        self.gamma = min(gamma, student.heads) if student.start else gamma
        self.student, self.described = student, target.describe()
        self.module = DraftTraining(student, loss, optimizer, self.gamma)
        self.batches = DraftData(corpus, batch_size=data.batch_size, seed=config.seed)
        self.monitor = f"val/tau_g{self.gamma}" + ("" if 0.0 in data.temperatures else "_T1")
        self.ledger = Ledger(corpus.describe()["sha256"])
        self.steps = 0

    def run(self, checkpoint: Path | None) -> int:
        """Train, from a checkpoint on if one is given; choose, save, decode."""
        tracker = build(self.config.wandb, "wandb")
        logger = TrackerLogger(tracker, self.folder)
        kept: dict[str, Any] = {"dirpath": self.folder / CHECKPOINTS, "enable_version_counter": False}
        best = ModelCheckpoint(filename=BEST, monitor=self.monitor, mode="max", **kept)
        latest = ModelCheckpoint(filename=LAST, every_n_train_steps=self.config.save_every, **kept)
        callbacks: list[Callback] = [self.ledger, logger, best, latest]
        progress = sys.stderr.isatty()
        trainer = build(self.config.trainer, "trainer", callbacks=callbacks, logger=logger, progress=progress)
        if trainer.global_rank:
            self._fit(trainer, best, place(self.folder) if checkpoint else None)
            return 0
        folder = RunFolder(self.folder, self._head(), self._summary)
        resumed = brought_over(checkpoint, self.folder)
        tracker.start("train", self.settled, self.folder, resume=wandb_run(resumed))
        self.ledger.wandb = tracker.run_id

        def last() -> None:
            folder.write("report.html", training_page(folder.result))
            tracker.log_page(self.folder / "report.html")

        with ending(folder, tracker, note, done=(0, DISAGREES), last=last) as end:
            self._fit(trainer, best, resumed)
            draft = self._saved()
            folder.put(curves=logger.points, artifact=str(draft))
            metadata = {**self._summary(), "command": provenance()["command_line"], "data": self.corpus.describe()}
            tracker.log_artifact(f"{self.student.option}-draft", "model", draft, metadata)
            agreement = self._decoded(draft)
            folder.put(check=vars(agreement) | {"holds": agreement.holds})
            self._tell(agreement, draft)
            end.code = 0 if agreement.holds else DISAGREES
        return end.code

    def _fit(self, trainer: lightning.Trainer, best: ModelCheckpoint, resumed: Path | None) -> None:
        """Train, and end with the weights that have the highest tau, not always the last ones."""
        try:
            if self.student.trains:
                trainer.fit(self.module, self.batches, ckpt_path=resumed, weights_only=True)
        except SystemExit as error:  # Lightning's answer to Ctrl-C
            raise KeyboardInterrupt from error
        self.steps = trainer.global_step
        if self.module.validated_at != self.steps:
            trainer.validate(self.module, self.batches, verbose=False)
        if best.best_model_score is not None and self.module.figures[self.monitor] < float(best.best_model_score):
            state = loaded(Path(best.best_model_path))["state_dict"]
            self.module.load_state_dict(state, strict=False)
            trainer.validate(self.module, self.batches, verbose=False)

    def _saved(self) -> Path:
        """The draft's folder."""
        draft = self.folder / DRAFT
        self.student.cpu().eval()
        made = provenance()
        training = {
            "command": made["command_line"],
            "git": made["git"],
            "machine": made["machine"],
            "seed": self.config.seed,
            "figures": self._summary(),
            "data": self.corpus.describe(),
        }
        self.student.save(draft, training)
        return draft

    def _decoded(self, draft: Path) -> Agreement:
        """A real decode of held-out prompts, of all lengths, with a target of its own."""
        held_out = list(dict.fromkeys(tuple(each.ids[: each.prompt].tolist()) for each in self.corpus.val))
        every = max(1, len(held_out) // self.config.check_prompts)
        prompts = [list(ids) for ids in held_out[::every][: self.config.check_prompts]]
        target = build(self.config.target, "target")
        tokens = self.data.max_new_tokens
        return decoded_as_walked(target, self.student, draft, prompts, gamma=self.gamma, max_new_tokens=tokens)

    def _head(self) -> dict[str, Any]:
        groups = ("student", "loss", "optimizer", "trainer")
        return {
            "command": "train",
            "seed": self.config.seed,
            "target": self.described,
            **{group: self.hydra.choices.get(group) for group in groups},
            "proposer": self.student.option,
            "num_speculative_tokens": self.gamma,
            "data": self.corpus.describe(),
            "config": self.settled,
        }

    def _summary(self) -> dict[str, Any]:
        """The figures of the chosen weights."""
        names = {"tau": self.monitor.removesuffix("_T1"), "tau_T1": f"val/tau_g{self.gamma}_T1"}
        named = {"alpha": "val/alpha", "coverage": "val/coverage", "p_mass": "val/p_mass", **names}
        return {
            **{name: self.module.figures.get(key) for name, key in named.items()},
            "minutes": self.ledger.minutes,
            "tokens": self.ledger.tokens,
            "steps": self.steps,
            "validation": self.module.figures,
        }

    def _tell(self, agreement: Agreement, draft: Path) -> None:
        summary = self._summary()
        shown = {name: summary[name] for name in ("tau", "tau_T1", "alpha", "coverage") if summary[name] is not None}
        note("  ".join(f"{name} {value:.3f}" for name, value in shown.items()) + f"  after {self.steps} steps")
        word = "as" if agreement.holds else "NOT as"
        note(f"a real decode gives {agreement.decoded:.3f} tokens per pass, {word} walked over: {agreement.walked:.3f}")
        path = self.student.path(draft)
        note(f"python -m specpipe decode proposer={self.student.option} proposer.path={path}")
