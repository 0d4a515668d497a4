"""`specpipe audit`: prove that nothing is lost, by four tests; or judge the token ids of another engine."""

from __future__ import annotations

import copy
import itertools
import math
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from specpipe.audit.exact import exact_law, sweep
from specpipe.audit.finding import BIASED, FAILED, LOSSLESS, TOO_LITTLE, Finding, verdict
from specpipe.audit.greedy import GreedyIdentity
from specpipe.audit.outputs import check_outputs, read_outputs, write_outputs
from specpipe.audit.proposals import ProposerLaw, Watched
from specpipe.audit.reading import Answer
from specpipe.audit.sampled import SampledLaw
from specpipe.audit.terminal import AuditView
from specpipe.commands.parts import another_proposer, build_pipeline, chosen_prompts, ending, head
from specpipe.config import build, plain
from specpipe.console import OutputClosed
from specpipe.errors import ContractError, UserError
from specpipe.pipeline import Pipeline
from specpipe.proposers import Proposer
from specpipe.report.audit import audit_page
from specpipe.results import RunFolder
from specpipe.sequence import Sequence
from specpipe.stats import completion, summarise

WRONG_INPUT, CRASHED = 2, 70  # the latter as EX_SOFTWARE of sysexits.h
EXIT_CODES = {LOSSLESS: 0, BIASED: 1, TOO_LITTLE: 3}
# What describes how we decode says nothing about a file of another engine's output.
OURS_ALONE = (
    "proposer",
    "sampler",
    "num_speculative_tokens",
    "draft_length",
    "prompts",
    "prompt",
    "tokens",
    "greedy_tokens",
)


def run(config: DictConfig) -> int:
    """Audit what the config names; returns the exit code."""
    settled = plain(config)
    hydra = HydraConfig.get().runtime
    outputs = None if config.file is None else _foreign(config.file)
    asked = chosen_prompts(config) if outputs is None else None
    if asked and asked.later is not None:
        raise UserError("an audit decodes first turns; it takes prompts.turns=first.", key="prompts.turns")
    tracker = build(config.wandb, "wandb")
    if sys.stderr.isatty():
        print(f"loading {hydra.choices.get('target')} ...", file=sys.stderr)
    pipeline = build_pipeline(config)
    audit: ForeignAudit | PipelineAudit
    if asked is None:
        audit = ForeignAudit(pipeline, outputs or [], config.batch_size)
    else:
        audit = PipelineAudit(
            pipeline,
            another_proposer(config, pipeline),
            asked.texts,
            tokens=config.tokens,
            greedy_tokens=config.greedy_tokens,
            batch_size=config.batch_size,
        )
    constant = head("audit", pipeline, settled, hydra.choices) | audit.about | {"verdict": None, "tests": []}
    folder = RunFolder(Path(hydra.output_dir), constant, audit.summary)
    tracker.start("audit", settled, folder.folder)
    view = AuditView()
    codes = EXIT_CODES.values()
    with ending(folder, tracker, view.note, crashed=CRASHED, done=codes, last=lambda: _keep(audit, folder)) as end:
        try:
            word = _judged(audit, folder, view)
        except OutputClosed:
            raise
        except (UserError, FloatingPointError):
            end.code = WRONG_INPUT
            raise
        except Exception:  # Python's own exit code for a crash says `biased` here
            traceback.print_exc()
        else:
            end.code = EXIT_CODES[word]
    if end.code in codes:
        view.note(f"page:   {folder.folder / 'report.html'}")
    return end.code


def _judged(audit: ForeignAudit | PipelineAudit, folder: RunFolder, view: AuditView) -> str:
    """The verdict, each finding shown and kept as it comes."""
    findings: list[Finding] = []
    for finding in audit.findings(view):
        findings.append(finding)
        folder.put(tests=[each.record() for each in findings])
        view.finding(finding)
    word, reasons = verdict(findings)
    folder.put(verdict=word, reasons=reasons)
    view.verdict(word)
    return word


