"""Bad days: Ctrl-C at any point, full and read-only disks, kills, too little memory, broken weights, broken proposers.

What was finished is kept, what is wrong is said in one line, and a run that can go on does. Elsewhere: interruptions,
damage and rivals of the default target's cache (test_smollm2.py); wandb killed, hanging, without login or network
(test_tracking.py); a training that is killed or stopped and resumed (test_training_run.py); a closed pipe, a terminal
and SIGTERM (test_decode_command.py).
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import specpipe as package
from specpipe import results
from specpipe.audit.tables import FixedProposer, Rule, TableProposer, table
from specpipe.bench.record import FILE
from specpipe.chance import Chance
from specpipe.commands import decode
from specpipe.draft import Draft
from specpipe.errors import ContractError, ProposerFailed, UserError, ran_out_of_memory
from specpipe.pipeline import Pipeline
from specpipe.results import RunFolder
from specpipe.samplers.block import Block
from specpipe.samplers.exact_match import ExactMatch
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.verifier.cache import RowLayer
from specpipe.verifier.reader import Reader
from specpipe.verifier.targets import tiny
from tests.command_line import Run, result_of
from tests.stand_ins import pipeline_of, right_but_at
from train import generate
from train.resume import brought_over

PACKAGE = str(Path(package.__file__).parent)
ROOT = Path(package.__file__).resolve().parent.parent
HERE = "tests.test_faults"
TINY = ["target=tiny", "target.device=cpu", "target.dtype=float32", "wandb=none"]
SHORT = "generation.max_new_tokens=3"
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def rows(tmp_path: Path) -> list[str]:
    """Words for three prompts."""
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"prompt {n}"}) + "\n" for n in range(3)))
    return ["prompts=jsonl", f"prompts.path={file}"]


# ---- Ctrl-C ----


class Watching:
    """Counts the calls of specpipe's functions once a run folder is there; presses Ctrl-C at one of them."""

    def __init__(self, press_at: int | None = None) -> None:
        self.names: list[str] = []
        self.sequences: list[Sequence] = []
        self.finished: list[list[int]] = []  # texts when it was pressed
        self._press_at = press_at

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        closed_perhaps = frame.f_code.co_name == "<genexpr>"  # Python drops what is raised while it lets go of one
        if frame.f_code.co_filename.startswith(PACKAGE) and not closed_perhaps:
            self.names.append(frame.f_code.co_name)
            if len(self.names) == self._press_at:
                sys.settrace(None)
                self.finished = [each.new_tokens for each in self.sequences if each.finish_reason]
                signal.raise_signal(signal.SIGINT)

    def run(self, command: Callable[[Any], int], config: Any) -> int:
        """The exit code of a command that is watched."""
        make_folder, make_sequence = RunFolder.__init__, Sequence.__init__

        def folder(made: RunFolder, *given: Any, **more: Any) -> None:
            make_folder(made, *given, **more)
            sys.settrace(self)

        def sequence(made: Sequence, *given: Any, **more: Any) -> None:
            make_sequence(made, *given, **more)
            self.sequences.append(made)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RunFolder, "__init__", folder)
            patch.setattr(Sequence, "__init__", sequence)
            try:
                return command(config)
            except KeyboardInterrupt:
                return 130
            finally:
                sys.settrace(None)


# Functions at whose edges much hangs.
DELICATE = ("undisturbed", "request", "close", "commit", "finish", "_save", "ending")


def points(names: list[str]) -> list[int]:
    """Calls to press at, up to the last one that saves: some of any functions, more of delicate ones."""
    end = max(n for n, name in enumerate(names, 1) if name == "finish")
    delicate = [n for n, name in enumerate(names, 1) if name in DELICATE and n <= end]
    return sorted({*random.Random(0).sample(delicate, 24), *random.Random(1).sample(range(1, end), 12), end})


