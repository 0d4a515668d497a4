"""The law of what leaves the pipeline, by exploring every random decision: exactly the target's, or the test fails.

Each claim is also put to deliberately wrong samplers, which it must refuse.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specpipe.chance import Chance
from specpipe.distribution import Rows
from specpipe.samplers.rejection import Rejection, residual
from specpipe.settings import GenerationSettings
from tests.stand_ins import (
    Drawn,
    Rule,
    Scripted,
    constant,
    largest_difference,
    output_law,
    pipeline_of,
    table,
    target_law,
    total_variation,
)

V, N = 3, 4
PROMPT = [1, 0]
P = table(V, seed=1)
FULL = table(V, seed=3, zeros=0)  # every token has mass, so that banning one leaves some
Q = table(V, seed=2)
SETTINGS = {
    "T=1": {"temperature": 1.0},
    "T=0.7": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top-k": {"temperature": 1.0, "top_k": 2},
    "nucleus": {"temperature": 1.0, "top_p": 0.73},
    "min-p": {"temperature": 1.0, "min_p": 0.4},
    "typical": {"temperature": 1.0, "typical_p": 0.6},
    "repetition penalty": {"temperature": 1.0, "repetition_penalty": 1.5},
    "frequency and presence penalty": {"temperature": 1.0, "frequency_penalty": 0.5, "presence_penalty": -0.3},
    "bias": {"temperature": 1.0, "logit_bias": {0: 0.7, 2: -0.4}},
    "banned id": {"temperature": 1.0, "banned_token_ids": [1]},
    "stop id": {"temperature": 1.0, "stop_token_ids": [1]},
    "stop id, not before 3 tokens": {"temperature": 1.0, "stop_token_ids": [1], "min_new_tokens": 3},
    "all": {
        "temperature": 1.3,
        "top_k": 2,
        "top_p": 0.9,
        "min_p": 0.05,
        "typical_p": 0.95,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "logit_bias": {0: 0.5},
        "stop_token_ids": [2],
        "min_new_tokens": 2,
    },
    "greedy with penalties": {"temperature": 0.0, "frequency_penalty": 0.6, "repetition_penalty": 1.3},
}
PROPOSERS = {
    "soft q": Drawn(Q, V),
    "one-hot q": Scripted(lambda tokens, k: [(sum(tokens) + i) % V for i in range(k)]),
    "one-hot q, ragged": Scripted(lambda tokens, k: [(sum(tokens) + i) % V for i in range(sum(tokens) % (k + 1))]),
    "nothing": Scripted(lambda tokens, k: []),
}


def error(proposer: object, sampler: object, gamma: int, settings: dict[str, Any], rule: Rule = P) -> float:
    pipeline = pipeline_of(rule, V, proposer, gamma=gamma, sampler=sampler, **settings)
    wanted = target_law(rule, PROMPT, N, GenerationSettings(**settings))
    return largest_difference(output_law(pipeline, PROMPT, N), wanted)


@pytest.mark.parametrize("gamma", [1, 2, 3])
@pytest.mark.parametrize("name", PROPOSERS)
def test_output_has_exactly_the_targets_law(name: str, gamma: int) -> None:
    """C1, C3, C9: soft and one-hot q, context-dependent p and q with zeros, joint law of the first four tokens."""
    assert error(PROPOSERS[name], Rejection(), gamma, SETTINGS["T=1"]) <= 1e-12


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", ["soft q", "one-hot q"])
def test_output_has_the_targets_law_under_every_setting(name: str, settings: str) -> None:
    """C14-C16: the proposer need not know the settings; the law that is kept is the target's under them."""
    assert error(PROPOSERS[name], Rejection(), 2, SETTINGS[settings], FULL) <= 1e-12


class FrozenPrefix(Rejection):
    """Penalties and bans frozen at the start of the step: every row sees what the first one sees."""

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        return super().accept(x, Rows(p._logits, p._settings, p._prefix), q, chance)


@pytest.mark.parametrize(
    "settings", ["repetition penalty", "frequency and presence penalty", "stop id, not before 3 tokens", "all"]
)
def test_settings_frozen_at_the_step_start_are_caught(settings: str) -> None:
    """C38, C39: penalties and min_new_tokens see the exact prefix at each place of a block."""
    assert error(PROPOSERS["soft q"], FrozenPrefix(), 2, SETTINGS[settings], FULL) > 1e-3


# ---- wrong rules ----


class NoExclusion(Rejection):
    """C3: the correction is drawn from p, the draft token included."""

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        for i, token in enumerate(x):
            if not chance.passes(p[i][token].item(), 1.0 if q is None else q[i, token].item()):
                return i, chance.draw(p[i])
        return len(x), chance.draw(p[len(x)])


class Inverted(Rejection):
    """Accepts with min(1, q/p)."""

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        for i, token in enumerate(x):
            q_x = 1.0 if q is None else q[i, token].item()
            if p[i][token] == 0 or not chance.passes(q_x, p[i][token].item()):
                return i, chance.draw(residual(p[i], token if q is None else q[i]))
        return len(x), chance.draw(p[len(x)])


