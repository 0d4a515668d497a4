"""The proposal contract: each drafted token was drawn from exactly the q that came with it (theory.md section 2)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from specpipe.audit import uniformity
from specpipe.audit.finding import FAILED, NOT_APPLICABLE, PASSED, TOO_LITTLE, Finding
from specpipe.audit.reading import Answer
from specpipe.audit.uniformity import Uniforms
from specpipe.chance import Chance
from specpipe.draft import Draft
from specpipe.proposers import Proposer
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings

PER_ORDERING = ("chi-square", "Anderson-Darling", "lag 1")
ENOUGH = 500  # draws; a mean total-variation bias of .12 shows then


class Watched:
    """A proposer whose drafts are compared with the laws it returns; in all else it is that proposer.

    Args:
        proposer: the one that is audited.
        seed: of the auditor's own randomness.
    """

    def __init__(self, proposer: Proposer, seed: int = 0) -> None:
        self.__wrapped__ = proposer  # as functools.wraps leaves it
        self._uniforms = Uniforms(seed)
        self._deterministic = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        draft = self.__wrapped__.propose(sequences, lengths)
        for b in range(len(draft.lengths)):
            x, q = draft.row(b)
            if q is None:
                self._deterministic += len(x)
                continue
            for i, token in enumerate(x):
                if q[i].sum() > 0:
                    self._uniforms.add(token, q[i] / q[i].sum(), None)
        return draft

    def finding(self) -> Finding:
        n = len(self._uniforms)
        if not n:
            what = f"{self._deterministic} drafts were deterministic" if self._deterministic else "nothing was drafted"
            reason = f"{what}: any guess keeps the law, there is no q to match."
            return Finding("proposal contract", NOT_APPLICABLE, reason)
        p_values = [each for each in uniformity.battery(self._uniforms) if each.statistic in PER_ORDERING]
        worst = min(p_values, key=lambda p_value: p_value.p)
        corrected = min(1.0, worst.p * len(p_values))
        numbers = {
            "draws": n,
            "level": uniformity.LEVEL,
            "p_values": [p_value.record(len(p_values)) for p_value in p_values],
            "histograms": self._uniforms.histograms(),
        }
        which = f"corrected p = {corrected:.2g} ({worst.statistic}, ordered by {worst.ordering.replace('p', 'q')})"
        if corrected < uniformity.LEVEL:
            return Finding("proposal contract", FAILED, f"{n} drafts do not follow the q returned: {which}.", numbers)
        if n < ENOUGH:
            return Finding("proposal contract", TOO_LITTLE, f"{n} drafts are fewer than {ENOUGH}.", numbers)
        return Finding("proposal contract", PASSED, f"{n} drafts follow the q returned: smallest {which}.", numbers)


class ProposerLaw:
    """The law of a proposer's next token, recomputed from the prefix of emitted tokens alone.

    It never sees where the steps of the run began or what was drafted in them: an ordering made from those would turn
    a lossless sampler's tokens away from the uniform law.
    """

    def __init__(
        self, proposer: Proposer, settings: GenerationSettings, stop_ids: frozenset[int] = frozenset(), seed: int = 0
    ) -> None:
        self._proposer, self._settings, self._stop_ids, self._seed = proposer, settings, stop_ids, seed
        self._answer: Answer | None = None

    def __call__(self, answer: Answer, t: int) -> Tensor | int | None:
        """The first draft's law at place t of the answer: [V], an id if it is deterministic, None if there is none."""
        if answer is not self._answer:
            self._answer = answer
            chance = Chance(self._seed, answer.prompt)
            end = len(answer.prompt) + len(answer.output) + 1
            self._sequence = Sequence(
                answer.prompt, self._settings, stop_ids=self._stop_ids, context=end, chance=chance
            )
        self._sequence.tokens = [*answer.prompt, *answer.output[:t]]
        draft = self._proposer.propose([self._sequence], [1])
        if not draft.lengths[0]:
            return None
        (x, *_), q = draft.row(0)
        return x if q is None else q[0]
