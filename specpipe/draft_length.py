"""How many tokens a step asks its proposer for (config group `draft_length`).

A policy knows requests and the record of their steps; it knows neither models nor proposers. The output law does not
depend on it: a length is chosen before anything of the step is drawn.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Sequence as Items
from itertools import accumulate
from operator import mul
from typing import Protocol
from weakref import WeakKeyDictionary, ref

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
    """As many tokens as bring more than their time is worth, `num_speculative_tokens` at most; 0 if drafting costs.

    Of the lengths k it takes the one with most (1 + sum_{i<=k} P(N >= i)) - s E[time of a pass that asks for k], where
    time is counted in passes that draft nothing, and s is what such a time has brought lately: the request's speedup.
    Always to take the greatest difference makes s as great as it can be (Dinkelbach, Management Science 13, 1967), and
    unlike the greatest quotient it tells steps apart: P(N >= i) is that behind a draft which was accepted to its end,
    where a text is often being copied, or that behind others.

    P(N >= i) is a product of the shares of tries in which place i was drafted and accepted, of the request itself and,
    as long as that has few tries, of the run; the times are medians of recent passes by drafted tokens on a machine of
    even speed, weighted with how often the proposer has so many. All requests of a pass get one length, since the pass
    is as wide as its longest draft.

    At first lengths 0, 1, 2, 4, .. are each asked for, so that their times are known. Every `probe_every` steps it is
    one token more than seems best, if that could pay: a proposer that has become better is noticed, also at 0. Lengths
    depend on measured times, so a sampled text is not fixed by its seed.

    Args:
        probe_every: steps from one such try to the next.
        memory: tries after which an older one of the same request weighs e times less.
    """

    def __init__(self, *, probe_every: int = 8, memory: int = 48) -> None:
        self.probe_every = integer("probe_every", probe_every, 2)
        self.memory = integer("memory", memory, 1)
        self._run = Experience(RUN_MEMORY)
        self._own: WeakKeyDictionary[Sequence, Experience] = WeakKeyDictionary()
        self._costs: dict[int, Costs] = {}  # by requests in a pass
        self._tried: Counter[tuple[int, int]] = Counter()  # (requests in a pass, length)
        self._chosen = 0
        self._plan = Plan([])

    def choose(self, sequences: list[Sequence], longest: int) -> list[int]:
        plan = self._plan
        if not plan.holds_for(sequences):
            self._catch_up(list(dict.fromkeys([*plan.sequences(), *sequences])))  # of a shared pass all that is there
            plan = self._plan = Plan(sequences)
            if sequences[0].steps:  # the first pass is not timed
                length = self._unknown(len(sequences), longest)
                if length is not None:
                    plan.steps_left = 0
                    return [length] * len(sequences)
        self._chosen += 1
        plan.steps_left -= 1
        states = tuple(bool(sequence.steps) and is_copying(sequence.steps[-1]) for sequence in sequences)
        if self._chosen % self.probe_every == 0:
            length = self._probe(sequences, states, longest)
        else:
            if (states, longest) not in plan.lengths:
                plan.lengths[states, longest] = best_of(self._gains(sequences, states, longest))
            length = plan.lengths[states, longest]
        return [length] * len(sequences)

    def _probe(self, sequences: list[Sequence], states: tuple[bool, ...], longest: int) -> int:
        """One more than seems best, if that paid were everything behind the best length accepted."""
        gains = self._gains(sequences, states, longest)
        best = best_of(gains)
        return best + (max(self._gains(sequences, states, longest, sure_behind=best)) > gains[best])

    def _unknown(self, rows: int, longest: int) -> int | None:
        """A length whose cost must be measured; one that the proposer does not come up to is given up."""
        costs = self._costs.setdefault(rows, Costs())
        for length in (longest, 0, *(2**i for i in range(longest.bit_length()))):
            if length <= longest and not costs.knows(length) and self._tried[rows, length] < TRIES:
                self._tried[rows, length] += 1
                return length
        return None

    def _catch_up(self, sequences: list[Sequence]) -> None:
        """Read the steps made since the last call; those that several requests shared are one pass."""
        new: list[tuple[Experience, Step]] = []
        drafted: dict[int, int] = {}  # in the widest row, by pass
        for sequence in sequences:
            own = self._own.get(sequence)
            if own is None:
                own = self._own[sequence] = Experience(self.memory)
            for step in sequence.steps[own.steps :]:
                new.append((own, step))
                drafted[id(step.seconds)] = max(step.drafted, drafted.get(id(step.seconds), 0))
        noted = set()
        for own, step in new:
            costs, which = self._costs.setdefault(step.rows, Costs()), id(step.seconds)
            if step.seconds and not step.prefill and which not in noted:
                noted.add(which)
                costs.add(drafted[which], sum(step.seconds.values()))
            time = 0.0 if step.prefill else costs.relative(drafted[which])[-1]
            self._run.add(step, own.copying, time)
            own.add(step, own.copying, time)

    def _gains(
        self, sequences: list[Sequence], states: tuple[bool, ...], longest: int, sure_behind: int | None = None
    ) -> list[float]:
        """Expected tokens less what their time is worth, for 0 .. longest; what is `sure_behind` it is accepted."""
        own = [self._own[sequence] for sequence in sequences]
        times = self._costs.setdefault(len(own), Costs()).relative(longest)
        worth = sum(each.speedup(self._run) for each in own)
        chances = [each.chances(self._run, at, longest, sure_behind) for each, at in zip(own, states, strict=True)]
        kept, offered = ([*zip(*each, strict=True)] for each in zip(*chances, strict=True))  # longest x requests
        tokens, time = float(len(own)), 1.0
        gains = [tokens - worth]
        for k in range(longest):
            tokens += sum(kept[k])
            some_row = 1 - math.prod([1 - p for p in offered[k]])  # has more than k tokens, so the pass is wider
            time += some_row * (times[k + 1] - times[k])
            gains.append(tokens - worth * time)
        return gains


def best_of(gains: list[float]) -> int:
    """The best length, of equals the shortest."""
    return gains.index(max(gains))


PLANNED = 4  # steps for which lengths are found at a time, since after a pass all of this has to come into caches


class Plan:
    """What to ask for in the next few steps of some requests."""

    def __init__(self, sequences: list[Sequence]) -> None:
        self._references = [ref(sequence) for sequence in sequences]  # a finished request is not kept
        self.steps_left = PLANNED if sequences and sequences[0].steps else 1  # a first pass says much, and has no time
        self.lengths: dict[tuple[tuple[bool, ...], int], int] = {}  # by who is copying, and the longest allowed

    def sequences(self) -> list[Sequence]:
        """Those that are still there."""
        return [sequence for reference in self._references if (sequence := reference()) is not None]

    def holds_for(self, sequences: list[Sequence]) -> bool:
        return self.steps_left > 0 and self.sequences() == sequences


def is_copying(step: Step) -> bool:
    """Its draft was accepted to the end."""
    return 0 < step.drafted == step.accepted


TRIES = 2  # to measure the cost of a length
PRIOR = 0.7  # of acceptance, before anything is known: high enough to try
PRIOR_TRIES = 2.0  # what the prior of the run's first place weighs, and a place's neighbour before it
RUN_MEMORY = 300  # tries of the run, as `memory` for a request
RUN_TRIES = 12.0  # what the run's experience weighs against a request's own
LIKE_BEFORE = 0.4  # how far the own place before, and not the run's, says what one with few tries does


class Experience:
    """Of a request, or of all requests of the run: what became of drafts, and what came of the time."""

    def __init__(self, memory: int) -> None:
        self.steps = 0
        self.copying = False  # the last draft was accepted to its end
        self._keep = math.exp(-1 / memory)
        self._kept = Shares(self._keep), Shares(self._keep)  # [copying]
        self._offered = Shares(self._keep), Shares(self._keep)
        self._tokens = self._time = 0.0

    def add(self, step: Step, copying: bool, time: float) -> None:
        """A step tries place i + 1 if it was asked for and the i before it were accepted, or for length, drafted.

        Args:
            copying: the request's draft before it was accepted to its end.
            time: in passes that draft nothing; 0 for one that is not counted.
        """
        self.steps += 1
        self.copying = is_copying(step)
        self._kept[copying].add(step.accepted, min(step.asked, step.accepted + step.extra))
        self._offered[copying].add(step.drafted, min(step.asked, step.drafted + 1))
        if time:
            self._tokens = self._tokens * self._keep + len(step.tokens)
            self._time = self._time * self._keep + time

    def speedup(self, run: Experience) -> float:
        """Tokens for the time of a pass that drafts nothing."""
        before = (run._tokens + RUN_TRIES) / (run._time + RUN_TRIES)
        return (self._tokens + RUN_TRIES * before) / (self._time + RUN_TRIES)

    def chances(
        self, run: Experience, at: bool, longest: int, sure_behind: int | None = None
    ) -> tuple[list[float], list[float]]:
        """P(N >= i) and P(drafted >= i) of the next step for i = 1 .. longest, `at` as `copying` in `add`."""
        unsure = longest if sure_behind is None else sure_behind
        kept = self._kept[at].like(run._kept[at].expected(unsure))
        offered = self._offered[at].like(run._offered[at].expected(unsure))
        sure = [1.0] * (longest - unsure)
        return list(accumulate(kept + sure, mul)), list(accumulate(offered + sure, mul))


class Shares:
    """By place in a draft: tries and successes, older ones weighing less with every new one."""

    def __init__(self, keep: float) -> None:
        self._keep = keep
        self._tries: list[float] = []
        self._successes: list[float] = []

    def add(self, successes: int, tries: int) -> None:
        """The first `tries` places were tried, the first `successes` of them with success."""
        keep = self._keep
        for i in range(tries):
            if i == len(self._tries):
                self._tries.append(0.0)
                self._successes.append(0.0)
            self._tries[i] = self._tries[i] * keep + 1
            self._successes[i] = self._successes[i] * keep + (i < successes)

    def expected(self, places: int) -> list[float]:
        """Of so many places; one that was hardly tried does as the one before it."""
        estimates, estimate = [], PRIOR
        for successes, tries in zip(self._successes[:places], self._tries, strict=False):
            estimate = (successes + PRIOR_TRIES * estimate) / (tries + PRIOR_TRIES)
            estimates.append(estimate)
        return estimates + [estimate] * (places - len(estimates))

    def like(self, others: list[float]) -> list[float]:
        """Of as many places as `others`, which stand for what has few tries, as in part does the own place before."""
        estimates: list[float] = []
        for i, prior in enumerate(others):
            if estimates:
                prior += LIKE_BEFORE * (estimates[-1] - prior)
            if i < len(self._tries):
                prior = (self._successes[i] + RUN_TRIES * prior) / (self._tries[i] + RUN_TRIES)
            estimates.append(prior)
        return estimates


LATEST = 31  # passes whose median is taken
RENEWED = 8  # passes after which costs are read off the medians again
LEVEL = 0.1  # share of what a pass took longer than its length usually does that is put down to the machine
OUTLIER = 0.3  # of it, in logarithms, at most
SLOPE = 0.1  # of a pass without drafts, for each drafted token, before it was measured


class Costs:
    """Seconds of a pass by its longest draft: medians of the latest ones, lines between and beyond those.

    A machine that is slow for a while must not make the lengths look dear that happened to be tried then. So its speed
    is followed too, by how long passes take beside the usual for their length, and each is kept as if it had been even.
    """

    def __init__(self) -> None:
        self._latest: dict[int, Latest] = {}  # logarithms of seconds at an even speed, by drafted tokens
        self._level = 0.0  # logarithm of how slow the machine is now
        self._passes = 0
        self._relative: list[float] = []

    def add(self, drafted: int, seconds: float) -> None:
        even = math.log(max(seconds, 1e-9)) - self._level
        latest = self._latest.setdefault(drafted, Latest())
        if len(latest.values) >= TRIES:
            change = LEVEL * max(-OUTLIER, min(OUTLIER, even - latest.median))
            self._level += change
            even -= change
        latest.add(even)
        self._passes += 1
        if self._passes % RENEWED == 0 or len(latest.values) <= TRIES:
            self._relative = []

    def knows(self, drafted: int) -> bool:
        return drafted in self._latest

    def up_to(self, longest: int) -> list[float]:
        """Expected seconds for 0 .. longest at an even speed; in arbitrary units before any pass was measured."""
        known = sorted((length, math.exp(latest.median)) for length, latest in self._latest.items())
        return [_on_line(known or [(0, 1.0)], drafted) for drafted in range(longest + 1)]

    def relative(self, longest: int) -> list[float]:
        """Times for 0 .. longest in passes that draft nothing."""
        if len(self._relative) <= longest:
            seconds = self.up_to(longest)
            self._relative = [each / seconds[0] for each in seconds]
        return self._relative[: longest + 1]


class Latest:
    """The latest values with their median."""

    def __init__(self) -> None:
        self.values: deque[float] = deque()
        self._ascending: list[float] = []

    def add(self, value: float) -> None:
        if len(self.values) == LATEST:
            del self._ascending[bisect_left(self._ascending, self.values.popleft())]
        self.values.append(value)
        insort(self._ascending, value)

    @property
    def median(self) -> float:
        n = len(self._ascending)
        return (self._ascending[(n - 1) // 2] + self._ascending[n // 2]) / 2


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
