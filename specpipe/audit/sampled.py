"""The sampled law: does each emitted token come from the target's law at its own prefix? (theory.md section 8c)

Judges token ids, whoever made them; all it needs beside them is the target and the settings that were promised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from specpipe.audit import uniformity
from specpipe.audit.finding import FAILED, NOT_APPLICABLE, PASSED, TOO_LITTLE, Finding
from specpipe.audit.reading import Answer, all_logits
from specpipe.audit.rounding import nearly_possible
from specpipe.audit.uniformity import Uniforms
from specpipe.distribution import Prefix, Rows
from specpipe.settings import GenerationSettings

# What an emitted token may have been drawn with besides p, from its prefix alone: a law, an id, or nothing.
Reference = Callable[[Answer, int], "Tensor | int | None"]

ENOUGH = 0.03  # smallest detectable mean total variation that a verdict of `lossless` needs
WIDTH = 64  # tokens read per pass


class SampledLaw:
    """Collects tokens and what the target says of them; `finding` decides.

    Args:
        verifier: the target.
        settings: under which the tokens are said to have been drawn.
        stop_ids: that end a request under them.
        reference: the law the tokens may lean on, see `ProposerLaw`; None where nobody knows it.
        seed: of the auditor's own randomness.
    """

    def __init__(
        self,
        verifier: Any,
        settings: GenerationSettings,
        stop_ids: frozenset[int],
        reference: Reference | None = None,
        seed: int = 0,
    ) -> None:
        self._verifier, self._settings, self._stop_ids = verifier, settings, stop_ids
        self._reference = reference or (lambda answer, t: None)
        self.uniforms = Uniforms(seed)
        self.impossible: list[dict[str, Any]] = []
        self._rounded = 0  # tokens just outside a truncated law
        self._requests = 0
        self._seen: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()
        self._repeated = 0  # requests equal to an earlier one, prompt and output

    def add(self, answer: Answer) -> None:
        """Judge the tokens of one request."""
        if answer.output:
            self._judge(answer)
            whole = (tuple(answer.prompt), tuple(answer.output))
            self._repeated += whole in self._seen
            self._seen.add(whole)
        self._requests += 1

    def _judge(self, answer: Answer) -> None:
        logits = all_logits(self._verifier, answer, WIDTH)
        before = Prefix(answer.prompt, (), self._stop_ids)
        laws = Rows(logits, self._settings, before, answer.output)
        for t, x in enumerate(answer.output):
            p = laws[t]
            if p[x] == 0:
                self._outside(logits[t], before.then(answer.output[:t]), x, t)
            self.uniforms.add(x, p, self._reference(answer, t), self._requests)

    def finding(self) -> Finding:
        """Failed, passed, or not enough data to have seen a bias of ENOUGH."""
        if self._settings.temperature == 0:
            return Finding("sampled law", NOT_APPLICABLE, "at temperature 0 nothing is drawn.")
        if not len(self.uniforms):
            return Finding("sampled law", TOO_LITTLE, "no token was emitted.")
        p_values = uniformity.battery(self.uniforms)
        detectable = uniformity.smallest_detectable(self.uniforms, len(p_values))
        needed = uniformity.tokens_needed(self.uniforms, len(p_values), ENOUGH)
        result, reason = self._decide(p_values, detectable, needed)
        numbers = {
            "requests": self._requests,
            "tokens": len(self.uniforms),
            "level": uniformity.LEVEL,
            "p_values": [p_value.record(len(p_values)) for p_value in p_values],
            "smallest_detectable_tv": detectable,
            "enough": ENOUGH,
            "tokens_needed": needed,
            "drafted_positions": self.uniforms.drafted,
            "impossible": self.impossible,
            "outside_by_rounding": self._rounded,
            "repeated_requests": self._repeated,
            "histograms": self.uniforms.histograms(),
        }
        return Finding("sampled law", result, reason, numbers)

    def _decide(self, p_values: list[uniformity.PValue], detectable: float, needed: int) -> tuple[str, str]:
        n, worst = len(self.uniforms), min(p_values, key=lambda p_value: p_value.p)
        corrected = min(1.0, worst.p * len(p_values))
        if self.impossible:
            first = self.impossible[0]
            where = f"token {first['token']} of request {first['request']} at place {first['position']}"
            return FAILED, f"{len(self.impossible)} of {n} tokens have probability 0, the first is {where}."
        together = next(p_value.p for p_value in p_values if p_value.statistic == "across requests") * len(p_values)
        if together < uniformity.LEVEL:
            same = f"; {self._repeated} of them repeat another word for word" if self._repeated else ""
            what = f"at equal places they move together, corrected p = {together:.2g}"
            return FAILED, f"{self._requests} requests share their random numbers: {what}{same}."
        if corrected < uniformity.LEVEL:
            which = f"{worst.statistic}, ordered by {worst.ordering}"
            return FAILED, f"{n} tokens do not follow the target's law: corrected p = {corrected:.2g} ({which})."
        towards = "the draft" if self.uniforms.drafted else "a flatter law"
        seen = f"a bias towards {towards} of {detectable:.3f} in mean total variation would have shown"
        found = f"{n} tokens, smallest corrected p = {corrected:.2g}; {seen}"
        if detectable > ENOUGH:
            return TOO_LITTLE, f"{found}; to see one of {ENOUGH} it takes about {needed} tokens."
        return PASSED, f"{found}."

    def _outside(self, logits: Tensor, prefix: Prefix, x: int, position: int) -> None:
        if nearly_possible(logits, x, self._settings, prefix):
            self._rounded += 1
        else:
            self.impossible.append({"request": self._requests, "position": position, "token": x})
