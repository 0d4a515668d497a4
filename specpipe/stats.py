"""Counters to rates: alpha, acceptance, intervals, and the record of a finished request.

Rates are pooled: numerator and denominator are summed over steps before they are divided; without a denominator they
are None. Names and definitions are those of theory.md sections 1 and 7, the `spec_decode` names those vLLM reports.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass
from typing import Any

from specpipe.clock import PARTS
from specpipe.sequence import Sequence, Step, TokenLogprobs
from specpipe.theory import expected_accepted


@dataclass
class Completion:
    """A decoded request, as in result.json `requests[]`.

    timing: seconds by part, summing to the wall time of the request, also where others shared its passes. tokens_per_s:
    of decoding, prompt pass excluded.
    """

    prompt: str | list[int]
    prompt_tokens: int
    text: str
    token_ids: list[int]
    finish_reason: str
    time_to_first_token_s: float | None
    tokens_per_s: float | None
    tokens_per_target_pass: float | None
    alpha: float | None
    timing: dict[str, float]
    spec_decode: dict[str, Any]
    logprobs: list[TokenLogprobs] | None = None

    def record(self) -> dict[str, Any]:
        """Plain values for result.json."""
        return asdict(self)


def completion(prompt: str | Items[int], sequence: Sequence, text: str, gamma: int) -> Completion:
    """The record of a request, finished or interrupted."""
    steps = sequence.steps
    return Completion(
        prompt=prompt if isinstance(prompt, str) else list(prompt),
        prompt_tokens=sequence.prompt_length,
        text=text,
        token_ids=sequence.new_tokens,
        finish_reason=sequence.finish_reason or "interrupted",
        time_to_first_token_s=sum(steps[0].seconds.values()) if steps else None,
        tokens_per_s=ratio(*_decoded(steps)),
        tokens_per_target_pass=ratio(len(sequence.new_tokens), len(steps)),
        alpha=ratio(*_overlap(steps)),
        timing={part: sum(step.seconds.get(part, 0.0) for step in steps) for part in PARTS},
        spec_decode=spec_decode(steps, gamma),
        logprobs=_logprobs(sequence),
    )


def summarise(requests: Items[Items[Step]], gamma: int) -> dict[str, Any]:
    """The `summary` block of result.json from each request's steps."""
    steps = [step for request in requests for step in request]
    first = [sum(step.seconds.values()) for step in steps if step.prefill]
    mean, low, high = pooled_interval([_overlap(request) for request in requests])
    return {
        "new_tokens": sum(len(step.tokens) for step in steps),
        "tokens_per_s": tokens_per_second(steps),
        "tokens_per_target_pass": ratio(sum(len(step.tokens) for step in steps), len(steps)),
        "time_to_first_token_s": ratio(sum(first), len(first)),
        "timing": timing(steps),
        "spec_decode": spec_decode(steps, gamma),
        "alpha": {"mean": mean, "low": low, "high": high},
        "cost_ratio": cost_ratio(steps),
        "asked_histogram": [sum(step.asked == k for step in steps) for k in range(gamma + 1)],
    }


def _logprobs(sequence: Sequence) -> list[TokenLogprobs] | None:
    if sequence.settings.logprobs is None:
        return None
    return [entry for step in sequence.steps for entry in step.logprobs or ()]


def spec_decode(steps: Iterable[Step], gamma: int) -> dict[str, Any]:
    """Acceptance counters of steps that drafted something; plain steps are only counted."""
    steps = list(steps)
    spec = [step for step in steps if step.drafted]
    drafted = sum(step.drafted for step in spec)
    accepted = sum(step.accepted for step in spec)
    places = range(1, gamma + 1)
    reached = [sum(step.accepted >= i for step in spec) for i in places]
    return {
        "num_spec_steps": len(spec),
        "num_plain_steps": len(steps) - len(spec),
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "num_spec_tokens": gamma,
        "draft_acceptance_rate": ratio(accepted, drafted),
        "mean_acceptance_length": 1 + accepted / len(spec) if spec else None,
        "acceptance_histogram": [sum(step.accepted == j for step in spec) for j in range(gamma + 1)],
        "per_position_acceptance": [
            ratio(n, sum(step.drafted >= i for step in spec)) for i, n in zip(places, reached, strict=True)
        ],
        "per_position_conditional": [
            ratio(n, sum(len(step.overlaps) >= i for step in spec)) for i, n in zip(places, reached, strict=True)
        ],
    }