class SecondChance(Rejection):
    """Looks at the next draft after a rejection."""

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        kept = 0
        for i, token in enumerate(x):
            if chance.passes(p[i][token].item(), 1.0 if q is None else q[i, token].item()):
                kept = i + 1
        if kept == len(x):
            return kept, chance.draw(p[kept])
        return kept, chance.draw(residual(p[kept], x[kept] if q is None else q[kept]))


class ShiftedRow(Rejection):
    """C8: draft i is judged by the row behind it."""

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        for i, token in enumerate(x):
            if not chance.passes(p[i + 1][token].item(), 1.0 if q is None else q[i, token].item()):
                return i, chance.draw(residual(p[i + 1], token if q is None else q[i]))
        return len(x), chance.draw(p[len(x)])


class BonusFromLastJudged(Rejection):
    """C9: the bonus token comes from the row of the last draft."""

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        n, y = super().accept(x, p, q, chance)
        return (n, y) if n < len(x) or n == 0 else (n, chance.draw(p[n - 1]))


class AcceptEverything(Rejection):
    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        return len(x), chance.draw(p[len(x)])


class SoftRatioForArgmax(Rejection):
    """C1: a deterministic draft judged as if it had been drawn from a soft law."""

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        soft = torch.full((len(x), V), 0.2, dtype=torch.float64)
        soft[range(len(x)), x] = 0.6
        return super().accept(x, p, soft, chance)


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


WRONG = {
    "soft q": [NoExclusion, Inverted, SecondChance, ShiftedRow, BonusFromLastJudged, AcceptEverything],
    "one-hot q": [NoExclusion, Inverted, SecondChance, ShiftedRow, BonusFromLastJudged, SoftRatioForArgmax],
}


@pytest.mark.parametrize(("name", "wrong"), [(name, wrong) for name, rules in WRONG.items() for wrong in rules])
def test_a_wrong_rule_is_caught(name: str, wrong: type[Rejection]) -> None:
    assert error(PROPOSERS[name], wrong(), 2, SETTINGS["T=1"]) > 1e-3


def test_a_row_changed_in_place_is_caught() -> None:
    """C11: repeated drafts: the right rule leaves the second row whole, the wrong one does not."""
    p = constant([0.5, 0.3, 0.2])
    zeros = Scripted(lambda tokens, k: [0] * k)
    wanted = target_law(p, PROMPT, 2, GenerationSettings(temperature=1.0))
    laws = {
        sampler: output_law(pipeline_of(p, V, zeros, gamma=2, sampler=sampler(), temperature=1.0), PROMPT, 2)
        for sampler in (Rejection, InPlace)
    }
    assert total_variation(laws[Rejection], wanted) <= 1e-12
    assert total_variation(laws[InPlace], wanted) > 0.2


# ---- the worked examples ----

P3 = ([0.5, 0.3, 0.2], [0.6, 0.3, 0.1])
P4 = ([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4])


def first_token_law(p: list[float], q: list[float], sampler: Rejection) -> list[float]:
    pipeline = pipeline_of(constant(p), len(p), Drawn(constant(q), len(p)), gamma=1, sampler=sampler, temperature=1.0)
    law = output_law(pipeline, [0], 1)
    return [law.get((x,), 0.0) for x in range(len(p))]


class ResidualAbsolute(Rejection):
    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        assert q is not None
        for i, token in enumerate(x):
            if not chance.passes(p[i][token].item(), q[i, token].item()):
                return i, chance.draw((p[i] - q[i]).abs())
        return len(x), chance.draw(p[len(x)])


class ResidualFromQ(Rejection):
    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        assert q is not None
        for i, token in enumerate(x):
            if not chance.passes(p[i][token].item(), q[i, token].item()):
                return i, chance.draw(q[i])
        return len(x), chance.draw(p[len(x)])


class Lenient(Rejection):
    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        assert q is not None
        for i, token in enumerate(x):
            if not chance.passes(2 * p[i][token].item(), q[i, token].item()):
                return i, chance.draw(residual(p[i], q[i]))
        return len(x), chance.draw(p[len(x)])


@pytest.mark.parametrize(
    ("rule", "on_p3", "on_p4"),
    [
        (Rejection, P3[0], P4[0]),
        (NoExclusion, [0.55, 0.33, 0.12], [0.26, 0.32, 0.28, 0.14]),
        (ResidualFromQ, [0.56, 0.33, 0.11], [0.14, 0.28, 0.32, 0.26]),
        (ResidualAbsolute, [0.55, 0.3, 0.15], [0.25, 0.25, 0.25, 0.25]),
        (AcceptEverything, P3[1], P4[1]),
        (Inverted, [0.6, 0.3, 0.1], [0.13125, 0.16875, 0.3, 0.4]),
        (Lenient, [0.6, 0.3, 0.1], [0.25, 0.25, 0.3, 0.2]),
    ],
)
def test_worked_examples_to_the_digit(rule: type[Rejection], on_p3: list[float], on_p4: list[float]) -> None:
    """theory.md section 2: the right rule gives p; each wrong one gives the law computed for it there."""
    assert first_token_law(*P3, rule()) == pytest.approx(on_p3, abs=1e-12)
    assert first_token_law(*P4, rule()) == pytest.approx(on_p4, abs=1e-12)


