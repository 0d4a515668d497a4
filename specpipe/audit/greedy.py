"""Greedy identity: is each emitted token the one that plain greedy decoding emits? (theory.md section 8b)

The emitted text is read again one token a pass, and each token compared with the best one behind its own prefix: texts
are not compared past a first difference, where they stand on different prefixes. In half precision passes of different
widths round differently, so nearly equal logits may change places; each difference is listed with its gap.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import torch
from scipy.stats import binom
from torch import Tensor

from specpipe.audit.finding import FAILED, PASSED, TOO_LITTLE, Finding
from specpipe.audit.reading import Answer, logits_of
from specpipe.audit.rounding import rounding_margin
from specpipe.audit.uniformity import LEVEL
from specpipe.distribution import Prefix, adjusted
from specpipe.settings import GenerationSettings

ENOUGH = 100  # tokens


class GreedyIdentity:
    """Compares greedy tokens with the best ones of plain passes; `finding` decides.

    Args:
        verifier: the target.
        settings: biases, penalties and bans under which the tokens were chosen; what concerns drawing is not looked at.
        stop_ids: that end a request under them.
        width: of the passes the texts were decoded with, the extra token included. The texts are read a second time
            with it: a gap of more than twice the largest move of two best logits is no near-tie. None: not known.
    """

    def __init__(
        self, verifier: Any, settings: GenerationSettings, stop_ids: frozenset[int], width: int | None = None
    ) -> None:
        self._verifier, self._settings, self._stop_ids, self._width = verifier, settings, stop_ids, width
        self._requests = self._tokens = 0
        self._moved = 0.0
        self._differences: list[dict[str, Any]] = []
        self._leads: list[tuple[float, float]] = []  # of each place: gap of the two best, margin of rounding
        self._dtype = ""

    def add(self, answers: Items[Answer], advance: Callable[[int], None] = lambda tokens: None) -> None:
        """Judge some texts, read together. `advance` is told how many more tokens were read."""
        narrow = self._rows(answers, 1, advance)
        if self._width is not None and self._width > 1:
            wide = self._rows(answers, self._width, lambda tokens: None)
            self._moved = max([self._moved, *(_move(a, b) for a, b in zip(narrow, wide, strict=True) if len(a))])
        for answer, rows in zip(answers, narrow, strict=True):
            self._judge(answer, rows)

    def finding(self) -> Finding:
        """Failed, passed, or fewer than ENOUGH tokens."""
        for each in self._differences:
            each["near_tie"] = each["gap"] <= self._allowed(each["margin"])
        unexplained = [each for each in self._differences if not each["near_tie"]]
        ties = sum(gap <= self._allowed(margin) for gap, margin in self._leads)
        near = len(self._differences) - len(unexplained)
        # Rounding favours neither of two tied tokens: more than half of all ties are lost by chance alone, or not so.
        by_chance = float(binom.sf(near - 1, ties, 0.5)) if near else 1.0
        numbers = {
            "requests": self._requests,
            "tokens": self._tokens,
            "identical_requests": self._requests - len({each["request"] for each in self._differences}),
            "differences": self._differences,
            "unexplained": len(unexplained),
            "near_ties": ties,
            "p_near_ties": by_chance,
            "largest_gap": max((each["gap"] for each in self._differences), default=0.0),
            "largest_move": self._moved if self._width is not None else None,
            "dtype": self._dtype,
        }
        failed = bool(unexplained) or by_chance < LEVEL
        result = FAILED if failed else PASSED if self._tokens >= ENOUGH else TOO_LITTLE
        return Finding("greedy identity", result, _reason(numbers), numbers)

    def _judge(self, answer: Answer, rows: Tensor) -> None:
        """rows: [n, V] logits in front of each output token."""
        before = Prefix(answer.prompt, (), self._stop_ids)
        for t, x in enumerate(answer.output):
            scores = adjusted(rows[t], self._settings, before.then(answer.output[:t])).double()
            first, second = scores.topk(2).values.tolist()
            self._leads.append((first - second, rounding_margin(rows[t])))
            if (best := int(scores.argmax())) != x:
                gap = (scores[best] - scores[x]).item()
                where = {"request": self._requests, "position": t, "emitted": x, "best": best}
                self._differences.append({**where, "gap": gap, "margin": self._leads[-1][1]})
        self._dtype = str(rows.dtype).removeprefix("torch.")
        self._tokens += len(answer.output)
        self._requests += 1

    def _allowed(self, margin: float) -> float:
        return margin if self._width is None else min(margin, 2 * self._moved)

    def _rows(self, answers: Items[Answer], width: int, advance: Callable[[int], None]) -> list[Tensor]:
        """For each answer [n, V] logits in front of its n output tokens, in the model's precision."""
        parts: list[list[Tensor]] = [[torch.zeros(0, self._verifier.target.vocabulary)] for _ in answers]
        for rows in logits_of(self._verifier, answers, width):
            for part, new in zip(parts, rows, strict=True):
                part.append(new)
            advance(sum(len(new) for new in rows))
        return [torch.cat(part[1:] or part) for part in parts]


def _move(narrow: Tensor, wide: Tensor) -> float:
    """How far the two best logits of each row of `narrow`, [n, V], lie from where `wide` has them, at most."""
    best = narrow.topk(2).indices
    return (narrow.gather(-1, best) - wide.gather(-1, best)).abs().max().item()


def _reason(numbers: dict[str, Any]) -> str:
    tokens, differences, gap = numbers["tokens"], len(numbers["differences"]), f"{numbers['largest_gap']:.3g}"
    if numbers["unexplained"]:
        return f"{numbers['unexplained']} of {tokens} tokens are not the target's own choice; largest gap {gap}."
    if differences and numbers["p_near_ties"] < LEVEL:
        lost = f"{differences} of {numbers['near_ties']} near-ties did not go to the best token"
        return f"{lost}: rounding alone would lose half of them (p = {numbers['p_near_ties']:.2g})."
    if differences:
        return (
            f"{tokens - differences} of {tokens} tokens are the target's own choice, {differences} are near-ties in "
            f"{numbers['dtype']} (largest gap of the logits {gap})."
        )
    few = "" if tokens >= ENOUGH else f"; it takes {ENOUGH}: more prompts, or longer answers (max_new_tokens)"
    return f"all {tokens} tokens are the target's own choice{few}."
