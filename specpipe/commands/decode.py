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

from specpipe.commands.parts import build_pipeline, chosen_prompts, ending, head
from specpipe.config import build, plain
from specpipe.pipeline import Pipeline
from specpipe.profiling import FILE as PROFILE
from specpipe.profiling import Profiler
from specpipe.report.trace import TracedRequest, trace_page
from specpipe.results import RunFolder, undisturbed
from specpipe.sequence import Step
from specpipe.stats import completion, expected_by_rule, spec_decode, summarise
from specpipe.terminal import DecodeView
from specpipe.turns import Request, Requests

TRACE_PAGE = "trace.html"


def run(config: DictConfig) -> int:
    """Decode all prompts of the config; returns the exit code."""
    settled = plain(config)
    hydra = HydraConfig.get().runtime
    asked = chosen_prompts(config)
    tracker = build(config.wandb, "wandb")
    if sys.stderr.isatty():
        print(f"loading {hydra.choices.get('target')} ...", file=sys.stderr)
    pipeline = build_pipeline(config)
    requests = Requests(pipeline, asked)
    constant = head("decode", pipeline, settled, hydra.choices) | {"batch_size": config.batch_size}
    summary = partial(_summary, pipeline, requests)
    folder = RunFolder(Path(hydra.output_dir), constant, summary, trace=config.trace)
    tracker.start("decode", settled, folder.folder)
    profiler = Profiler(pipeline.verifier.device) if config.profile else None
    book = _Book(pipeline, requests, folder, trace=config.trace, profiler=profiler)
    view = DecodeView(len(requests))
    with ending(folder, tracker, view.note, last=book.close) as end:
        with view:
            decoded = _one_by_one if config.batch_size == 1 else _together
            for number, record in decoded(pipeline, requests, config.batch_size, book, view):
                tracker.log_request(number, record, pipeline.gamma)
        measured = summary()
        view.summary(measured, folder.result["verifier"])
        if note := _rule_note(measured["steps_by_rule"]):
            view.note(note)
        if unanswered := sum(request.does_not_fit for request in requests.made()):
            view.note(f"note: no room in the target's context for later turns: {unanswered} have no answer")
        if full := sum(request.fills_context for request in requests.made()):
            view.note(f"note: {full} of the prompts fill the target's context: no room for an answer")
        end.code = 0
    if end.code == 0 and config.trace:
        view.note(f"trace:  {folder.folder / TRACE_PAGE}")
    if end.code == 0 and profiler:
        view.profile(folder.result["profile"], folder.folder / PROFILE)
    return end.code


class _Book:
    """Enters what was decoded in the run folder: steps, records of requests and, of a traced run, the page of both."""

    def __init__(
        self, pipeline: Pipeline, requests: Requests, folder: RunFolder, *, trace: bool, profiler: Profiler | None
    ) -> None:
        self._pipeline, self._requests, self._folder, self._profiler = pipeline, requests, folder, profiler
        self._traced: list[TracedRequest] | None = [] if trace else None
        self._entered: set[int] = set()  # numbers of requests
        self._rows = 0

    def step(self, number: int, index: int, step: Step) -> None:
        """A request's step, its `index`th."""
        self._folder.step(number, index, step)
        self._rows += 1
        if self._rows == step.rows:  # of one pass
            self._rows = 0
            if self._profiler:
                self._profiler.step()

    def request(self, request: Request) -> dict[str, Any]:
        """A finished or interrupted request; its record."""
        with undisturbed():
            codec, sequence = self._pipeline.text, request.sequence
            record = completion(request.text, sequence, codec.answer(sequence), self._pipeline.gamma).record()
            record |= self._requests.labels(request)
            self._folder.request(record)
            self._entered.add(request.number)
            if self._traced is not None:
                self._traced.append(TracedRequest.of(record, sequence, codec))
        return record

    def close(self) -> None:
        """Enters what was begun when the run was interrupted, and writes what is made of all: profile and page."""
        for request in self._requests.made():
            if request.sequence.steps and request.number not in self._entered:
                self.request(request)
        if self._profiler:
            self._profiler.stop()
            self._folder.put(profile=self._profiler.summary())
            self._folder.written_by(self._profiler.write)
        if self._traced is not None:
            self._folder.write(TRACE_PAGE, trace_page(self._folder.result, self._traced))