@pytest.fixture
def lost(specpipe: Run, rows: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], list[Any]]:
    """Decodes three prompts, at most so many together, again and again, each time with Ctrl-C at another point.

    Returns where a text was lost that had been finished, or the exit code was not 130.
    """
    real, made = decode.run, decode.build_pipeline
    found: list[Any] = []
    finished: set[int] = set()

    def again_and_again(config: Any) -> int:
        pipeline = made(config)
        monkeypatch.setattr(decode, "build_pipeline", lambda config: pipeline)
        for undisturbed in (Watching(), Watching()):  # the first fills caches on its way
            assert undisturbed.run(real, config) == 0
        for point in points(undisturbed.names):
            pressed = Watching(press_at=point)
            code = pressed.run(real, config)
            saved = [request["token_ids"] for request in result_of(tmp_path / "run")["requests"]]
            assert len(saved) <= 3
            if code != 130 or any(text not in saved for text in pressed.finished):
                found.append((point, undisturbed.names[point - 1], code, len(pressed.finished), len(saved)))
            finished.add(len(pressed.finished))
        return 0

    def run(batch_size: int) -> list[Any]:
        monkeypatch.setattr(results, "SAVE_EVERY_S", math.inf)  # calls must not depend on the clock
        monkeypatch.setattr(decode, "run", again_and_again)
        words = [*TINY, SHORT, *rows, "proposer=none", f"batch_size={batch_size}", "hydra.run.dir=run"]
        assert specpipe("decode", *words).code == 0
        assert {0, 3} <= finished
        return found

    return run


@pytest.mark.parametrize("batch_size", [1, 2])
def test_ctrl_c_at_any_point_keeps_every_request_that_was_finished(
    batch_size: int, lost: Callable[[int], list[Any]]
) -> None:
    assert lost(batch_size) == []