def test_expected_acceptance_of_p3() -> None:
    """C5 and the case book's words: with k drafts .9, 1.71, 2.439, 3.0951 are accepted on average."""
    for k, wanted in enumerate([0.9, 1.71, 2.439, 3.0951], 1):
        pipeline = pipeline_of(constant(P3[0]), V, Drawn(constant(P3[1]), V), gamma=k, temperature=1.0)
        assert expected_accepted(pipeline) == pytest.approx(wanted, abs=1e-12)


def expected_accepted(pipeline: object) -> float:
    from tests.stand_ins import step_law

    return sum(mass * (len(block) - 1) for block, mass in step_law(pipeline, [0]).items())  # type: ignore[arg-type]


def test_founding_example() -> None:
    """A (p .30, q .10) always, B (p .20, q .25) with .80, C (p .50, q .65) with 10/13; resampling from p is caught."""
    p, q = [0.3, 0.2, 0.5], [0.1, 0.25, 0.65]
    assert first_token_law(p, q, Rejection()) == pytest.approx(p, abs=1e-12)
    assert first_token_law(p, q, NoExclusion()) == pytest.approx([0.16, 0.24, 0.6], abs=1e-12)


def test_argmax_draft_with_one_hot_q() -> None:
    """C1: P3, always token 0: law p; with a soft q in the ratio (5/6, 0, 1/6)."""
    zeros = Scripted(lambda tokens, k: [0] * k)
    p = constant(P3[0])
    law = output_law(pipeline_of(p, V, zeros, gamma=1, temperature=1.0), [0], 1)
    assert [law[x,] for x in range(V)] == pytest.approx(P3[0], abs=1e-12)

    class Soft(Rejection):
        def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
            return super().accept(x, p, torch.tensor([P3[1]] * len(x), dtype=torch.float64), chance)

    law = output_law(pipeline_of(p, V, zeros, gamma=1, sampler=Soft(), temperature=1.0), [0], 1)
    assert [law.get((x,), 0.0) for x in range(V)] == pytest.approx([5 / 6, 0, 1 / 6], abs=1e-12)


def test_q_must_be_the_law_drawn_from() -> None:
    """C2: drawn from the top 2 of q: right with that q, (.5, .5, 0) with the raw q."""
    p, raw, top = constant([0.4, 0.6, 0.0]), [0.5, 0.3, 0.2], [0.625, 0.375, 0.0]

    class RawHandedBack(Rejection):
        def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
            return super().accept(x, p, torch.tensor([raw] * len(x), dtype=torch.float64), chance)

    for sampler, wanted in ((Rejection(), [0.4, 0.6, 0.0]), (RawHandedBack(), [0.5, 0.5, 0.0])):
        law = output_law(pipeline_of(p, V, Drawn(constant(top), V), gamma=1, sampler=sampler, temperature=1.0), [0], 1)
        assert [law.get((x,), 0.0) for x in range(V)] == pytest.approx(wanted, abs=1e-12)


def test_temperature_reaches_the_verifier() -> None:
    """C14, C15: target (2,1,0), draft (1,2,0) at T = .5: (.8668, .1173, .0159); a verifier left at T = 1 does not."""
    target, draft = torch.tensor([2.0, 1.0, 0.0]).double(), torch.tensor([1.0, 2.0, 0.0]).double()
    proposer = Drawn(lambda ids: draft / 0.5, V)
    right = output_law(pipeline_of(lambda ids: target, V, proposer, gamma=1, temperature=0.5), [0], 1)
    assert [right[x,] for x in range(V)] == pytest.approx([0.8668, 0.1173, 0.0159], abs=5e-5)
    wrong = output_law(pipeline_of(lambda ids: target, V, proposer, gamma=1, temperature=1.0), [0], 1)
    assert total_variation(right, wrong) == pytest.approx(0.2016, abs=5e-5)


def test_reduced_and_padded_draft_vocabularies() -> None:
    """C18, C19: a q with zeros on ids the draft lacks keeps the law; q read at draft ids is caught (.25, .1, .65)."""
    p = [0.5, 0.3, 0.2]
    scattered = [0.3, 0.1, 0.6]  # P3's q on draft ids that stand for target ids [2, 0, 1]
    assert first_token_law(p, scattered, Rejection()) == pytest.approx(p, abs=1e-12)

    class DraftIds(Rejection):
        def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
            return super().accept(x, p, torch.tensor([P3[1]] * len(x), dtype=torch.float64), chance)

    assert first_token_law(p, scattered, DraftIds()) == pytest.approx([0.25, 0.1, 0.65], abs=1e-12)
    uniform = [1 / 8] * 8
    reduced = [0, 0.3, 0, 0, 0.6, 0, 0, 0.1]
    assert first_token_law(uniform, reduced, Rejection()) == pytest.approx(uniform, abs=1e-12)
