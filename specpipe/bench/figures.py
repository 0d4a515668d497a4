"""From what was decoded to figures: per cell and category, with speedups over plain decoding in pairs of prompts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specpipe import theory
from specpipe.bench.grid import Cell
from specpipe.bench.record import Decoded
from specpipe.sequence import Step
from specpipe.stats import paired_ratio, ratio, summarise, timing

Interval = dict[str, float | None]


@dataclass(frozen=True)
class Cost:
    """Mean seconds of a request's share of a step that reads no prompt: drafting, the target's pass, the rest."""

    steps: int
    draft: float
    verify: float
    other: float

    @property
    def total(self) -> float:
        return self.draft + self.verify + self.other


def steps_of(requests: Iterable[Decoded]) -> list[Step]:
    return [step for request in requests for step in request.steps]


def cost(steps: Iterable[Step]) -> Cost | None:
    """Of the steps that are no prompt passes; None without any."""
    decoding = [step for step in steps if not step.prefill]
    if not decoding:
        return None
    spent = {part: seconds / len(decoding) for part, seconds in timing(decoding).items()}
    return Cost(len(decoding), spent["draft"], spent["verify"], spent["accept"] + spent["other"] + spent["prefill"])


def costs_by_drafted(steps: Iterable[Step]) -> dict[int, Cost]:
    """Of steps by how many tokens they drafted."""
    groups: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        if not step.prefill:
            groups[step.drafted].append(step)
    return {drafted: known for drafted in sorted(groups) if (known := cost(groups[drafted]))}


def summary(cell: Cell, requests: Sequence[Decoded], plain: Sequence[Decoded]) -> dict[str, Any]:
    """What `summarise` says of a cell, and how it compares with plain decoding of the same prompts."""
    by_prompt: dict[int, list[Step]] = defaultdict(list)
    for request in requests:
        by_prompt[request.conversation] += request.steps
    figures = summarise(list(by_prompt.values()), cell.gamma or 0)
    figures["speedup"] = speedup(requests, plain, cell.setting.stretch) if requests is not plain else _interval(1.0)
    if cell.peer:
        return figures | {"tokens_per_target_pass": None, "spec_decode": None, "timing": None}
    return figures | _against(plain, steps_of(requests), figures["alpha"]["mean"]) | _same_texts(cell, requests, plain)


def speedup(requests: Sequence[Decoded], plain: Sequence[Decoded], stretch: int = 1) -> Interval:
    """Tokens per second behind the prompt passes over those of plain decoding; its interval is over prompts.

    Prompts that share passes share their time, and what disturbed it. Where `stretch` of them do, the interval is the
    wider one of that over prompts and that over stretches, and there is none for a single stretch.
    """
    over_prompts = _paired(requests, plain, lambda each: each.conversation)
    if stretch == 1:
        return over_prompts
    over_stretches = _paired(requests, plain, lambda each: (each.repeat, each.conversation // stretch))
    both = [each for each in (over_prompts, over_stretches) if each["low"] is not None]
    if len(both) < 2:
        return _interval(over_prompts["mean"])
    return max(both, key=lambda each: (each["high"] or 0.0) - (each["low"] or 0.0))


def _paired(requests: Sequence[Decoded], plain: Sequence[Decoded], unit: Callable[[Decoded], Any]) -> Interval:
    """The ratio of both, its interval over units that are independent of each other."""
    ours, theirs = _work(requests, unit), _work(plain, unit)
    return _interval(*paired_ratio([(ours[each], theirs[each]) for each in sorted(ours.keys() & theirs.keys())]))


def _against(plain: Sequence[Decoded], steps: list[Step], alpha: float | None) -> dict[str, Any]:
    """Figures in units of a plain step: c, the alpha that would only just pay, and arithmetic per token."""
    base, own = cost(steps_of(plain)), cost(step for step in steps if step.drafted)
    if base is None or own is None:
        return {"cost_ratio": None, "break_even_alpha": None, "operations": None}
    drafting = [step for step in steps if step.drafted and not step.prefill]
    drafted = sum(step.drafted for step in drafting) / len(drafting)  # tokens, on average
    c = own.draft / drafted / base.verify
    needed = theory.break_even_alpha(drafted, c, own.verify / base.verify, own.other / base.verify, _rest(base))
    scored = sum(step.drafted * (1 + c) + 1 for step in steps if not step.prefill)
    emitted = sum(len(step.tokens) for step in steps if not step.prefill)
    return {
        "cost_ratio": c,
        "break_even_alpha": None if math.isnan(needed) else needed,
        "operations": ratio(scored, emitted),
    }


def _rest(base: Cost) -> float:
    return (base.draft + base.other) / base.verify


def _same_texts(cell: Cell, requests: Sequence[Decoded], plain: Sequence[Decoded]) -> dict[str, Any]:
    """How many texts are plain decoding's, token by token: all of them in exact arithmetic at temperature 0."""
    if cell.setting.temperature > 0 or not cell.gamma:
        return {"identical_texts": None, "texts": None}
    theirs = {(each.repeat, each.number): each.token_ids for each in plain}
    same = [each.token_ids == theirs.get((each.repeat, each.number)) for each in requests]
    return {"identical_texts": sum(same), "texts": len(same)}


def _work(requests: Iterable[Decoded], unit: Callable[[Decoded], Any]) -> Mapping[Any, tuple[float, float]]:
    """By unit the tokens behind the prompt passes, and the seconds that they took."""
    groups: dict[Any, list[Step]] = defaultdict(list)
    for request in requests:
        groups[unit(request)] += [step for step in request.steps if not step.prefill]
    return {each: (sum(len(s.tokens) for s in group), sum(timing(group).values())) for each, group in groups.items()}


def _interval(mean: float | None, low: float | None = None, high: float | None = None) -> Interval:
    return {"mean": mean, "low": low, "high": high}