def _foreign(path: str) -> list[tuple[str, Answer]]:
    for override in HydraConfig.get().overrides.task:
        key = override.lstrip("+~").partition("=")[0].partition(".")[0]
        if key in OURS_ALONE:
            raise UserError("says how specpipe decodes; with file= another engine's output is judged.", key=key)
    return read_outputs(path)


def _keep(audit: ForeignAudit | PipelineAudit, folder: RunFolder) -> None:
    """What was sampled, as records and as a file that `audit file=` can judge again; and the page."""
    for record in audit.records():
        folder.request(record)
    if answers := audit.answers():
        folder.write("outputs.jsonl", write_outputs(answers))
    folder.write("report.html", audit_page(folder.result))


class PipelineAudit:
    """Our own pipeline: the exact law of its sampler, greedy identity, the sampled law, the proposal contract.

    Args:
        pipeline: as configured.
        reference: another proposer like the pipeline's, that has seen nothing of what the pipeline decodes.
        prompts: decoded in turn, again and again with streams of their own.
        tokens: sampled and judged, at least.
        greedy_tokens: decoded greedily and compared, at least.
        batch_size: requests in one pass.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        reference: Proposer,
        prompts: list[str],
        *,
        tokens: int,
        greedy_tokens: int,
        batch_size: int,
    ) -> None:
        self.about: dict[str, Any] = {}
        self._pipeline, self._prompts = pipeline, prompts
        self._tokens, self._greedy_tokens, self._batch_size = tokens, greedy_tokens, batch_size
        self._watched = pipeline.proposer = Watched(pipeline.proposer, pipeline.seed)
        self._sampled: list[tuple[str, Sequence]] = []
        pipeline.sequences(prompts)  # prompts that cannot be decoded are refused before anything runs
        settings = pipeline.settings
        self._stop_ids = settings.stop_ids(pipeline.verifier.target.eos_ids)
        law = ProposerLaw(reference, settings, self._stop_ids, pipeline.seed)
        self._law = SampledLaw(pipeline.verifier, settings, self._stop_ids, law, pipeline.seed)

    def findings(self, view: AuditView) -> Iterator[Finding]:
        """Each test's, as it is done."""
        own, gamma = self._own_settings(), self._pipeline.gamma
        with view.bar("exact law", sum(1 for _ in sweep(own, gamma))) as advance:
            found = exact_law(self._pipeline.sampler, own, gamma, advance)
        yield found
        if any("raised" in case for case in found.numbers["cases"]):
            return  # it would raise on the real target too
        try:
            with view.bar("greedy identity", 2 * self._greedy_tokens) as advance:
                found = self._greedy_identity(advance)
            yield found
            if self._pipeline.settings.temperature > 0:
                with view.bar("sampled law", 2 * self._tokens) as advance:
                    self._sample(advance)
            yield self._law.finding()
            yield self._watched.finding()
        except ContractError as error:
            yield Finding("proposal contract", FAILED, f"{error}.")

    def summary(self) -> dict[str, Any]:
        """Acceptance counters of the sampled requests."""
        return summarise([sequence.steps for _, sequence in self._sampled], self._pipeline.gamma)

    def records(self) -> Iterator[dict[str, Any]]:
        """The sampled requests, as in `decode`."""
        for text, sequence in self._sampled:
            answer = self._pipeline.text.answer(sequence)
            yield completion(text, sequence, answer, self._pipeline.gamma).record()

    def answers(self) -> list[Answer]:
        """The finished ones of the sampled requests as token ids."""
        return [_answer(sequence) for _, sequence in self._sampled if sequence.finish_reason]

    def _greedy_identity(self, advance: Any) -> Finding:
        pipeline, sampling = self._pipeline, self._pipeline.settings
        identity = GreedyIdentity(pipeline.verifier, sampling, self._stop_ids, pipeline.gamma + 1)
        answers: list[Answer] = []
        pipeline.settings = copy.copy(sampling)
        pipeline.settings.temperature = 0.0
        try:
            for _, sequence in itertools.islice(self._requests(), len(self._prompts)):
                for step in pipeline.decode(sequence):
                    advance(len(step.tokens))
                answers.append(_answer(sequence))
                if sum(len(answer.output) for answer in answers) >= self._greedy_tokens:
                    break
        finally:
            pipeline.settings = sampling
        for start in range(0, len(answers), self._batch_size):
            identity.add(answers[start : start + self._batch_size], advance)
        return identity.finding()

    def _sample(self, advance: Any) -> None:
        requests, done = self._requests(), 0
        longest = self._pipeline.settings.max_new_tokens or self._tokens
        while done < self._tokens:
            needed = math.ceil((self._tokens - done) / longest)
            group = list(itertools.islice(requests, min(self._batch_size, needed)))
            if not any(sequence.finish_reason is None for _, sequence in group):
                break  # no room for a single token
            self._sampled += group
            for _, step in self._pipeline.decode_together([sequence for _, sequence in group], self._batch_size):
                advance(len(step.tokens))
            for _, sequence in group:
                self._law.add(_answer(sequence))
                advance(len(sequence.new_tokens))
                done += len(sequence.new_tokens)

    def _requests(self) -> Iterator[tuple[str, Sequence]]:
        """Requests for the prompts in turn, without end."""
        seen: Counter[tuple[int, ...]] = Counter()
        while True:
            yield from zip(self._prompts, self._pipeline.sequences(self._prompts, seen), strict=True)

    def _own_settings(self) -> dict[str, dict[str, Any]]:
        """The run's settings as far as a table model can have them: ids mean nothing to it."""
        settings = self._pipeline.settings
        names = ["temperature", "top_k", "top_p", "min_p", "typical_p"]
        names += ["repetition_penalty", "frequency_penalty", "presence_penalty"]
        return {"as configured": {name: getattr(settings, name) for name in names}}


