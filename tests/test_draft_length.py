"""How many tokens a step asks for: what pays, by measured acceptance and cost."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest

import specpipe
from specpipe import draft_length
from specpipe.audit.exact import largest_difference, output_law, target_law
from specpipe.audit.tables import FixedProposer, TableProposer, table
from specpipe.chance import Chance
from specpipe.draft_length import LEVEL, OUTLIER, Adaptive, Costs, Fixed
from specpipe.errors import ContractError, UserError
from specpipe.sequence import Sequence, Step
from specpipe.settings import GenerationSettings
from tests.stand_ins import chain, greedy, pipeline_of, right_but_at

LONGEST = 8


class World:
    """A request whose drafts are right up to `right(step)` tokens, in passes of `cost(drafted)` seconds."""

    def __init__(self, right: Any, cost: Any, offered: Any = lambda step: LONGEST) -> None:
        self.right, self.cost, self.offered = right, cost, offered
        self.sequence = Sequence([1], GenerationSettings(max_new_tokens=10**6), chance=Chance(0))

    def run(self, policy: Any, steps: int) -> float:
        """Tokens per second over so many steps."""
        tokens = seconds = 0.0
        for number in range(steps):
            [asked] = policy.choose([self.sequence], LONGEST)
            drafted = min(asked, self.offered(number))
            accepted = min(drafted, self.right(number))
            step = Step(drafted, accepted, [0] * (accepted + 1), [1.0] * min(drafted, accepted + 1), asked)
            step.seconds = {"verify": self.cost(drafted)}
            self.sequence.steps.append(step)
            tokens += len(step.tokens)
            seconds += self.cost(drafted)
        return tokens / seconds


class Always:
    def __init__(self, length: int) -> None:
        self.length = length

    def choose(self, sequences: list[Sequence], longest: int) -> list[int]:
        return [self.length] * len(sequences)


def varied(*counts: int) -> Any:
    """Accepted counts in turn, in an order without period 8."""
    return lambda step: counts[step * 7919 % 104729 % len(counts)]


FLAT, STEEP = (lambda k: 1 + 0.03 * k), (lambda k: 1 + 0.5 * k)
WORLDS = {
    "always right, flat cost": (lambda step: 99, FLAT),
    "always right, steep cost": (lambda step: 99, STEEP),
    "never right": (lambda step: 0, FLAT),
    "mostly one right": (varied(1, 1, 0, 2), STEEP),
    "half of them long": (varied(0, 8, 0, 8, 3), FLAT),
    "twice dearer from the fifth on": (varied(3, 8, 5, 4), lambda k: 1 + 0.05 * k + (k > 4)),
    "often nothing to draft": (varied(2, 5, 1), FLAT, lambda step: 0 if step % 3 else 6),
}


@pytest.mark.parametrize("world", WORLDS)
def test_adaptive_is_close_to_the_best_fixed_length_and_far_from_the_worst(world: str) -> None:
    fixed = [World(*WORLDS[world]).run(Always(k), 400) for k in range(LONGEST + 1)]
    adaptive = World(*WORLDS[world]).run(Adaptive(), 400)
    assert adaptive >= 0.95 * max(fixed)
    assert adaptive >= 1.1 * min(fixed)


def test_a_policy_that_does_not_look_at_the_cost_would_be_seen() -> None:
    right, cost = WORLDS["mostly one right"]
    fixed = max(World(right, cost).run(Always(k), 400) for k in range(LONGEST + 1))
    assert World(right, cost).run(Fixed(), 400) < 0.5 * fixed


def test_where_drafting_does_not_pay_it_is_tried_now_and_then_only() -> None:
    world = World(lambda step: 0, FLAT)
    world.run(Adaptive(probe_every=8), 80)
    late = [step.asked for step in world.sequence.steps[-40:]]
    assert sorted(set(late)) == [0, 1]
    assert late.count(1) == 5


def test_a_proposer_that_becomes_better_is_noticed() -> None:
    world = World(lambda step: 0 if step < 100 else 99, FLAT)
    world.run(Adaptive(), 260)
    assert world.sequence.steps[99].asked <= 1
    assert world.sequence.steps[-2].asked >= LONGEST - 1


def in_stretches(step: int) -> int:
    """A dozen steps in which everything is right, a dozen in which about one token is."""
    return 99 if step // 12 % 2 else varied(1, 1, 0, 2)(step)


STRETCHES = in_stretches, lambda k: 1 + 0.08 * k


def test_where_a_text_is_copied_in_stretches_it_beats_every_fixed_length(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = max(World(*STRETCHES).run(Always(k), 600) for k in range(LONGEST + 1))
    assert World(*STRETCHES).run(Adaptive(), 600) >= 1.05 * fixed
    monkeypatch.setattr(draft_length, "is_copying", lambda step: False)  # does not tell such steps from others
    assert World(*STRETCHES).run(Adaptive(), 600) < 1.02 * fixed


class Turns:
    """Nothing at first, then each length in turn."""

    def choose(self, sequences: list[Sequence], longest: int) -> list[int]:
        return [0 if len(s.steps) < longest else 1 + len(s.steps) % longest for s in sequences]


def test_a_token_that_pays_by_itself_is_left_where_its_time_brings_more() -> None:
    """Half the steps are copied whole. In the others a token is right in one try of three and takes .21 of a pass.

    That is more than nothing, 1.33 / 1.21, but elsewhere the time brings more; where all of it does that is noticed.
    """

    def right(step: int) -> int:
        return 99 if step // 60 % 2 else varied(0, 1, 0)(step)

    mixed = World(right, lambda k: 1 + 0.21 * k)
    for steps, wanted in ((590, LONGEST), (610, 0)):
        mixed.run(Turns(), steps - len(mixed.sequence.steps))
        assert Adaptive().choose([mixed.sequence], LONGEST) == [wanted]
    never_copied = World(varied(0, 1, 0), lambda k: 1 + 0.21 * k)
    never_copied.run(Turns(), 640)
    assert Adaptive().choose([never_copied.sequence], LONGEST) == [1]


def test_requests_that_share_a_pass_have_one_cost_of_it() -> None:
    """The time is that of the widest; those with less are no cheaper."""
    policy = Adaptive()
    wide, narrow = World(lambda step: 99, FLAT), World(lambda step: 99, FLAT)
    for number in range(60):
        asked = policy.choose([wide.sequence, narrow.sequence], LONGEST)[0]
        seconds = {"verify": FLAT(asked)}
        for world, drafted in ((wide, asked), (narrow, min(asked, number % 2))):
            tokens = [0] * (drafted + 1)
            step = Step(drafted, drafted, tokens, [1.0] * drafted, asked, rows=2, seconds=seconds)
            world.sequence.steps.append(step)
    times = policy._costs[2].relative(LONGEST)
    assert times == pytest.approx([FLAT(k) for k in range(LONGEST + 1)], rel=0.02)
    assert list(policy._costs) == [2]


def test_what_a_finished_request_drafted_counts_for_the_passes_it_was_in() -> None:
    """The wide row of each pass is done before its steps are read; the others' pass was as wide all the same."""
    policy = Adaptive()
    wide, narrow = World(lambda step: 99, FLAT), World(lambda step: 99, FLAT)
    both, seconds = [wide.sequence, narrow.sequence], {"verify": FLAT(LONGEST)}
    policy.choose(both, LONGEST)
    for world, drafted in ((wide, LONGEST), (narrow, 1)):
        step = Step(drafted, drafted, [0] * (drafted + 1), [1.0] * drafted, LONGEST, rows=2, seconds=seconds)
        world.sequence.steps.append(step)
    policy.choose([narrow.sequence], LONGEST)
    assert policy._costs[2].knows(LONGEST)
    assert not policy._costs[2].knows(1)


