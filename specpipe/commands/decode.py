"""`specpipe decode`: decode prompts with a proposer, show and record what happened."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from specpipe import prompts
from specpipe.config import build, plain
from specpipe.errors import UserError
from specpipe.pipeline import Pipeline
from specpipe.prompts import Prompts
from specpipe.results import RunFolder, undisturbed
from specpipe.sequence import Sequence, Step
from specpipe.stats import completion, summarise
from specpipe.terminal import DecodeView, OutputClosed

NOT_SAVED = 2
INTERRUPTED = 130
OUTPUT_CLOSED = 141  # as for a program that a closed pipe ends (128 + SIGPIPE)


def build_pipeline(config: DictConfig) -> Pipeline:
    """The configured pipeline. Cheap parts are built first, so that their mistakes show before a model is loaded."""
    parts = {
        "settings": build(config.generation, "generation"),
        "proposer": build(config.proposer, "proposer"),
        "sampler": build(config.sampler, "sampler"),
    }
    target = build(config.target, "target")
    try:
        verifier = build(config.verifier, "verifier", target=target)
    except UserError as error:
        raise UserError(error.message, key="target") if error.key == "verifier.model" else error from error
    return Pipeline(
        verifier=verifier,
        **parts,
        num_speculative_tokens=config.num_speculative_tokens,
        seed=config.seed,
        chat=config.prompts.get("chat"),
    )


def run(config: DictConfig) -> int:
    """Decode all prompts of the config; returns the exit code."""
    settled = plain(config)
    hydra = HydraConfig.get().runtime
    asked = _prompts(config)
    tracker = build(config.wandb, "wandb")
    if sys.stderr.isatty():
        print(f"loading {hydra.choices.get('target')} ...", file=sys.stderr)
    pipeline = build_pipeline(config)
    sequences = pipeline.sequences(asked.texts)
    head = _head(pipeline, settled, hydra.choices)
    folder = RunFolder(Path(hydra.output_dir), head, lambda: _summary(pipeline, sequences), trace=config.trace)
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
        code = _put_away(folder, tracker, view, code)
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


def _put_away(folder: RunFolder, tracker: Any, view: DecodeView, code: int) -> int:
    """Save what there is, however the run ended; the exit code, which is not 0 if something could not be saved."""
    with undisturbed():
        problem = folder.finish()
    if problem:
        view.note(f"specpipe: {problem}")
        code = code or NOT_SAVED
    elif code == 0:
        view.note(f"result: {folder.folder / 'result.json'}")
    tracker.finish(folder.result, code)
    return code


def _summary(pipeline: Pipeline, sequences: list[Sequence]) -> dict[str, Any]:
    """Over all steps that were measured; a step that was interrupted has no times yet."""
    summary = summarise([[step for step in s.steps if step.seconds] for s in sequences], pipeline.gamma)
    return summary | {"steps_by_rule": _steps_by_rule(pipeline, sequences)}


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


def _prompts(config: DictConfig) -> Prompts:
    if config.prompt is None:
        return build(config.prompts, "prompts")
    for override in HydraConfig.get().overrides.task:
        key = override.lstrip("+").partition("=")[0]
        if (key == "prompts" or key.startswith("prompts.")) and key != "prompts.chat":
            raise UserError(f"given beside {override}; only one of the two can be decoded.", key="prompt")
    return prompts.one(config.prompt, config.prompts.get("chat"))


def _head(pipeline: Pipeline, config: dict[str, Any], choices: Mapping[str, str]) -> dict[str, Any]:
    """What result.json says of the parts: the options' names, by which runs are compared, and the config that ran."""
    return {
        "command": "decode",
        "seed": pipeline.seed,
        "target": pipeline.verifier.target.describe(),
        **{part: choices.get(part) for part in ("proposer", "sampler", "verifier", "generation")},
        "num_speculative_tokens": pipeline.gamma,
        "lossless": bool(getattr(pipeline.sampler, "lossless", False)),
        "config": config,
    }