def timing(steps: Iterable[Step]) -> dict[str, float]:
    """Seconds by part, summed: what the requests of these steps took, a pass that several shared counted once."""
    steps = list(steps)
    return {part: sum(step.seconds.get(part, 0.0) / step.rows for step in steps) for part in PARTS}


def tokens_per_second(steps: Iterable[Step]) -> float | None:
    """Tokens emitted behind the prompt pass per second spent behind it; None if a request never got that far."""
    decoding = [step for step in steps if not step.prefill]
    return ratio(sum(len(step.tokens) for step in decoding), sum(timing(decoding).values()))


def cost_ratio(steps: Iterable[Step]) -> float | None:
    """c: seconds of drafting per drafted token over seconds of a plain target pass; None if no plain pass was made."""
    decoding = [step for step in steps if not step.prefill]
    plain = [step for step in decoding if not step.drafted]
    per_token = ratio(timing(decoding)["draft"], sum(step.drafted for step in decoding))
    per_pass = ratio(timing(plain)["verify"], len(plain))
    return None if per_token is None or per_pass is None else ratio(per_token, per_pass)


def pooled_interval(
    requests: Iterable[tuple[float, float]], level: float = 0.95
) -> tuple[float | None, float | None, float | None]:
    """(theta, low, high) of theta = sum A / sum M over requests (A, M), clustered by request (theory.md section 7).

    Clipped to [0, 1]; no interval for fewer than two requests with M > 0.
    """
    counted = [(a, m) for a, m in requests if m]
    theta = ratio(sum(a for a, _ in counted), sum(m for _, m in counted))
    if theta is None or len(counted) < 2:
        return theta, None, None
    from scipy.stats import t as student

    n = len(counted)
    spread = math.sqrt(n / (n - 1) * sum((a - theta * m) ** 2 for a, m in counted)) / sum(m for _, m in counted)
    reach = student.ppf((1 + level) / 2, n - 1) * spread
    return theta, max(0.0, theta - reach), min(1.0, theta + reach)


def paired_ratio(
    pairs: Iterable[tuple[tuple[float, float], tuple[float, float]]], level: float = 0.95
) -> tuple[float | None, float | None, float | None]:
    """(r, low, high) of r = (sum A / sum B) / (sum C / sum D) over prompts ((A, B), (C, D)), a prompt's kept together.

    Linearised in log r, so that a prompt that is slow for both does not count as scatter (theory.md section 7). No
    interval for fewer than two prompts; None throughout where a sum is 0.
    """
    counted = list(pairs)
    sums = [sum(pair[i][j] for pair in counted) for i in (0, 1) for j in (0, 1)]
    if not all(sums):
        return None, None, None
    a, b, c, d = sums
    value = a / b / (c / d)
    n = len(counted)
    if n < 2:
        return value, None, None
    from scipy.stats import t as student

    pulls = [ours[0] / a - ours[1] / b - theirs[0] / c + theirs[1] / d for ours, theirs in counted]
    reach = student.ppf((1 + level) / 2, n - 1) * math.sqrt(n / (n - 1) * sum(pull**2 for pull in pulls))
    return value, value * math.exp(-reach), value * math.exp(reach)


def ratio(numerator: float, denominator: float) -> float | None:
    """Their quotient, or None if there is nothing to divide by."""
    return numerator / denominator if denominator else None


def expected_by_rule(steps: Iterable[Step]) -> dict[str, float] | None:
    """Mean E[N] over the steps that drafted, under each rule, from the drafts' probabilities; None without any."""
    scored = [
        expected_accepted(s.log_p, s.log_q) for s in steps if s.drafted and s.log_p is not None and s.log_q is not None
    ]
    return {rule: sum(each[rule] for each in scored) / len(scored) for rule in scored[0]} if scored else None


def _decoded(steps: Iterable[Step]) -> tuple[int, float]:
    """(tokens, seconds) of one request behind its prompt pass."""
    decoding = [step for step in steps if not step.prefill]
    return sum(len(step.tokens) for step in decoding), sum(sum(step.seconds.values()) for step in decoding)


def _overlap(steps: Iterable[Step]) -> tuple[float, int]:
    """(sum of beta, number of verified positions)."""
    betas = [beta for step in steps for beta in step.overlaps]
    return sum(betas), len(betas)