def test_a_run_that_enters_only_what_it_came_to_enter_would_lose_some(
    lost: Callable[[int], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrong variant: between the last token of a request and its record Ctrl-C takes it away."""
    monkeypatch.setattr(decode._Book, "close", lambda self: None)
    assert lost(2) != []


# ---- disks ----


def failing_below(folder: Path, problem: OSError) -> Callable[[Path, bytes], int]:
    write = Path.write_bytes

    def write_bytes(self: Path, data: bytes) -> int:
        if self.is_relative_to(folder):
            raise problem
        return write(self, data)

    return write_bytes


@pytest.mark.parametrize("problem", [FULL, OSError(errno.EROFS, "Read-only file system")], ids=["full", "read-only"])
def test_a_folder_that_takes_no_more_costs_no_result(
    problem: OSError, specpipe: Run, rows: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run goes on, and its result lies where the machine keeps temporary files."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    step, calls = Pipeline.step, itertools.count(1)

    def filling(self: Pipeline, sequences: list[Sequence]) -> Any:
        if next(calls) == 4:
            monkeypatch.setattr(Path, "write_bytes", failing_below(tmp_path / "run", problem))
        return step(self, sequences)

    monkeypatch.setattr(Pipeline, "step", filling)
    ran = specpipe("decode", *TINY, SHORT, *rows, "proposer=none", "hydra.run.dir=run")
    assert ran.code == 2
    assert ran.out.count("\f") == 2
    (line,) = [line for line in ran.err.splitlines() if line.startswith("specpipe: ")]
    (place,) = (tmp_path / "temporary").glob("*/result.json")
    what = f"not all results could be saved in '{tmp_path / 'run'}': {problem.strerror}"
    assert line == f"specpipe: {what}; result.json is '{place}'."
    assert len(result_of(place.parent)["requests"]) == 3
    assert "Traceback" not in ran.err


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_bench_whose_steps_do_not_fit_ends_with_its_figures(specpipe: Run, rows: list[str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / FILE).symlink_to("/dev/full")
    words = ["proposers=[ngram]", "repeats=1", "predict=false", "hydra.run.dir=run"]
    ran = specpipe("bench", *TINY, SHORT, *rows, *words)
    assert ran.code == 2
    assert f"not all results could be saved in '{tmp_path / 'run'}': No space left on device." in ran.err
    assert "Traceback" not in ran.err
    assert result_of(tmp_path / "run")["rounds"] == {"done": 1, "wanted": 1}


def test_a_disk_that_is_full_before_anything_is_decoded_is_one_line(
    specpipe: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "write_bytes", failing_below(tmp_path, FULL))
    ran = specpipe("decode", *TINY, SHORT, "prompt=abc", "hydra.run.dir=run")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == f"specpipe: hydra.run.dir: '{tmp_path / 'run'}' cannot be written: No space left on device.\n"


def test_a_disk_that_fills_up_while_something_else_is_written_is_one_line(
    specpipe: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(config: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", "text/train-00000/ids.bin")

    monkeypatch.setattr(decode, "run", full)
    ran = specpipe("decode", *TINY)
    line = "specpipe: 'text/train-00000/ids.bin' could not be written: No space left on device.\n"
    assert (ran.code, ran.err) == (2, line)


# ---- kills ----

DYING_BENCH = """
import os, signal, sys
from specpipe.bench.rounds import Decoding
from specpipe.cli import main

run, left = Decoding.run, [8]

def dies(self, start, stop):
    left[0] -= 1
    if left[0] < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return run(self, start, stop)

Decoding.run = dies
sys.exit(main("bench"))
"""

WRITE = """
import json, os, signal, sys
from specpipe.verifier.targets import tiny
from train import generate

write, written, (folder, prompts, lives) = generate.write_shard, [], sys.argv[1:]

def dies(folder, documents, vocabulary):
    if written and lives == "no":
        next(iter(documents))
        os.kill(os.getpid(), signal.SIGKILL)
    written.append(folder)
    return write(folder, documents, vocabulary)

generate.SHARD, generate.write_shard = 4, dies
text = generate.TargetText(prompts=prompts, folder=folder, max_new_tokens=6, val_share=0.25)
text.prepare(tiny(device="cpu"), print)
"""

BENCH = [*TINY, "generation.max_new_tokens=6", "proposers=[ngram]", "sweep.temperature=[0,1]"]
BENCH += ["repeats=1", "predict=false"]


Process = subprocess.Popen[str]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Process, Process, Process]]:
    """A folder with `bench` and `text`, left by two processes that are killed at their work, and `anew` by a third."""
    folder = tmp_path_factory.mktemp("killed")
    prompts = folder / "rows.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"prompt {n}"}) + "\n" for n in range(20)))
    benching = [*BENCH, "prompts=jsonl", f"prompts.path={prompts}", "prompts.limit=3"]
    commands = [
        [DYING_BENCH, *benching, f"hydra.run.dir={folder / 'bench'}"],
        [WRITE, str(folder / "text"), str(prompts), "no"],
        [WRITE, str(folder / "anew"), str(prompts), "yes"],
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    processes = [
        subprocess.Popen([sys.executable, "-c", *words], cwd=folder, env=environment, text=True, **streams)
        for words in commands
    ]
    yield folder, *processes  # type: ignore[misc]
    for process in processes:
        process.kill()


def ended(process: Process) -> int:
    """Its exit code."""
    _, err = process.communicate(timeout=200)
    assert process.returncode in (0, -signal.SIGKILL), err
    return process.returncode


def test_a_bench_that_was_killed_goes_on_behind_its_finished_rounds(killed: Any, specpipe: Run, tmp_path: Path) -> None:
    folder, process, *_ = killed
    assert ended(process) == -signal.SIGKILL
    assert result_of(folder / "bench")["command"] == "bench"
    lines = (folder / "bench" / FILE).read_text().splitlines()
    assert sum('"done"' in line for line in lines) == 1
    ran = specpipe("bench", f"resume={folder / 'bench'}", "hydra.run.dir=later")
    assert ran.code == 0, ran.err
    assert result_of(tmp_path / "later")["rounds"] == {"done": 2, "wanted": 2}
    done = next(n for n, line in enumerate(lines) if '"done"' in line)
    assert (tmp_path / "later" / FILE).read_text().splitlines()[: done + 1] == lines[: done + 1]
    assert (folder / "bench" / FILE).read_text().splitlines() == lines


def test_text_whose_writer_was_killed_is_finished_with_the_same_bytes(
    killed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, dying, living = killed
    assert (ended(dying), ended(living)) == (-signal.SIGKILL, 0)
    monkeypatch.setattr(generate, "SHARD", 4)
    asked = {"prompts": str(folder / "rows.jsonl"), "max_new_tokens": 6, "val_share": 0.25}
    said: list[str] = []
    generate.TargetText(**asked, folder=str(folder / "text")).prepare(tiny(device="cpu"), said.append)
    ours, theirs = (
        {str(file.relative_to(place)): file.read_bytes() for file in place.glob("[!.]*/*.bin")}
        for place in (folder / "text", folder / "anew")
    )
    assert len(ours) > 20
    assert ours == theirs
    assert 1 < len(said) < len(ours) / 5 + 1  # not every shard once more


# ---- checkpoints ----


class Runs:
    """What a pickle may do when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('this ran')",))


def checkpoint(folder: Path, damage: Callable[[bytes], bytes]) -> Path:
    file = folder / "checkpoints" / "last.ckpt"
    file.parent.mkdir(parents=True)
    torch.save({"callbacks": {}, "state_dict": {"weight": torch.zeros(1000)}}, file)
    file.write_bytes(damage(file.read_bytes()))
    return file


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[:-100],
        lambda whole: whole[: len(whole) // 2],
        lambda whole: b"",
        lambda whole: b"no checkpoint",
        lambda whole: pickle.dumps(Runs()),
    ],
    ids=["end cut off", "half", "empty", "text", "a pickle that runs something"],
)
def test_a_damaged_checkpoint_is_one_line(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    file = checkpoint(tmp_path / "before", damage)
    with pytest.raises(UserError, match=rf"^resume: '{file}' is damaged: [^\n]*$"):
        brought_over(file, tmp_path / "now")
    whole = checkpoint(tmp_path / "whole", lambda content: content)
    assert brought_over(whole, tmp_path / "now") == tmp_path / "now" / "checkpoints" / "last.ckpt"


def test_a_damaged_best_checkpoint_is_told_before_the_training_and_not_behind_it(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path / "before", lambda content: content)
    whole.with_name("best.ckpt").write_bytes(whole.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"best\.ckpt' is damaged"):
        brought_over(whole, tmp_path / "now")


# ---- proposers ----


def two(tokens: Any, lengths: Any = (1, 1), probs: Any = None, **more: Any) -> Draft:
    return Draft(tokens, list(lengths) if isinstance(lengths, tuple) else lengths, probs, **more)


ONES = torch.ones(2, 1, dtype=torch.long)
EVEN = torch.full((2, 1, 3), 1 / 3)


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (two([[1], [1]]), "tokens as a list, not a tensor"),
        (two(torch.ones(2, dtype=torch.long)), r"tokens of shape \[2\] and type torch.int64, not \[B, K\] of ids"),
        (two(ONES.float()), "type torch.float32"),
        (two(ONES, (1, -1)), r"lengths \[1, -1\]"),
        (two(ONES, (1, 0.5)), r"lengths \[1, 0.5\]"),
        (two(ONES, None), "lengths None"),
        (two(ONES, (1,)), r"drafts of \[1\] tokens where at most \[3, 3\] were asked"),
        (two(ONES * 3), "proposed .* but the target's ids end at 2"),
        (two(-ONES), "proposed .* but the target's ids end at 2"),
        (two(ONES, probs=[[1.0]]), "q as a list, not a tensor"),
        (two(ONES, probs=EVEN[0]), "q of shape"),
        (two(ONES, probs=EVEN * 0.5), r"q that sums to \[0.5"),
        (two(ONES, probs=EVEN * float("nan")), r"q that sums to \[nan\]"),
        (two(ONES, probs=EVEN * float("inf")), r"q that sums to \[inf\]"),
        (two(ONES, sources=["a"]), "1 sources for 2 drafts"),
        (two(ONES, probs=EVEN, drawn=[True]), "1 drawn for 2 drafts"),
    ],
)
def test_a_draft_that_breaks_the_contract_names_the_class_and_what_it_returned(draft: Draft, says: str) -> None:
    """Beside those of test_pipeline.py."""

    class Rogue:
        def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
            return draft

    pipeline = pipeline_of(table(3, seed=1), 3, Rogue(), gamma=3, temperature=1.0)
    with pytest.raises(ContractError, match=f"^Rogue (returned|proposed).*{says.removeprefix('proposed ')}"):
        pipeline.step(pipeline.sequences([[0], [1]]))


