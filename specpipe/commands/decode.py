"""`specpipe decode`: decode prompts with a proposer, show and record what happened."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from specpipe.commands.parts import INTERRUPTED, OUTPUT_CLOSED, build_pipeline, chosen_prompts, head, put_away
from specpipe.config import build, plain
from specpipe.console import OutputClosed
from specpipe.pipeline import Pipeline
from specpipe.results import RunFolder, undisturbed
from specpipe.sequence import Sequence, Step
from specpipe.stats import completion, expected_by_rule, summarise
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
    constant = head("decode", pipeline, settled, hydra.choices)
    folder = RunFolder(Path(hydra.output_dir), constant, lambda: _summary(pipeline, sequences), trace=config.trace)
    tracker.start("decode", settled, folder.folder)
    view = DecodeView(len(sequences))
    code = 1
    try:
        with view:
            for number, (text, sequence) in enumerate(zip(asked.texts, sequences, strict=True)):
                record = _decode(pipeline, sequence, text, number, folder, view)
                tracker.log_request(number, record, pipeline.gamma)
        summary = _summary(pipeline, sequences)
        view.summary(summary)
        if note := _rule_note(summary["steps_by_rule"]):
            view.note(note)
        code = 0
    except OutputClosed:
        code = OUTPUT_CLOSED
    except KeyboardInterrupt:
        code = INTERRUPTED
        raise
    finally:
        code = put_away(folder, tracker, view.note, code)
    return code


def _decode(
    pipeline: Pipeline, sequence: Sequence, text: str, number: int, folder: RunFolder, view: DecodeView
) -> dict[str, Any]:
    """One request to its end, recorded also when it is interrupted."""
    view.begin(number, text)

    def recorded() -> Iterator[Step]:
        for index, step in enumerate(pipeline.decode(sequence)):
            folder.step(number, index, step)
            yield step

    try:
        for piece in pipeline.text.stream(sequence, recorded()):
            view.piece(piece)
    finally:
        with undisturbed():
            answer = pipeline.text.answer(sequence)
            record = completion(text, sequence, answer, pipeline.gamma).record()
            folder.request(record)
    view.end(record)
    return record


def _summary(pipeline: Pipeline, sequences: list[Sequence]) -> dict[str, Any]:
    """Over all steps that were measured; a step that was interrupted has no times yet."""
    summary = summarise([[step for step in s.steps if step.seconds] for s in sequences], pipeline.gamma)
    expected = expected_by_rule(step for sequence in sequences for step in sequence.steps)
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
