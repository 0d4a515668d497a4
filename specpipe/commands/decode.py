"""`specpipe decode`: decode prompts with a proposer, show and record what happened."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from specpipe.commands.parts import INTERRUPTED, OUTPUT_CLOSED, build_pipeline, chosen_prompts, head, put_away
from specpipe.config import build, plain
from specpipe.console import OutputClosed
from specpipe.pipeline import Pipeline
from specpipe.prompts import Prompts
from specpipe.results import RunFolder, undisturbed
from specpipe.sequence import Sequence, Step
from specpipe.stats import completion, expected_by_rule, spec_decode, summarise
from specpipe.terminal import DecodeView


def run(config: DictConfig) -> int:
    """Decode all prompts of the config; returns the exit code."""
    settled = plain(config)
    hydra = HydraConfig.get().runtime
    asked = chosen_prompts(config)
    tracker = build(config.wandb, "wandb")
    if sys.stderr.isatty():
        print(f"loading {hydra.choices.get('target')} ...", file=sys.stderr)
    pipeline = build_pipeline(config)
    sequences = pipeline.sequences(asked.texts)
    constant = head("decode", pipeline, settled, hydra.choices) | {"batch_size": config.batch_size}
    summary = partial(_summary, pipeline, asked, sequences)
    folder = RunFolder(Path(hydra.output_dir), constant, summary, trace=config.trace)
    tracker.start("decode", settled, folder.folder)
    view = DecodeView(len(sequences))
    code = 1
    try:
        with view:
            decoded = _one_by_one if config.batch_size == 1 else _together
            for number, record in decoded(pipeline, asked, sequences, config.batch_size, folder, view):
                tracker.log_request(number, record, pipeline.gamma)
        measured = summary()
        view.summary(measured)
        if note := _rule_note(measured["steps_by_rule"]):
            view.note(note)
        code = 0
    except OutputClosed:
        code = OUTPUT_CLOSED
    except KeyboardInterrupt:
        code = INTERRUPTED
        raise
    finally:
        code = put_away(folder, tracker, view.note, code, done=code == 0)
    return code


Records = Iterator[tuple[int, dict[str, Any]]]  # a request's number and its record


def _one_by_one(
    pipeline: Pipeline, asked: Prompts, sequences: list[Sequence], _: int, folder: RunFolder, view: DecodeView
) -> Records:
    """Each request to its end, shown as it streams; recorded also when it is interrupted."""
    for number, (text, sequence) in enumerate(zip(asked.texts, sequences, strict=True)):
        view.begin(number, text)
        try:
            for piece in pipeline.text.stream(sequence, _traced(pipeline.decode(sequence), number, folder)):
                view.piece(piece)
        finally:
            with undisturbed():
                record = _record(pipeline, asked, number, sequence, folder)
        view.end(record)
        yield number, record


def _together(
    pipeline: Pipeline, asked: Prompts, sequences: list[Sequence], size: int, folder: RunFolder, view: DecodeView
) -> Records:
    """Several requests a pass, each shown when it and those before it are finished."""
    numbers = {id(sequence): number for number, sequence in enumerate(sequences)}
    shown = 0
    try:
        for sequence, step in pipeline.decode_together(sequences, size):
            folder.step(numbers[id(sequence)], len(sequence.steps) - 1, step)
            while shown < len(sequences) and sequences[shown].finish_reason:
                number, finished = shown, sequences[shown]
                shown += 1
                record = _record(pipeline, asked, number, finished, folder)
                view.begin(number, asked.texts[number])
                for piece in pipeline.text.stream(finished, finished.steps):
                    view.piece(piece)
                view.end(record)
                yield number, record
    finally:
        with undisturbed():
            for number, sequence in enumerate(sequences[shown:], shown):
                if sequence.steps:
                    _record(pipeline, asked, number, sequence, folder)


def _traced(steps: Iterator[Step], number: int, folder: RunFolder) -> Iterator[Step]:
    for index, step in enumerate(steps):
        folder.step(number, index, step)
        yield step


def _record(pipeline: Pipeline, asked: Prompts, number: int, sequence: Sequence, folder: RunFolder) -> dict[str, Any]:
    record = completion(asked.texts[number], sequence, pipeline.text.answer(sequence), pipeline.gamma).record()
    if asked.categories:
        record["category"] = asked.categories[number]
    folder.request(record)
    return record


def _summary(pipeline: Pipeline, asked: Prompts, sequences: list[Sequence]) -> dict[str, Any]:
    """Over all steps that were measured, and by category where prompts have one."""
    measured = [[step for step in s.steps if step.seconds] for s in sequences]  # an interrupted step has no times yet
    summary = summarise(measured, pipeline.gamma)
    if asked.categories:
        groups: dict[str, list[list[Step]]] = {}
        for category, of_request in zip(asked.categories, measured, strict=True):
            groups.setdefault(category or "none", []).append(of_request)
        summary["categories"] = {name: summarise(group, pipeline.gamma) for name, group in groups.items()}
    steps = [step for sequence in sequences for step in sequence.steps]
    if members := sorted({step.source for step in steps if step.source}):
        counts = {
            name: spec_decode([step for step in steps if step.source == name], pipeline.gamma) for name in members
        }
        summary = summary | {"members": counts}
    expected = expected_by_rule(steps)
    return summary | {"steps_by_rule": _steps_by_rule(pipeline, sequences), "expected_accepted": expected}


def _steps_by_rule(pipeline: Pipeline, sequences: list[Sequence]) -> dict[str, int]:
    """How many drafts each rule judged: the configured one, or the one it leaves drafts without q to."""
    configured = str(HydraConfig.get().runtime.choices.get("sampler"))
    without_q = getattr(pipeline.sampler, "without_q", configured)
    drafted = (step for sequence in sequences for step in sequence.steps if step.drafted)
    return dict(Counter(configured if step.has_q else without_q for step in drafted))


def _rule_note(rules: Mapping[str, int]) -> str | None:
    """Says so where another rule than the configured one did all the judging."""
    choices = HydraConfig.get().runtime.choices
    sampler, proposer = choices.get("sampler"), choices.get("proposer")
    if not rules or sampler in rules:
        return None
    return (
        f"note: {proposer} gives no q, so the rule of sampler={next(iter(rules))} judged (the same law as {sampler}'s)"
    )