Records = Iterator[tuple[int, dict[str, Any]]]  # a request's number and its record


def _one_by_one(pipeline: Pipeline, requests: Requests, _: int, book: _Book, view: DecodeView) -> Records:
    """Each request to its end, shown as it streams."""
    for request in requests:
        number, sequence = request.number, request.sequence
        view.begin(number, request.text)
        for piece in pipeline.text.stream(sequence, _traced(pipeline.decode(sequence), number, book)):
            view.piece(piece)
        record = book.request(request)
        view.end(record)
        yield number, record


def _together(pipeline: Pipeline, requests: Requests, size: int, book: _Book, view: DecodeView) -> Records:
    """Several requests a pass, each shown when it and those before it are finished."""
    for sequence, step in pipeline.decode_together(requests.firsts, size, requests.follow):
        book.step(requests.of(sequence).number, len(sequence.steps) - 1, step)
        yield from _shown(pipeline, requests.finished(), book, view)
    yield from _shown(pipeline, requests.finished(), book, view)  # those that had nothing to decode


def _shown(pipeline: Pipeline, finished: Iterator[Request], book: _Book, view: DecodeView) -> Records:
    for request in finished:
        record = book.request(request)
        view.begin(request.number, request.text)
        for piece in pipeline.text.stream(request.sequence, request.sequence.steps):
            view.piece(piece)
        view.end(record)
        yield request.number, record


def _traced(steps: Iterator[Step], number: int, book: _Book) -> Iterator[Step]:
    for index, step in enumerate(steps):
        book.step(number, index, step)
        yield step


def _summary(pipeline: Pipeline, requests: Requests) -> dict[str, Any]:
    """Over all steps that were measured, and by category where prompts have one."""
    made = requests.made()
    measured = [[step for step in each.sequence.steps if step.seconds] for each in made]  # not one that was interrupted
    summary = summarise(measured, pipeline.gamma)
    if requests.categories:
        groups: dict[str, list[list[Step]]] = {}
        for request, of_request in zip(made, measured, strict=True):
            groups.setdefault(request.category or "none", []).append(of_request)
        summary["categories"] = {name: summarise(group, pipeline.gamma) for name, group in groups.items()}
    steps = [step for request in made for step in request.sequence.steps]
    if members := sorted({step.source for step in steps if step.source}):
        counts = {
            name: spec_decode([step for step in steps if step.source == name], pipeline.gamma) for name in members
        }
        summary = summary | {"members": counts}
    expected = expected_by_rule(steps)
    return summary | {"steps_by_rule": _steps_by_rule(pipeline, steps), "expected_accepted": expected}


def _steps_by_rule(pipeline: Pipeline, steps: list[Step]) -> dict[str, int]:
    """How many drafts each rule judged: the configured one, or the one it leaves drafts without q to."""
    configured = str(HydraConfig.get().runtime.choices.get("sampler"))
    without_q = getattr(pipeline.sampler, "without_q", configured)
    return dict(Counter(configured if step.has_q else without_q for step in steps if step.drafted))


def _rule_note(rules: Mapping[str, int]) -> str | None:
    """Says so where another rule than the configured one did all the judging."""
    choices = HydraConfig.get().runtime.choices
    sampler, proposer = choices.get("sampler"), choices.get("proposer")
    if not rules or sampler in rules:
        return None
    return (
        f"note: {proposer} gives no q, so the rule of sampler={next(iter(rules))} judged (the same law as {sampler}'s)"
    )