class Raises:
    """A member that cannot."""

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        raise IndexError("out of range")


class NotANumber:
    """Draws from a law that is none."""

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        sequences[0].chance.propose(torch.tensor([0.5, float("nan"), 0.5]))
        return Draft.of([[] for _ in sequences])


@pytest.mark.parametrize(
    ("proposer", "says"),
    [
        (Raises(), r"^Raises raised IndexError \(out of range\) where it had to return a Draft"),
        (NotANumber(), r"^NotANumber raised FloatingPointError \(a law with total mass nan"),
    ],
)
def test_a_proposer_that_raises_is_named_with_what_was_due(proposer: Any, says: str) -> None:
    with pytest.raises(ProposerFailed, match=says) as caught:
        pipeline_of(table(3, seed=1), 3, proposer, gamma=3).generate([[0]])
    assert caught.value.__cause__ is not None


def test_a_member_of_a_cascade_that_raises_is_named(specpipe: Run) -> None:
    members = f"proposer.members=[{{_target_:{HERE}.Raises}}]"
    ran = specpipe("decode", *TINY, SHORT, "prompt=abc", "proposer=cascade", members)
    assert ran.code == 2
    (line,) = [line for line in ran.err.splitlines() if line.startswith("specpipe: ")]
    assert line.startswith("specpipe: Raises raised IndexError")
    assert "Traceback" not in ran.err