def test_a_new_request_starts_from_the_experience_of_the_run() -> None:
    policy = Adaptive()
    World(lambda step: 0, STEEP).run(policy, 100)
    assert policy.choose([World(lambda step: 0, STEEP).sequence], LONGEST)[0] <= 1


def test_requests_of_one_pass_get_one_length() -> None:
    """A pass is as wide as its longest draft, so shorter ones would save nothing."""
    policy = Adaptive()
    good, bad = World(lambda step: 99, FLAT), World(lambda step: 0, FLAT)
    for world in (good, bad):
        world.run(policy, 30)
    assert len(set(policy.choose([good.sequence, bad.sequence], LONGEST))) == 1


def test_costs_are_medians_with_lines_between() -> None:
    costs = Costs()
    for seconds in (1.0, 1.0, 50.0):
        costs.add(0, seconds)
    costs.add(4, 2.0)
    assert costs.up_to(4) == pytest.approx([1.0, 1.25, 1.5, 1.75, 2.0], rel=LEVEL * OUTLIER)
    assert costs.up_to(8)[8] > 2.0
    assert sorted(Costs().up_to(3)) == Costs().up_to(3)  # nothing measured: each token costs something


def test_a_machine_that_is_slow_for_a_while_does_not_make_a_length_dear() -> None:
    """Length 4 costs twice as much as none, and is tried for longer while everything takes half as long again."""
    costs, plain = Costs(), Costs()
    for _ in range(20):
        for drafted, seconds in ((0, 1.0), (4, 2.0)):
            costs.add(drafted, seconds)
            plain.add(drafted, seconds)
    for i in range(60):
        drafted = 0 if i % 8 == 0 else 4
        costs.add(drafted, 1.5 * (1.0 if drafted == 0 else 2.0))
    none, _, _, _, four = costs.up_to(4)
    assert four / none == pytest.approx(2.0, rel=0.08)
    assert plain.up_to(4)[4] == pytest.approx(2.0)
    medians = {k: median([s] * 20 + [1.5 * s] * n) for k, s, n in ((0, 1.0, 8), (4, 2.0, 52))}
    assert medians[4] / medians[0] > 2.5  # what medians of the seconds themselves would have said


