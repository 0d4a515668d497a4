"""How many tokens a step asks its proposer for (config group `draft_length`).

A policy knows requests and the record of their steps; it knows neither models nor proposers. The output law does not
depend on it: a length is chosen before anything of the step is drawn.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence as Items
from itertools import accumulate
from operator import mul
from statistics import median
from typing import Protocol
from weakref import WeakKeyDictionary

from specpipe.errors import integer
from specpipe.sequence import Sequence, Step


class DraftLength(Protocol):
    """A class with this one method, named in a YAML file, is a policy."""

    def choose(self, sequences: list[Sequence], longest: int) -> list[int]:
        """For each request of the coming step at most how many tokens to draft, 0 to `longest`.

        `sequence.steps` holds what earlier steps asked, drafted, accepted and cost.
        """
        ...


class Fixed:
    """Always `num_speculative_tokens`."""

    def choose(self, sequences: list[Sequence], longest: int) -> list[int]:
        return [longest] * len(sequences)


class Adaptive:
    """The length with most expected tokens per second, `num_speculative_tokens` at most; 0 if drafting does not pay.

    For a length k it compares (1 + sum_{i<=k} P(N >= i)) / E[seconds of a pass that asks for k], tau(k) over its cost
    as in theory.md section 6. P(N >= i) is a product of the shares of tries in which place i was drafted and accepted,
    of the request itself and, as long as that has few tries, of the run; the seconds are medians of recent passes by
    drafted tokens on a machine of even speed, weighted with how often the proposer has so many. All requests of a pass
    get one length, since the pass is as wide as its longest draft.

    At first lengths 0, 1, 2, 4, .. are each asked for, so that their costs are known. Every `probe_every` steps it is
    one token less than seems best, or one more if that could pay, in turn: a proposer that has become better is
    noticed, also at 0. Lengths depend on measured times, so a sampled text is not fixed by its seed.

    Args:
        probe_every: steps from one such try to the next.
        memory: tries after which an older one of the same request weighs e times less.
    """

    def __init__(self, *, probe_every: int = 8, memory: int = 48) -> None:
        self.probe_every = integer("probe_every", probe_every, 2)
        self.memory = integer("memory", memory, 1)
        self._run = Record(RUN_MEMORY)
        self._own: WeakKeyDictionary[Sequence, Record] = WeakKeyDictionary()
        self._costs: dict[int, Costs] = {}  # by requests in a pass
        self._chosen = 0
        self._tried: Counter[tuple[int, int]] = Counter()  # (requests in a pass, length)

    def choose(self, sequences: list[Sequence], longest: int) -> list[int]:
        self._catch_up(sequences)
        length = self._unknown(len(sequences), longest) if sequences[0].steps else None  # the first pass is not timed
        if length is None:
            self._chosen += 1
            rates = self._rates(sequences, longest)
            length = max(range(longest + 1), key=rates.__getitem__)  # of equals the shortest
            if self._chosen % self.probe_every == 0:
                length = self._neighbour(sequences, longest, length, rates[length])
        return [length] * len(sequences)

    def _unknown(self, rows: int, longest: int) -> int | None:
        """A length whose cost must be measured; one that the proposer does not come up to is given up."""
        costs = self._costs.get(rows, Costs())
        for length in (longest, 0, *(2**i for i in range(longest.bit_length()))):
            if length <= longest and not costs.knows(length) and self._tried[rows, length] < TRIES:
                self._tried[rows, length] += 1
                return length
        return None

    def _catch_up(self, sequences: list[Sequence]) -> None:
        """Read the steps made since the last call; those that several requests shared are one pass."""
        passes: dict[int, list[Step]] = {}
        for sequence in sequences:
            own = self._own.setdefault(sequence, Record(self.memory))
            for step in sequence.steps[own.read :]:
                own.add(step)
                self._run.add(step)
                if step.seconds and not step.prefill:
                    passes.setdefault(step.rows, []).append(step)
            own.read = len(sequence.steps)
        for rows, steps in passes.items():
            widest = max(steps, key=lambda step: step.drafted)
            self._costs.setdefault(rows, Costs()).add(widest.drafted, sum(widest.seconds.values()))

    def _neighbour(self, sequences: list[Sequence], longest: int, best: int, rate: float) -> int:
        """One less or one more, in turn; more only if that paid, were everything behind the best length accepted."""
        if best > 0 and self._chosen // self.probe_every % 2 == 0:
            return best - 1
        hope = max(self._rates(sequences, longest, sure_behind=best))
        return min(best + 1, longest) if hope > rate else best

    def _rates(self, sequences: list[Sequence], longest: int, sure_behind: int | None = None) -> list[float]:
        """Expected tokens per second of a pass that asks for 0 .. longest; what is `sure_behind` it is accepted."""
        costs = self._costs.get(len(sequences), Costs()).up_to(longest)
        kept, offered = zip(*(self._chances(sequence, longest, sure_behind) for sequence in sequences), strict=True)
        tokens, seconds = float(len(sequences)), costs[0]
        rates = [tokens / seconds]
        for k in range(1, longest + 1):
            tokens += sum(row[k - 1] for row in kept)
            some_row = 1 - math.prod(1 - row[k - 1] for row in offered)  # has k tokens, so the pass is that wide
            seconds += some_row * (costs[k] - costs[k - 1])
            rates.append(tokens / seconds)
        return rates

    def _chances(self, sequence: Sequence, longest: int, sure_behind: int | None) -> tuple[list[float], list[float]]:
        """P(N >= i) and P(drafted >= i) for i = 1 .. longest."""
        own, run = self._own[sequence], self._run
        unsure = longest if sure_behind is None else min(longest, sure_behind)
        kept = expected_like(own.kept, expected(run.kept, unsure))
        offered = expected_like(own.offered, expected(run.offered, unsure))
        sure = [1.0] * (longest - unsure)
        return list(accumulate([*kept, *sure], mul)), list(accumulate([*offered, *sure], mul))


TRIES = 2  # to measure the cost of a length
PRIOR = 0.7  # of acceptance, before anything is known: high enough to try
PRIOR_TRIES = 2.0  # what the prior of the run's first place weighs, and a place's neighbour before it
RUN_MEMORY = 300  # tries of the run, as `memory` for a request
RUN_TRIES = 8.0  # what the run's experience weighs against a request's own


class Record:
    """By place in a draft: how often it was there, and how often it was there and accepted; if those before it were."""

    def __init__(self, memory: int) -> None:
        self.read = 0  # steps
        self._keep = math.exp(-1 / memory)
        self.kept: list[Share] = []
        self.offered: list[Share] = []

    def add(self, step: Step) -> None:
        """A step tries place i + 1 if it was asked for and the i before it were accepted, or for length, drafted."""
        while len(self.kept) < step.asked:
            self.kept.append(Share())
            self.offered.append(Share())
        for i in range(min(step.asked, step.accepted + step.extra)):
            self.kept[i].add(step.accepted > i, self._keep)
        for i in range(min(step.asked, step.drafted + 1)):
            self.offered[i].add(step.drafted > i, self._keep)


class Share:
    """Tries and successes, older ones weighing less with every new one."""

    __slots__ = ("successes", "tries")

    def __init__(self) -> None:
        self.tries = self.successes = 0.0

    def add(self, success: bool, keep: float) -> None:
        self.tries = self.tries * keep + 1
        self.successes = self.successes * keep + success


def expected(shares: Items[Share], places: int) -> list[float]:
    """Of so many places; one that was hardly tried does as the one before it."""
    estimates, estimate = [], PRIOR
    for i in range(places):
        if i < len(shares):
            estimate = _mixed(shares[i], estimate, PRIOR_TRIES)
        estimates.append(estimate)
    return estimates


def expected_like(shares: Items[Share], others: Items[float]) -> list[float]:
    """Of as many places as `others`, which stand for what has few tries."""
    return [_mixed(shares[i], p, RUN_TRIES) if i < len(shares) else p for i, p in enumerate(others)]


def _mixed(share: Share, prior: float, weight: float) -> float:
    return (share.successes + weight * prior) / (share.tries + weight)


LATEST = 31  # passes whose median is taken
LEVEL = 0.1  # share of what a pass took longer than its length usually does that is put down to the machine
OUTLIER = 0.3  # of it, in logarithms, at most
SLOPE = 0.1  # of a pass without drafts, for each drafted token, before it was measured


class Costs:
    """Seconds of a pass by its longest draft: medians of the latest ones, lines between and beyond those.

    A machine that is slow for a while must not make the lengths look dear that happened to be tried then. So its speed
    is followed too, by how long passes take beside the usual for their length, and each is kept as if it had been even.
    """

    def __init__(self) -> None:
        self._seen: dict[int, deque[float]] = {}  # logarithms of seconds at an even speed
        self._usual: dict[int, float] = {}  # their medians
        self._level = 0.0  # logarithm of how slow the machine is now

    def add(self, drafted: int, seconds: float) -> None:
        even = math.log(max(seconds, 1e-9)) - self._level
        seen = self._seen.setdefault(drafted, deque(maxlen=LATEST))
        if len(seen) >= TRIES:
            change = LEVEL * max(-OUTLIER, min(OUTLIER, even - self._usual[drafted]))
            self._level += change
            even -= change
        seen.append(even)
        self._usual[drafted] = median(seen)

    def knows(self, drafted: int) -> bool:
        return drafted in self._seen

    def up_to(self, longest: int) -> list[float]:
        """Expected seconds for 0 .. longest at an even speed; in arbitrary units before any pass was measured."""
        known = sorted((length, math.exp(usual)) for length, usual in self._usual.items())
        return [_on_line(known or [(0, 1.0)], drafted) for drafted in range(longest + 1)]


def _on_line(known: Items[tuple[int, float]], drafted: int) -> float:
    """Interpolated; beyond the ends with SLOPE, relative to a pass without drafts. known: ascending, at least one."""
    at = bisect_left(known, (drafted, -math.inf))
    if at < len(known) and known[at][0] == drafted:
        return known[at][1]
    if 0 < at < len(known):
        (x0, y0), (x1, y1) = known[at - 1], known[at]
        return y0 + (y1 - y0) * (drafted - x0) / (x1 - x0)
    x, y = known[0 if at == 0 else -1]
    return y * (1 + SLOPE * drafted) / (1 + SLOPE * x)
