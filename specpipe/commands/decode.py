"""`specpipe decode`: decode prompts with a proposer, show and record what happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from specpipe import prompts
from specpipe.config import build, plain
from specpipe.errors import UserError
from specpipe.pipeline import Pipeline
from specpipe.prompts import Prompts
from specpipe.results import RunFolder
from specpipe.sequence import Sequence
from specpipe.stats import completion, summarise
from specpipe.terminal import DecodeView


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
    asked = _prompts(config)
    tracker = build(config.wandb, "wandb")
    pipeline = build_pipeline(config)
    sequences = pipeline.sequences(asked.texts)
    folder = RunFolder(Path(HydraConfig.get().runtime.output_dir), _head(pipeline, settled), trace=config.trace)
    tracker.start("decode", settled, folder.folder)
    code = 1
    try:
        with DecodeView(len(sequences)) as view:
            for number, (text, sequence) in enumerate(zip(asked.texts, sequences, strict=True)):
                view.begin(number, text)
                record = _decode(pipeline, sequence, text, number, folder, view)
                tracker.log_request(number, record, pipeline.gamma)
        code = 0
    except KeyboardInterrupt:
        code = 130
        raise
    finally:
        folder.save(summary=summarise([sequence.steps for sequence in sequences if sequence.steps], pipeline.gamma))
        tracker.finish(folder.result, code)
    view.summary(folder.result)
    view.note(f"result: {folder.folder / 'result.json'}")
    return code


def _decode(
    pipeline: Pipeline, sequence: Sequence, text: str, number: int, folder: RunFolder, view: DecodeView
) -> dict[str, Any]:
    """One request to its end, recorded also when it is interrupted."""
    pieces = pipeline.text.pieces()
    try:
        for index, step in enumerate(pipeline.decode(sequence)):
            folder.step(number, index, step)
            for piece in pieces.push(step):
                view.piece(piece)
        for piece in pieces.flush():
            view.piece(piece)
    finally:
        answer = pipeline.text.decode(sequence.new_tokens)
        record = completion(text, sequence, answer, pipeline.gamma).record()
        folder.request(record)
        view.end(record)
    return record


def _prompts(config: DictConfig) -> Prompts:
    if config.prompt is not None:
        return prompts.one(config.prompt, config.prompts.get("chat"))
    return build(config.prompts, "prompts")


def _head(pipeline: Pipeline, config: dict[str, Any]) -> dict[str, Any]:
    """What result.json says of the parts."""
    return {
        "command": "decode",
        "seed": pipeline.seed,
        "target": pipeline.verifier.target.describe(),
        **{part: config[part] for part in ("proposer", "sampler", "verifier", "generation")},
        "num_speculative_tokens": pipeline.gamma,
        "lossless": bool(getattr(pipeline.sampler, "lossless", False)),
    }