class ForeignAudit:
    """Another engine's token ids, judged against the target under the settings it was asked for.

    Args:
        pipeline: its verifier and settings are used.
        outputs: what the engine made of which prompts.
    """

    def __init__(self, pipeline: Pipeline, outputs: list[tuple[str, Answer]], batch_size: int) -> None:
        self.about = dict.fromkeys(("proposer", "sampler", "num_speculative_tokens", "lossless"))
        target, settings = pipeline.verifier.target, pipeline.settings
        self._verifier, self._settings, self._seed = pipeline.verifier, settings, pipeline.seed
        self._stop_ids = settings.stop_ids(target.eos_ids)
        self._outputs = check_outputs(outputs, target.vocabulary, target.context, self._stop_ids)
        self._batch_size = batch_size

    def findings(self, view: AuditView) -> Iterator[Finding]:
        """At temperature 0 greedy identity, else the sampled law."""
        tokens = sum(len(answer.output) for answer in self._outputs)
        if self._settings.temperature == 0:
            identity = GreedyIdentity(self._verifier, self._settings, self._stop_ids)
            with view.bar("greedy identity", tokens) as advance:
                for start in range(0, len(self._outputs), self._batch_size):
                    identity.add(self._outputs[start : start + self._batch_size], advance)
            yield identity.finding()
            return
        law = SampledLaw(self._verifier, self._settings, self._stop_ids, seed=self._seed)
        with view.bar("sampled law", tokens) as advance:
            for answer in self._outputs:
                law.add(answer)
                advance(len(answer.output))
        yield law.finding()

    def summary(self) -> dict[str, Any]:
        """Nothing was decoded."""
        return {}

    def records(self) -> Iterator[dict[str, Any]]:
        """Nothing was decoded."""
        yield from ()

    def answers(self) -> list[Answer]:
        """They are in the file already."""
        return []


def _answer(sequence: Sequence) -> Answer:
    return Answer(sequence.tokens[: sequence.prompt_length], sequence.new_tokens)
