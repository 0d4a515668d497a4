"""Randomised probability integral transform: are tokens draws from the laws they are said to come from?

For a token x with law p, an ordering of the vocabulary that depends on the prefix alone, and V ~ Uniform(0, 1) of the
auditor's own, U = p(all before x) + V p(x). If x ~ p, then given the past U is uniform, so positions with different
laws pool into one sample. Three orderings, because a bias shows only where it has a common direction: descending p/q,
where q is the law of whoever may have been leaned on; descending p; and the ids (theory.md section 8c).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy import stats
from torch import Tensor

BINS = 32
LAG_BINS = 8
PER_CELL = 5  # expected counts from which a chi-square statistic follows its law well enough
RARE = 100  # variance of the overlap count below which its law is not normal in the tail
LEVEL = 1e-3  # of a false alarm, for all p-values together
POWER = 0.9
RATIO, PROBABILITY, ID = "p / q", "p", "id"
ORDERINGS = (RATIO, PROBABILITY, ID)


@dataclass
class Uniforms:
    """U of every token under every ordering, and whether it lies where q exceeds p.

    Args:
        seed: of the auditor's V; never the seed of what is audited.
    """

    seed: int
    u: dict[str, list[float]] = field(default_factory=lambda: {ordering: [] for ordering in ORDERINGS})
    inside: list[bool] = field(default_factory=list)  # x lies in L = {y: q(y) > p(y)}
    mass: list[float] = field(default_factory=list)  # p(L)
    request: list[int] = field(default_factory=list)
    drafted: int = 0  # tokens with a q of their own

    def __post_init__(self) -> None:
        self._random = np.random.default_rng([self.seed, 0x5EC])

    def __len__(self) -> int:
        return len(self.mass)

    def add(self, x: int, p: Tensor, q: Tensor | int | None, request: int = 0) -> None:
        """One token.

        Args:
            x: the emitted id.
            p: [V] the law it is said to come from.
            q: [V] the law of whoever may have been leaned on, an id for a one-hot one. None where there was nobody:
                p at twice its temperature stands in, as most drafts are less sure than their target.
            request: tokens of one request follow each other in time.
        """
        p = p.double()
        own = float(self._random.random()) * p[x].item()
        larger = (p > p[x]) | _ties(p == p[x], x)
        self.u[PROBABILITY].append(_mass(p, larger) + own)
        self.u[ID].append(p[:x].sum().item() + own)
        if q is None:  # p / q falls with p, and q > p where p is below a bound
            self.u[RATIO].append(self.u[PROBABILITY][-1])
            leaned = p < p.sqrt().sum() ** -2
            inside, mass = bool(leaned[x]), _mass(p, leaned)
        elif isinstance(q, int):
            before = 1 - p[q].item() if x == q else p[:x].sum().item() - (p[q].item() if q < x else 0.0)
            self.u[RATIO].append(before + own)
            inside, mass = x == q, p[q].item()
        else:
            q = q.to(p)
            ratio = torch.where(q > 0, p / q, torch.inf)
            self.u[RATIO].append(_mass(p, (ratio > ratio[x]) | _ties(ratio == ratio[x], x)) + own)
            leaned = q > p
            inside, mass = bool(leaned[x]), _mass(p, leaned)
        self.inside.append(inside)
        self.mass.append(min(1.0, mass))
        self.request.append(request)
        self.drafted += q is not None

    @property
    def orderings(self) -> tuple[str, ...]:
        """Those that differ from each other."""
        return ORDERINGS if self.drafted else (PROBABILITY, ID)

    def histograms(self) -> dict[str, list[int]]:
        """By ordering, the counts of U in 32 equal bins."""
        return {name: np.histogram(self.u[name], BINS, (0, 1))[0].tolist() for name in self.orderings}


@dataclass(frozen=True)
class PValue:
    """ordering: of the vocabulary. statistic: its name, with its value. p: before correction for the other tests."""

    ordering: str
    statistic: str
    value: float
    p: float

    def record(self, tests: int) -> dict[str, Any]:
        return {**self.__dict__, "p_corrected": min(1.0, self.p * tests)}


def battery(uniforms: Uniforms) -> list[PValue]:
    """Per ordering: 32 bins, Anderson-Darling, dependence on the token before; leaning towards q; shared streams."""
    found = []
    for ordering in uniforms.orderings:
        u = np.clip(np.array(uniforms.u[ordering]), 1e-12, 1 - 1e-12)
        found += [
            PValue(ordering, "chi-square", *chi_square(u)),
            PValue(ordering, "Anderson-Darling", *anderson_darling(u)),
            PValue(ordering, "lag 1", *lag_one(u, np.array(uniforms.request))),
        ]
    return [
        *found,
        PValue(RATIO, "overlap z", *overlap(uniforms)),
        PValue(ID, "across requests", *shared_streams(uniforms)),
    ]


def chi_square(u: np.ndarray) -> tuple[float, float]:
    """Counts in 32 equal bins against n / 32; silent where that is too few."""
    if len(u) < PER_CELL * BINS:
        return 0.0, 1.0
    counts = np.histogram(u, BINS, (0, 1))[0]
    value = float(((counts - len(u) / BINS) ** 2).sum() / (len(u) / BINS))
    return value, float(stats.chi2.sf(value, BINS - 1))


def anderson_darling(u: np.ndarray) -> tuple[float, float]:
    """A2 against the uniform law, with its limiting law (Marsaglia and Marsaglia, J. Stat. Softw. 9(2), 2004)."""
    n = len(u)
    if not n:
        return 0.0, 1.0
    ordered = np.sort(u)
    weights = 2 * np.arange(1, n + 1) - 1
    value = float(-n - (weights * (np.log(ordered) + np.log1p(-ordered[::-1]))).sum() / n)
    return value, anderson_darling_tail(value)


def anderson_darling_tail(z: float) -> float:
    """P(A2 > z) in the limit of many observations."""
    if z <= 0:
        return 1.0
    if z < 2:
        series = 2.00012 + (0.247105 - (0.0649821 - (0.0347962 - (0.011672 - 0.00168691 * z) * z) * z) * z) * z
        return 1 - math.exp(-1.2337141 / z) / math.sqrt(z) * series
    if z > 8:  # where one term of the limiting sum is left: A2 ~ sum of chi-squares over j (j + 1)
        return float(math.sqrt(3) * stats.chi2.sf(2 * z, 1))
    inner = 1.0776 - (2.30695 - (0.43424 - (0.082433 - (0.008056 - 0.0003146 * z) * z) * z) * z) * z
    return -math.expm1(-math.exp(inner))


def lag_one(u: np.ndarray, request: np.ndarray) -> tuple[float, float]:
    """8 x 8 table of neighbours inside requests, chi-square against its own margins (49 degrees of freedom).

    Silent where there are too few pairs for so many cells.
    """
    bins = np.minimum((u * LAG_BINS).astype(int), LAG_BINS - 1)
    together = request[1:] == request[:-1]
    if together.sum() < PER_CELL * LAG_BINS**2:
        return 0.0, 1.0
    table = np.zeros((LAG_BINS, LAG_BINS))
    np.add.at(table, (bins[:-1][together], bins[1:][together]), 1)
    expected = np.outer(table.sum(1), table.sum(0)) / max(table.sum(), 1)
    value = float(np.divide((table - expected) ** 2, expected, where=expected > 0, out=np.zeros_like(table)).sum())
    return value, float(stats.chi2.sf(value, (LAG_BINS - 1) ** 2))


def overlap(uniforms: Uniforms) -> tuple[float, float]:
    """z of the tokens that lie where q exceeds p, against the mass p has there; two-sided.

    Where few are expected the tail is that of the count itself, a sum of unequal coins, not the normal one.
    """
    mass = np.array(uniforms.mass)
    variance = float((mass * (1 - mass)).sum())
    count = sum(uniforms.inside)
    z = (count - float(mass.sum())) / math.sqrt(variance) if variance > 0 else 0.0
    if variance >= RARE:
        return z, float(2 * stats.norm.sf(abs(z)))
    return z, min(1.0, 2 * rare_tail(mass, count))


def rare_tail(mass: np.ndarray, count: int) -> float:
    """The smaller of P(N <= count) and P(N >= count) for a sum N of coins of the given masses."""
    law = np.ones(1)
    for m in mass[(mass > 1e-12) & (mass < 1 - 1e-12)]:
        law = np.convolve(law, (1 - m, m))
        law = law[: np.flatnonzero(law > 1e-30)[-1] + 1]  # what is cut off changes no tail that decides
    count -= int((mass >= 1 - 1e-12).sum())
    return float(min(law[: max(0, count + 1)].sum(), law[max(0, count) :].sum()))


def shared_streams(uniforms: Uniforms) -> tuple[float, float]:
    """Requests with one random stream move together: chi-square of the means at equal places over all requests.

    At each place with n requests the standardised sum of U is nearly normal, or less wide for few; the squares of all
    places add up to a chi-square with as many degrees of freedom as there are places.
    """
    centred = (np.array(uniforms.u[ID]) - 0.5) * math.sqrt(12)
    lengths = np.unique(np.array(uniforms.request, dtype=int), return_counts=True)[1]
    place = np.concatenate([np.arange(0), *(np.arange(n) for n in lengths)])
    n = np.bincount(place)
    several = n > 1
    value = float((np.bincount(place, centred)[several] ** 2 / n[several]).sum())
    return value, float(stats.chi2.sf(value, several.sum())) if several.any() else 1.0


def smallest_detectable(uniforms: Uniforms, tests: int) -> float:
    """The mean total-variation bias towards q that these tokens would have shown with 90 % probability, at most 1.

    Never less than what a handful of tokens out of place amount to, however sure the laws are of theirs.
    """
    if not len(uniforms):
        return 1.0
    reach, n = _reach(tests), len(uniforms)
    return min(1.0, max(reach * math.sqrt(_variance(uniforms) / n), reach**2 / (3 * n)))


def tokens_needed(uniforms: Uniforms, tests: int, bias: float) -> int:
    """How many tokens like these show a mean total-variation bias of that size."""
    reach = _reach(tests)
    return math.ceil(max(_variance(uniforms) * (reach / bias) ** 2, reach**2 / (3 * bias)))


def _variance(uniforms: Uniforms) -> float:
    mass = np.array(uniforms.mass)
    return float((mass * (1 - mass)).mean())


def _reach(tests: int) -> float:
    """Standard errors between no bias and one that is found: 5.17 for ten tests."""
    return float(stats.norm.isf(LEVEL / tests / 2) + stats.norm.isf(1 - POWER))


def _ties(equal: Tensor, x: int) -> Tensor:
    """Of those that rank with x, the ones of lower id."""
    equal = equal.clone()
    equal[x:] = False
    return equal


def _mass(p: Tensor, where: Tensor) -> float:
    return p[where].sum().item()
