"""Acceptance rules with one thing wrong each, and shared random numbers: what every proof of the law must refuse."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specpipe import distribution
from specpipe.chance import Chance
from specpipe.distribution import Rows
from specpipe.samplers.block import Block, excess, running_log_ratios, stands
from specpipe.samplers.exact_match import ExactMatch
from specpipe.samplers.rejection import Rejection, residual

Ratio = Callable[[float, float], "tuple[float, float]"]
Law = Callable[[Tensor, Tensor], Tensor]


def as_rows(x: list[int], p: Rows, q: Tensor | None) -> Tensor:
    """q [k, V], one-hot at the drafts where there is none."""
    return torch.eye(len(p[0]), dtype=torch.float64)[x] if q is None else q


def largest(law: Tensor) -> Tensor:
    return torch.eye(len(law), dtype=torch.float64)[int(law.argmax())]


class TokenRule(Rejection):
    """The token-level rule with its ratio, its correction or its bonus replaced. All three given right: right."""

    def __init__(
        self,
        *,
        ratio: Ratio = lambda p, q: (p, q),
        correction: Law = residual,
        bonus: Callable[[Rows, int, Tensor], Tensor] = lambda p, k, q: p[k],
    ) -> None:
        self.ratio, self.correction, self.bonus = ratio, correction, bonus

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        q = as_rows(x, p, q)
        for i, token in enumerate(x):
            if not chance.passes(*self.ratio(p[i][token].item(), q[i, token].item())):
                return i, chance.draw(self.correction(p[i], q[i]))
        return len(x), chance.draw(self.bonus(p, len(x), q))


# theory.md section 2, by the names used there.
TOKEN_RULES: dict[str, TokenRule] = {
    "right": TokenRule(),
    "correction from p": TokenRule(correction=lambda p, q: p),
    "correction from q": TokenRule(correction=lambda p, q: q),
    "correction = argmax of p": TokenRule(correction=lambda p, q: largest(p)),
    "correction = argmax of the residual": TokenRule(correction=lambda p, q: largest(residual(p, q))),
    "residual |p-q|": TokenRule(correction=lambda p, q: (p - q).abs()),
    "accept everything": TokenRule(ratio=lambda p, q: (1.0, 1.0)),
    "min(1, q/p)": TokenRule(ratio=lambda p, q: (q, p)),
    "accept iff p >= q": TokenRule(ratio=lambda p, q: (float(p >= q - 1e-12), 1.0)),
    "accept with p(x), residual (p-q)+": TokenRule(ratio=lambda p, q: (p, 1.0)),
    "min(1, 2p/q)": TokenRule(ratio=lambda p, q: (2 * p, q)),
    "bonus from q": TokenRule(bonus=lambda p, k, q: q[k - 1] if k else p[0]),
    "bonus from the previous row": TokenRule(bonus=lambda p, k, q: p[max(0, k - 1)]),
}


class SoftRatio(Rejection):
    """C1: a deterministic draft judged as if it had been drawn from the soft law that `soft` gives."""

    def __init__(self, soft: Callable[[int], Tensor]) -> None:
        self.soft = soft

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        laws = [self.soft(token) for token in x]
        return super().accept(x, p, torch.stack(laws) if laws else None, chance)


class SecondChance(Rejection):
    """Looks at the next draft after a rejection."""

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        rows = as_rows(x, p, q)
        kept = 0
        for i, token in enumerate(x):
            if chance.passes(p[i][token].item(), rows[i, token].item()):
                kept = i + 1
        return kept, chance.draw(p[kept] if kept == len(x) else residual(p[kept], rows[kept]))


class ShiftedRow(Rejection):
    """C8: draft i is judged by the row behind it."""

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        rows = as_rows(x, p, q)
        for i, token in enumerate(x):
            if not chance.passes(p[i + 1][token].item(), rows[i, token].item()):
                return i, chance.draw(residual(p[i + 1], rows[i]))
        return len(x), chance.draw(p[len(x)])


class ResidualOfAnotherRow(Rejection):
    """The correction comes from the row of the first draft, whichever was rejected."""

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        rows = as_rows(x, p, q)
        for i, token in enumerate(x):
            if not chance.passes(p[i][token].item(), rows[i, token].item()):
                return i, chance.draw(residual(p[0], rows[0]))
        return len(x), chance.draw(p[len(x)])


class InPlace(Rejection):
    """C11: the draft token is removed from the shared row of p."""

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        for i, token in enumerate(x):
            accepted = chance.passes(p[i][token].item(), 1.0)
            for row in range(len(x) + 1):
                p[row][token] = 0.0
            if not accepted:
                return i, chance.draw(p[i])
        return len(x), chance.draw(p[len(x)])


class OtherSettings(Rejection):
    """The target's laws under other settings than the request's; of the bonus row only, if so wished."""

    def __init__(self, bonus_only: bool = False, **changed: Any) -> None:
        self.bonus_only, self.changed = bonus_only, changed

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        settings = distribution.GenerationSettings(**(plain_settings(p._settings) | self.changed))
        other = Rows(p._logits, settings, p._prefix, p._drafts)
        if not self.bonus_only:
            return super().accept(x, other, q, chance)
        return TokenRule(bonus=lambda p, k, q: other[k]).accept(x, p, q, chance)


class FrozenPrefix(Rejection):
    """Penalties and bans frozen at the start of the step: every row sees what the first one sees."""

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        return super().accept(x, Rows(p._logits, p._settings, p._prefix), q, chance)


class Redraw(ExactMatch):
    """C5: emits a fresh draw from p on a mismatch."""

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        n, y = super().accept(x, p, q, chance)
        return (n, y) if n == len(x) else (n, chance.draw(p[n]))


def plain_settings(settings: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(settings).items() if value != ()}


# ---- block verification, theory.md section 4 ----


class TokenResidual(Block):
    def accept(self, x: list[int], p: Rows, q: Tensor, chance: Chance) -> tuple[int, int]:  # type: ignore[override]
        log_w = running_log_ratios(x, p, q)
        n = next((i for i in range(len(x), 0, -1) if stands(i, log_w[i], p, q, chance)), 0)
        return n, chance.draw(p[n] if n == len(x) else residual(p[n], q[n]))


class BlockResidual(Rejection):
    def accept(self, x: list[int], p: Rows, q: Tensor, chance: Chance) -> tuple[int, int]:  # type: ignore[override]
        log_w = running_log_ratios(x, p, q)
        for i, token in enumerate(x):
            if not chance.passes(p[i][token].item(), q[i, token].item()):
                return i, chance.draw(excess(p[i], q[i], log_w[i]))
        return len(x), chance.draw(p[len(x)])


class Unclipped(Block):
    def accept(self, x: list[int], p: Rows, q: Tensor, chance: Chance) -> tuple[int, int]:  # type: ignore[override]
        log_w, total = [0.0], 0.0
        for i, token in enumerate(x):
            p_x = p[i][token].item()
            total += math.log(p_x / q[i, token].item()) if p_x else -math.inf
            log_w.append(min(0.0, total))
        n = next((i for i in range(len(x), 0, -1) if stands(i, log_w[i], p, q, chance)), 0)
        return n, chance.draw(p[n] if n == len(x) else excess(p[n], q[n], log_w[n]))


class WhileBelowW(Block):
    def accept(self, x: list[int], p: Rows, q: Tensor, chance: Chance) -> tuple[int, int]:  # type: ignore[override]
        log_w = running_log_ratios(x, p, q)
        n = next((i for i in range(len(x)) if not chance.passes(math.exp(log_w[i + 1]), 1.0)), len(x))
        return n, chance.draw(p[n] if n == len(x) else residual(p[n], q[n]))


class LastBelowW(Block):
    def accept(self, x: list[int], p: Rows, q: Tensor, chance: Chance) -> tuple[int, int]:  # type: ignore[override]
        log_w = running_log_ratios(x, p, q)
        n = next((i for i in range(len(x), 0, -1) if chance.passes(math.exp(log_w[i]), 1.0)), 0)
        return n, chance.draw(p[n] if n == len(x) else excess(p[n], q[n], log_w[n]))


class UniformProducts(Block):
    """The largest i with w_i >= u_1 ... u_i. For up to two drafts, by its probabilities."""

    def accept(self, x: list[int], p: Rows, q: Tensor, chance: Chance) -> tuple[int, int]:  # type: ignore[override]
        one, both = ([math.exp(log_w) for log_w in running_log_ratios(x, p, q)] + [0.0, 0.0])[1:3]
        two = both * (1 - math.log(both)) if both else 0.0
        first = one if not both else max(0.0, one - both - both * math.log(one / both)) if one > both else 0.0
        n = 2 if chance.passes(two, 1.0) else int(chance.passes(first, 1 - two))
        return n, chance.draw(p[n] if n == len(x) else residual(p[n], q[n]))


class FirstFailure(Block):
    def accept(self, x: list[int], p: Rows, q: Tensor, chance: Chance) -> tuple[int, int]:  # type: ignore[override]
        log_w = running_log_ratios(x, p, q)
        n = next((i for i in range(len(x)) if not stands(i + 1, log_w[i + 1], p, q, chance)), len(x))
        return n, chance.draw(p[n] if n == len(x) else excess(p[n], q[n], log_w[n]))


# ---- shared random numbers: the rule is right, the streams are not independent ----


class OneNoise(Chance):
    """One Gumbel noise per place, for its draft and for its correction."""

    def __init__(self, seed: int, prompt_ids: Any = (), repeat: int = 0) -> None:
        super().__init__(seed, prompt_ids, repeat)
        self._generator = torch.Generator().manual_seed(hash((seed, repeat, *prompt_ids)) % 2**63)
        self._noises: list[Tensor] = []
        self._judged = 0

    def propose(self, q: Tensor) -> int:
        self._noises.append(self._noise(q))
        return int((q.log() + self._noises[-1]).argmax())

    def passes(self, p: float, q: float) -> bool:
        self._judged += 1
        self._passed = super().passes(p, q)
        return self._passed

    def draw(self, law: Tensor) -> int:
        corrected = self._judged and not self._passed
        noise = self._noises[self._judged - 1] if corrected else self._noise(law)
        self._noises, self._judged = [], 0
        return int((law.log() + noise).argmax())

    def _noise(self, law: Tensor) -> Tensor:
        return -torch.empty_like(law).exponential_(generator=self._generator).log()


class Reused(Chance):
    """One draw in ten repeats the uniform of the draw before."""

    def __init__(self, seed: int, prompt_ids: Any = (), repeat: int = 0) -> None:
        super().__init__(seed, prompt_ids, repeat)
        self._last = 0.5

    def draw(self, law: Tensor) -> int:
        if self._accepting.random() >= 0.1:
            self._last = self._drawing.random()
        return distribution.draw(law, self._last)