class OutsideAtLast:
    """Proposes an id that no target has, in the second request."""

    def __init__(self) -> None:
        self._first: Sequence | None = None

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        self._first = self._first or sequences[0]
        return Draft.of([[] if sequences[0] is self._first or not k else [10**6] for k in lengths])


def test_a_broken_contract_is_one_line_and_keeps_what_was_finished(
    specpipe: Run, rows: list[str], tmp_path: Path
) -> None:
    chosen = ["proposer=none", f"proposer._target_={HERE}.OutsideAtLast"]
    ran = specpipe("decode", *TINY, SHORT, *rows, *chosen, "hydra.run.dir=run")
    assert ran.code == 2
    line = ran.err.splitlines()[-1]
    assert line.startswith("specpipe: OutsideAtLast proposed [1000000], but the target's ids end at ")
    assert result_of(tmp_path / "run")["requests"][0]["finish_reason"] == "length"
    assert "Traceback" not in ran.err


# ---- logits that are not numbers ----

BASE = table(6, seed=8, zeros=0)
PLACE = 9  # ids in front of the law that is broken


def broken_at(place: int, bad: float) -> Rule:
    def rule(ids: list[int]) -> Tensor:
        logits = BASE(ids).clone()
        if len(ids) == place:
            logits[2] = bad
        return logits

    return rule


DRAFTERS = {
    "none": FixedProposer(lambda tokens, k: []),
    "one-hot": right_but_at(BASE, -1, 6),
    "soft": TableProposer(table(6, seed=9, zeros=0), 6),
}
BROKEN = r"^the target's logits are not numbers \(NaN or infinite\) for token 8 of an answer, 9 tokens into the text$"


