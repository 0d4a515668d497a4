"""The walk counts the steps that the pipeline takes: of a greedy decode, and in expectation given any sampled text."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from specpipe.audit.exact import explore, table_pipeline
from specpipe.audit.tables import FixedProposer, Rule, TableProposer, table
from specpipe.chance import Chance
from specpipe.draft import Draft
from specpipe.errors import UserError
from specpipe.pipeline import bind
from specpipe.proposers import Proposer
from specpipe.proposers.model import ModelProposer
from specpipe.samplers.block import Block
from specpipe.samplers.exact_match import ExactMatch
from specpipe.samplers.rejection import Rejection
from specpipe.sequence import Sequence
from specpipe.stats import summarise
from specpipe.walk import RULES, Walk, greedy_walk, sampled_walk
from tests.stand_ins import TableModel, pipeline_of

V, N, GAMMA = 3, 4, 3
PROMPT = [1, 0]
P, Q = table(V, seed=3, zeros=0), table(V, seed=7, zeros=0.2)
SAMPLERS = {"rejection": Rejection, "block": Block, "exact_match": ExactMatch}

Text = tuple[int, ...]


def often_right(ids: list[int]) -> Tensor:
    """What the target P says, but behind every third context."""
    return Q(ids) if sum(ids) % 3 == 0 else P(ids)


class Drafting(ModelProposer):
    """A table model that drafts, with a cache of its own."""

    def __init__(self, rule: Rule, **asked: Any) -> None:
        super().__init__(**asked)
        self.drafter = TableModel(rule, V)

    def bind(self, target: Any) -> None:
        self._use(self.drafter, target.vocabulary, None)


class SilentAtFirst:
    """Leaves the pass that reads the prompt without a draft."""

    def __init__(self, member: Proposer) -> None:
        self.member = member

    def bind(self, target: Any) -> None:
        bind(self.member, target)

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        began = len(sequences[0].tokens) > len(PROMPT)
        return self.member.propose(sequences, [k if began else 0 for k in lengths])


class ByStart:
    """Drafts from another table behind each number of emitted tokens, as heads guess from where their step begins."""

    def __init__(self, rule: Callable[[int], Rule]) -> None:
        self.member = cache(lambda start: TableProposer(rule(start), V))

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> Draft:
        return self.member(len(sequences[0].tokens) - len(PROMPT)).propose(sequences, lengths)


@cache
def head_rule(start: int) -> Rule:
    return table(V, seed=20 + start, zeros=0.2)


# ---- greedy ----


def test_the_worked_example_takes_four_steps() -> None:
    """theory.md section 11; the mean over steps, 2.5, counts a token that falls behind the end."""
    walk = greedy_walk(torch.tensor([1, 1, 0, 1, 1, 1, 1, 0, 1], dtype=torch.bool), 3)
    assert walk == Walk(tokens=9, steps=4, plain=1)
    assert walk.tau == 2.25


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("gamma", [0, 1, 3, 5])
def test_a_greedy_walk_is_the_greedy_decode(gamma: int, start: int) -> None:
    """For every length: steps, plain steps, tokens per pass and acceptance length, of one text and pooled."""
    walks, requests = [], []
    for n in (1, 2, 3, 7, 12):
        draft = Drafting(often_right)
        pipeline = pipeline_of(P, V, SilentAtFirst(draft) if start else draft, gamma=gamma, max_new_tokens=n)
        [sequence] = pipeline.sequences([PROMPT])
        requests.append(list(pipeline.decode(sequence)))
        walks.append(greedy_walk(torch.tensor(hits(often_right, sequence.new_tokens)), gamma, start))
        assert walks[-1] == Walk(n, len(requests[-1]), sum(not step.drafted for step in requests[-1]))
    pooled, summary = sum(walks, Walk(0, 0)), summarise(requests, gamma)
    assert pooled.tau == pytest.approx(summary["tokens_per_target_pass"], abs=1e-12)
    assert pooled.mean_acceptance_length == pytest.approx(summary["spec_decode"]["mean_acceptance_length"], abs=1e-12)


def hits(rule: Rule, text: list[int]) -> list[bool]:
    return [int(rule([*PROMPT, *text[:t]]).argmax()) == x for t, x in enumerate(text)]


@pytest.mark.parametrize("start", [0, 1])
def test_a_greedy_walk_of_heads_is_the_greedy_decode(start: int) -> None:
    """Their guess depends on where the step begins; what stands in the place of others is not looked at."""
    n = 20

    def rule(began: int) -> Rule:
        return lambda ids: Q(ids) if (len(ids) + 2 * began) % 5 == 0 else P(ids)

    def guess(tokens: list[int], k: int) -> list[int]:
        ids = list(tokens)
        for _ in range(k):
            ids.append(int(rule(len(tokens) - len(PROMPT))(ids).argmax()))
        return ids[len(tokens) :]

    heads = FixedProposer(guess)
    pipeline = pipeline_of(P, V, SilentAtFirst(heads) if start else heads, gamma=GAMMA, max_new_tokens=n)
    [sequence] = pipeline.sequences([PROMPT])
    steps = list(pipeline.decode(sequence))
    for beyond in (False, True):
        rows = [[*hits(rule(t), sequence.new_tokens)[t:], *[beyond] * n][:n] for t in range(n)]
        match = torch.tensor(rows)
        assert greedy_walk(match, GAMMA, start).steps == len(steps)
    assert greedy_walk(match[:, 0], GAMMA, start).steps != len(steps), "taken for guesses of places"
    assert greedy_walk(match.roll(1, 0), GAMMA, start).steps != len(steps), "starts off by one"


# ---- sampled ----


def explored(proposer: Proposer, rule: str, gamma: int, **settings: Any) -> dict[Text, Walk]:
    """For every text that may leave the pipeline, its expected steps given that it does: every decision is explored."""
    pipeline = table_pipeline(
        P, V, proposer, SAMPLERS[rule](), gamma=gamma, temperature=1.0, max_new_tokens=N, **settings
    )
    stops = frozenset(pipeline.settings.stop_token_ids)

    def step_from(emitted: Text) -> Callable[[Chance], tuple[Text, bool]]:
        def step(chance: Chance) -> tuple[Text, bool]:
            sequence = Sequence(PROMPT, pipeline.settings, stop_ids=stops, chance=chance)
            sequence.tokens += emitted
            taken = pipeline.step([sequence])[0]
            return (*emitted, *taken.tokens), not taken.drafted

        return step

    reached = {(): (1.0, 0.0, 0.0)}  # by text: its probability, and that times its steps and plain steps so far
    done: dict[Text, Walk] = {}
    while reached:
        emitted = min(reached, key=len)
        mass, steps, plain = reached.pop(emitted)
        if len(emitted) == N or stops & set(emitted):
            done[emitted] = Walk(len(emitted), steps / mass, plain / mass)
            continue
        for (after, without), share in explore(step_from(emitted)):
            before = reached.get(after, (0.0, 0.0, 0.0))
            more = (mass, steps + mass, plain + mass * without)
            reached[after] = tuple(a + share * b for a, b in zip(before, more, strict=True))
    return done


@cache
def expected(rule: str, gamma: int) -> dict[Text, Walk]:
    return explored(TableProposer(Q, V), rule, gamma)


@cache
def laws(rule: Rule, text: Text) -> Tensor:
    """Probability of each token of the text, [T]."""
    return torch.stack([rule([*PROMPT, *text[:t]]).softmax(-1)[x] for t, x in enumerate(text)])


def ratio(text: Text, rule: str) -> Tensor:
    return laws(Q, text) / (1 if rule == "exact_match" else laws(P, text))


def off_by(walks: dict[Text, Walk], walk: Callable[[Text], float]) -> float:
    return max(abs(walk(text) - right.steps) for text, right in walks.items())


@pytest.mark.parametrize("gamma", [0, 1, 2, 3])
@pytest.mark.parametrize("rule", RULES)
def test_a_sampled_walk_is_the_expectation_over_every_decision_given_the_text(rule: str, gamma: int) -> None:
    walks = expected(rule, gamma)
    assert len(walks) == V**N
    for text, right in walks.items():
        walk = sampled_walk(ratio(text, rule), gamma, rule)
        assert walk.tokens == N
        assert (walk.steps, walk.plain) == pytest.approx((right.steps, right.plain), abs=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_a_prompt_pass_without_a_draft_is_a_step_and_plain(rule: str) -> None:
    for text, right in explored(SilentAtFirst(TableProposer(Q, V)), rule, GAMMA).items():
        walk = sampled_walk(ratio(text, rule), GAMMA, rule, start=1)
        assert (walk.steps, walk.plain) == pytest.approx((right.steps, right.plain), abs=1e-9)


@pytest.mark.parametrize("rule", RULES)
def test_a_text_that_a_stop_ended_takes_the_same_steps(rule: str) -> None:
    walks = explored(TableProposer(Q, V), rule, 2, stop_token_ids=[1])
    assert {len(text) for text in walks} == {1, 2, 3, N}
    assert off_by(walks, lambda text: sampled_walk(ratio(text, rule), 2, rule).steps) < 1e-9


@pytest.mark.parametrize("rule", RULES)
def test_a_place_where_the_draft_ends_counts_as_missed(rule: str) -> None:
    """By what the text before it says, as `min_confidence` does."""
    draft = Drafting(Q, min_confidence=0.6)
    pipeline_of(P, V, draft)  # binds it
    walks = explored(draft, rule, 2)

    def sure(text: Text) -> Tensor:
        return torch.tensor([Q([*PROMPT, *text[:t]]).softmax(-1).max() >= 0.6 for t in range(len(text))])

    assert off_by(walks, lambda text: sampled_walk(ratio(text, rule) * sure(text), 2, rule).steps) < 1e-9
    assert off_by(walks, lambda text: sampled_walk(ratio(text, rule), 2, rule).steps) > 0.01


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("rule", RULES)
def test_a_sampled_walk_of_heads_goes_by_where_their_step_begins(rule: str, start: int) -> None:
    heads = ByStart(head_rule)
    walks = explored(SilentAtFirst(heads) if start else heads, rule, GAMMA)

    def guesses(text: Text) -> Tensor:
        """[T, GAMMA], NaN behind the end."""
        p = 1 if rule == "exact_match" else laws(P, text)
        rows = [torch.cat([laws(head_rule(t), text) / p, torch.full((t + GAMMA,), torch.nan)])[t:] for t in range(N)]
        return torch.stack([row[:GAMMA] for row in rows])

    by_start = {text: guesses(text) for text in walks}
    assert off_by(walks, lambda text: sampled_walk(by_start[text], GAMMA, rule, start).steps) < 1e-9
    for wrong in (lambda d: d[:, 0], lambda d: d.nan_to_num().roll(1, 0), lambda d: d.nan_to_num().flip(1)):
        wrongly = {text: wrong(d) for text, d in by_start.items()}
        assert off_by(walks, lambda text, d=wrongly: sampled_walk(d[text], GAMMA, rule, start).steps) > 0.01


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("shape", [(40,), (40, 6)])
def test_with_one_hot_laws_a_sampled_walk_is_the_greedy_walk(shape: tuple[int, ...], rule: str) -> None:
    """Temperature 0; and drafts that are not drawn, at any temperature, where d is 1/p or 0."""
    generator = torch.Generator().manual_seed(1)
    match = torch.rand(shape, generator=generator) < 0.7
    p = 1.0 if rule == "exact_match" else 0.1 + 0.9 * torch.rand(shape, generator=generator)
    for gamma in (0, 1, 4, 6):
        for start in (0, 1):
            assert sampled_walk(match / torch.as_tensor(p), gamma, rule, start) == greedy_walk(match, gamma, start)
            assert sampled_walk(match.float(), gamma, rule, start) == greedy_walk(match, gamma, start)


def test_where_all_places_are_alike_the_walk_is_the_formula() -> None:
    """theory.md section 5, up to the ends of a long text."""
    walk = sampled_walk(torch.full((20_000,), 0.7), 3)
    assert walk.tau == pytest.approx((1 - 0.7**4) / 0.3, abs=1e-3)


def test_block_products_of_large_ratios_do_not_overflow() -> None:
    walk = sampled_walk(torch.tensor([1e38] * 12 + [0.0] * 8), 12, "block")
    assert walk == greedy_walk(torch.tensor([True] * 12 + [False] * 8), 12)


# ---- wrong variants: each respects the end of the text, so that what is caught is the variant itself ----


def standing(d: Tensor, gamma: int) -> list[list[float]]:
    """prod_{j<i} min(1, d) for i = 0 .. of each place, as far as a step from there may draft."""
    kept = d.clamp(max=1)
    return [[kept[t : t + i].prod().item() for i in range(min(gamma, len(d) - t - 1) + 1)] for t in range(len(d))]


def steps_by_one_step_sums(d: Tensor, gamma: int) -> float:
    """T over 1 + sum_i prod min(1, d), averaged over all places."""
    tokens = [sum(each) for each in standing(d, gamma)]
    return len(d) / (sum(tokens) / len(d))


def steps_by_products_of_averages(d: Tensor, gamma: int) -> float:
    """The walk of a text whose places all have the average acceptance."""
    return sampled_walk(torch.full_like(d, d.clamp(max=1).mean().item()), gamma).steps


def steps_by_block_products(d: Tensor, gamma: int) -> float:
    """The last product, clipped, in place of the least one so far."""
    T = len(d)
    visits = [1.0, *[0.0] * T]
    for t in range(T):
        room = min(gamma, T - t - 1)
        G = [*(d[t : t + i].prod().clamp(max=1).item() for i in range(room + 1)), 0.0]
        for i in range(room + 1):
            visits[t + i + 1] += visits[t] * (G[i] - G[i + 1])
    return sum(visits[:T])


@pytest.mark.parametrize(
    ("wrong", "rule", "gammas"),
    [
        (steps_by_one_step_sums, "rejection", (1, 2, 3)),
        (steps_by_products_of_averages, "rejection", (1, 2, 3)),
        (lambda d, gamma: sampled_walk(d, gamma, "rejection").steps, "block", (2, 3)),
        (steps_by_block_products, "block", (2, 3)),
        (lambda d, gamma: sampled_walk(1 / d.clamp(min=1e-9), gamma).steps, "rejection", (1, 2, 3)),
        (lambda d, gamma: sampled_walk(d.roll(1), gamma).steps, "rejection", (1, 2, 3)),
        (lambda d, gamma: sampled_walk(d.clamp(max=1), gamma, "exact_match").steps, "exact_match", (1, 2, 3)),
    ],
    ids=["one-step sums", "products of averages", "token rule for block", "block products", "p/q", "shifted", "no q"],
)
def test_wrong_walks_are_caught(wrong: Callable[[Tensor, int], float], rule: str, gammas: tuple[int, ...]) -> None:
    for gamma in gammas:
        assert off_by(expected(rule, gamma), lambda text, gamma=gamma: wrong(ratio(text, "rejection"), gamma)) > 0.01


def test_steps_do_not_begin_everywhere_alike() -> None:
    """Where every fourth guess is wrong, all steps begin behind the wrong one: no average over places sees it."""
    match = torch.tensor([True, True, True, False] * 500)
    assert greedy_walk(match, 3).tau == sampled_walk(match.float(), 3).tau == 4
    assert 2000 / steps_by_one_step_sums(match.float(), 3) == pytest.approx(2.5, abs=0.01)
    assert 2000 / steps_by_products_of_averages(match.float(), 3) == pytest.approx((1 - 0.75**4) / 0.25, abs=0.01)


# ---- pooling and refusals ----


def test_walks_are_pooled_by_adding_tokens_and_steps() -> None:
    pooled = sum([Walk(9, 4, 1), Walk(3, 3, 1.5)], Walk(0, 0))
    assert pooled == Walk(12, 7, 2.5)
    assert pooled.tau == 12 / 7
    assert pooled.mean_acceptance_length == pytest.approx(9.5 / 4.5)
    assert Walk(3, 3, 3).mean_acceptance_length is None


def test_a_probability_that_rounding_carries_above_one_is_taken() -> None:
    assert sampled_walk(torch.full((8,), 1 + 1e-6), 3, "exact_match").steps == 2


def test_an_empty_text_takes_no_step() -> None:
    for start in (0, 1):
        assert greedy_walk(torch.ones(0, dtype=torch.bool), 3, start) == Walk(0, 0)
        assert sampled_walk(torch.ones(0, 4), 3, start=start) == Walk(0, 0)


@pytest.mark.parametrize(
    ("call", "key"),
    [
        (lambda: greedy_walk(torch.ones(5, 3, dtype=torch.bool), 4), "gamma"),
        (lambda: greedy_walk(torch.ones(5, dtype=torch.bool), -1), "gamma"),
        (lambda: greedy_walk(torch.ones(5, dtype=torch.bool), 2, start=2), "start"),
        (lambda: greedy_walk(torch.ones(5, 3, 1, dtype=torch.bool), 1), "match"),
        (lambda: sampled_walk(torch.ones(5), 2, rule="typical"), "rule"),
        (lambda: sampled_walk(torch.tensor([0.5, torch.nan, 1.0]), 2), "ratio"),
        (lambda: sampled_walk(torch.tensor([0.5, torch.inf, 1.0]), 2), "ratio"),
        (lambda: sampled_walk(torch.tensor([0.5, -0.1, 1.0]), 2), "ratio"),
        (lambda: sampled_walk(torch.tensor([0.5, 3.0, 1.0]), 2, "exact_match"), "ratio"),
    ],
)
def test_what_cannot_be_walked_is_refused_by_name(call: Callable[[], Walk], key: str) -> None:
    with pytest.raises(UserError) as error:
        call()
    assert error.value.key == key