@pytest.mark.parametrize("policy", [Adaptive(), Adaptive(probe_every=2)])
def test_greedy_text_does_not_depend_on_the_length(policy: Adaptive) -> None:
    pipeline = pipeline_of(chain(11), 11, right_but_at(chain(11), 2, 11), max_new_tokens=30)
    pipeline.draft_length = policy
    assert pipeline.generate([[3]])[0].token_ids == greedy(chain(11), [3], 30)


def test_lengths_chosen_from_earlier_steps_keep_the_law() -> None:
    p, q = table(3, seed=3, zeros=0), table(3, seed=7, zeros=0)

    class ByLast:
        """Depends on what was accepted before, as Adaptive does, and on nothing measured."""

        def choose(self, sequences: list[Sequence], longest: int) -> list[int]:
            return [s.steps[-1].accepted if s.steps else longest for s in sequences]

    pipeline = pipeline_of(p, 3, TableProposer(q, 3), gamma=2, max_new_tokens=4, temperature=1.0)
    pipeline.draft_length = ByLast()
    wanted = target_law(p, [1, 0], 4, GenerationSettings(temperature=1.0))
    assert largest_difference(output_law(pipeline, [1, 0], 4), wanted) <= 1e-12


@pytest.mark.parametrize("chosen", [[9], [-1], [1, 1], [1.5], ["a"], None, 3])
def test_a_policy_that_breaks_its_contract_is_named(chosen: Any) -> None:
    class Wild:
        def choose(self, sequences: list[Sequence], longest: int) -> list[int]:
            return chosen

    pipeline = pipeline_of(chain(5), 5, FixedProposer(lambda tokens, k: []), gamma=4)
    pipeline.draft_length = Wild()
    with pytest.raises(ContractError, match="Wild chose"):
        pipeline.generate([[1]])


def test_it_is_an_option_with_its_lengths_in_the_result() -> None:
    pipeline = specpipe.load("target=tiny", "target.device=cpu", "draft_length=adaptive", "num_speculative_tokens=8")
    assert isinstance(pipeline.draft_length, Adaptive)
    sequence = pipeline.sequences(["abcabcabc"])[0]
    steps = list(pipeline.decode(sequence))
    assert all(step.drafted <= step.asked <= 8 for step in steps)


@pytest.mark.parametrize("wrong", [{"probe_every": 1}, {"memory": 0}, {"memory": "long"}])
def test_wrong_values_are_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))):
        Adaptive(**wrong)