@pytest.mark.parametrize("sampler", [Rejection, Block, ExactMatch])
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_are_an_error_that_names_the_position(
    sampler: type, drafter: str, temperature: float, bad: float
) -> None:
    """Whatever was drafted up to there or beyond, for each of ten seeds; the tokens before it stand."""
    for seed in range(10):
        settings = {"temperature": temperature, "max_new_tokens": 20, "seed": seed}
        sound = pipeline_of(BASE, 6, DRAFTERS[drafter], gamma=3, sampler=sampler(), **settings)
        broken = pipeline_of(broken_at(PLACE, bad), 6, DRAFTERS[drafter], gamma=3, sampler=sampler(), **settings)
        sequence = broken.sequences([[1, 2]])[0]
        with pytest.raises(FloatingPointError, match=BROKEN):
            for _ in broken.decode(sequence):
                pass
        assert sequence.tokens == [1, 2, *sound.generate([[1, 2]])[0].token_ids][: len(sequence.tokens)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_acceptance_on_a_device_names_the_position_too(temperature: float) -> None:
    class Elsewhere:
        type = "elsewhere"

    settings = {"temperature": temperature, "max_new_tokens": 20}
    pipeline = pipeline_of(broken_at(PLACE, float("nan")), 6, DRAFTERS["one-hot"], gamma=3, **settings)
    pipeline.verifier.device = Elsewhere()
    with pytest.raises(FloatingPointError, match=BROKEN):
        pipeline.generate([[1, 2]])


def test_a_decision_by_what_is_no_number_is_refused_and_not_a_rejection() -> None:
    """Without the check it would pass for one: a comparison with NaN is false."""
    assert not float("nan") > 0.5 * 1.0
    with pytest.raises(FloatingPointError):
        Chance(0).passes(float("nan"), 1.0)


def test_settings_that_leave_nothing_to_draw_are_told_from_broken_weights() -> None:
    pipeline = pipeline_of(BASE, 6, DRAFTERS["none"], banned_token_ids=[0, 1, 2, 3, 4, 5])
    with pytest.raises(FloatingPointError, match=r"^the settings leave nothing to draw for token 1 of an answer"):
        pipeline.generate([[1, 2]])


# ---- memory ----


PROMPTS = [[1, 2, 3], [4], [5, 0], [2, 2], [3]]
LAYERS = {"shared cache": "1", "own cache": "[1]"}


class Hungry(TableProposer):
    """Runs out of memory in the middle of a batch, when some rows have drawn."""

    most = 99
    forgot = 0

    def forget(self) -> None:
        self.forgot += 1

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        if len(sequences) > self.most:
            super().propose(sequences[:2], lengths[:2])
            raise MemoryError
        return super().propose(sequences, lengths)


def texts(pipeline: Pipeline, prompts: Any = PROMPTS, batch_size: int = 4) -> list[tuple[list[int], list[int]]]:
    """Of each request its tokens, and how many drafts of each step were accepted."""
    sequences = pipeline.sequences(prompts)
    for _ in pipeline.decode_together(sequences, batch_size):
        pass
    return [(each.new_tokens, [step.accepted for step in each.steps]) for each in sequences]


def short_of_memory(pipeline: Pipeline, most: int, where: str, calls: int = 3) -> list[int]:
    """From some call on there is memory for `most` rows; the rows of each pass that came to its end."""
    score, counted, sizes = pipeline.verifier.score, itertools.count(1), []

    def scored(sequences: list[Sequence], draft: Draft) -> Any:
        short = next(counted) >= calls and len(sequences) > most
        logits = None if short and where == "reading" else score(sequences, draft)
        if short and where in ("reading", "read"):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        sizes.append(len(sequences))
        return logits

    pipeline.verifier.score = scored
    if where == "drafting":
        pipeline.proposer.most = most
    return sizes


@pytest.mark.parametrize("where", ["drafting", "reading", "read"])
@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_batch_that_memory_does_not_hold_is_halved_and_says_what_it_would_have_said(
    where: str, most: int, temperature: float
) -> None:
    def pipeline() -> Pipeline:
        proposer = Hungry(table(6, seed=9, zeros=0), 6)
        return pipeline_of(BASE, 6, proposer, gamma=3, temperature=temperature, max_new_tokens=12)

    wanted = texts(pipeline())
    short = pipeline()
    forgot = short.proposer.forgot
    sizes = short_of_memory(short, most, where)
    with pytest.warns(UserWarning, match="no memory") as said:
        assert texts(short) == wanted
    assert [str(each.message) for each in said] == [
        "there is no memory for 4 requests at a time; decoding goes on with 2 at most"
    ]
    assert max(sizes[2:]) <= most or where == "drafting"
    assert short.proposer.forgot > forgot  # a draft model's cache goes, too


def test_numbers_that_were_drawn_for_nothing_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    chance, other = Chance(3, [1]), Chance(3, [1])
    even = torch.full((5,), 0.2)

    def some(chance: Chance) -> list[Any]:
        ahead = chance.uniforms(2)
        chance.spend(1)
        return [chance.propose(even), chance.passes(0.5, 1.0), chance.draw(even), ahead, chance.passes(0.3, 1.0)]

    assert some(chance) == some(other)
    chance.mark()
    first = some(chance)
    chance.rewind()
    chance.mark()
    assert some(chance) == first
    chance.rewind()
    assert [some(chance), some(chance)] == [some(other), some(other)]


def test_a_draft_that_is_drawn_anew_would_change_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong variant: a pass that had no memory is repeated with other numbers."""
    pipelines = [
        pipeline_of(BASE, 6, TableProposer(table(6, seed=9, zeros=0), 6), gamma=3, temperature=1.0, max_new_tokens=12)
        for _ in range(2)
    ]
    wanted = texts(pipelines[0])
    monkeypatch.setattr(Chance, "rewind", lambda self: None)
    short_of_memory(pipelines[1], 2, "reading")
    with pytest.warns(UserWarning, match="no memory"):
        assert texts(pipelines[1]) != wanted


@pytest.mark.parametrize("layers", LAYERS)
def test_a_cache_that_ran_out_of_memory_half_way_is_not_used(layers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Target's or draft's: what was moved in one layer and not in the next is read anew. At every call in turn."""
    words = ["target=tiny", "target.device=cpu", "target.dtype=float64", "proposer=layer_skip", "generation=sample"]
    words += [f"proposer.layers={LAYERS[layers]}", "generation.max_new_tokens=8", "num_speculative_tokens=3"]
    prompts = ["ab", "c", "defg", "h"]
    pipeline = package.load(*words)
    wanted = [tokens for tokens, _ in texts(pipeline, prompts, 3)]
    rearrange, failed = RowLayer.rearrange, 0

    def failing(self: RowLayer, rows: list[int]) -> None:
        nonlocal failed
        if len(rows) > 1 and next(calls) == call:
            failed = call
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory")
        rearrange(self, rows)

    monkeypatch.setattr(RowLayer, "rearrange", failing)
    for call in itertools.count(1):
        calls = itertools.count(1)
        with warnings.catch_warnings(record=True):
            assert [tokens for tokens, _ in texts(pipeline, prompts, 3)] == wanted
        if failed < call:
            break
    assert failed > 1


def test_what_torch_says_when_memory_is_gone_is_known() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    assert ran_out_of_memory(caught.value)
    assert ran_out_of_memory(MemoryError())
    assert ran_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not ran_out_of_memory(RuntimeError("shapes do not fit"))
    assert not ran_out_of_memory(ValueError("out of memory"))


def test_a_single_request_without_memory_and_other_errors_are_not_tried_again() -> None:
    for most, error in ((0, torch.OutOfMemoryError), (4, ZeroDivisionError)):
        pipeline = pipeline_of(BASE, 6, DRAFTERS["none"], max_new_tokens=12)
        short_of_memory(pipeline, most, "reading")
        if error is ZeroDivisionError:
            pipeline.verifier.roll_back = lambda sequences: 1 / 0
        with warnings.catch_warnings(record=True), pytest.raises(error):
            texts(pipeline)


@pytest.mark.parametrize(("most", "code"), [(2, 0), (0, 2)])
def test_a_decode_tells_of_too_little_memory_in_one_line(
    most: int, code: int, specpipe: Run, rows: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["decode", *TINY, SHORT, *rows, "proposer=none", "hydra.run.dir=run", "batch_size=3"]
    assert specpipe(*words).code == 0
    wanted = [request["token_ids"] for request in result_of(tmp_path / "run")["requests"]]
    read = Reader.read

    def short(self: Reader, sequences: list[Sequence], draft: Draft) -> list[Tensor]:
        if len(sequences) > most and sequences[0].prompt_length > 4:  # not the rehearsal's
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return read(self, sequences, draft)

    monkeypatch.setattr(Reader, "read", short)
    ran = specpipe(*words)
    assert ran.code == code
    told = [line for line in ran.err.splitlines() if line.startswith("specpipe: ")]
    halved = "specpipe: there is no memory for 3 requests at a time; decoding goes on with 1 at most"
    gone = "specpipe: there is not enough memory: CUDA out of memory. Tried to allocate 2.00 GiB."
    assert told == ([halved] if code == 0 else [halved, gone])
    saved = [request["token_ids"] for request in result_of(tmp_path / "run")["requests"]]
    assert saved == (wanted if code == 0 else [])
    assert "Traceback" not in ran.err
