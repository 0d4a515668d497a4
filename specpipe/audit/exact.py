"""The exact law of what leaves the pipeline, by exploring every random decision (theory.md section 8a).

A `Chance` that takes the decisions it is told to runs the shipped step, with the sampler under audit, once per path.
Laws of blocks are composed over prefixes into the joint law of the first tokens and compared with the product of the
target's own laws: context-dependent tables hide neither shifted rows nor wrong longer prefixes, as equal rows would.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from specpipe.audit.finding import FAILED, PASSED, Finding
from specpipe.audit.tables import FixedProposer, Rule, TableProposer, TableVerifier, table
from specpipe.chance import Chance
from specpipe.distribution import Prefix, probabilities
from specpipe.errors import UserError, one_line
from specpipe.pipeline import Pipeline
from specpipe.proposers import Proposer
from specpipe.samplers import Sampler
from specpipe.sequence import Sequence
from specpipe.settings import GenerationSettings

Law = dict[tuple[int, ...], float]  # emitted ids -> probability
Outcome = TypeVar("Outcome")

V, N = 3, 4  # ids of the table models; tokens whose joint law is compared
GAMMAS = (1, 2, 3)
BOUND = 1e-12
PROMPT = [1, 0]
FULL = table(V, seed=3, zeros=0)  # every token has mass, so that banning one leaves some
SPARSE = table(V, seed=1)

PROPOSALS: dict[str, Proposer] = {
    "soft q": TableProposer(table(V, seed=7, zeros=0), V),
    "soft q with zeros": TableProposer(table(V, seed=2), V),
    "one-hot q": FixedProposer(lambda tokens, k: [(sum(tokens) + i) % V for i in range(k)]),
    "one-hot q, ragged": FixedProposer(lambda tokens, k: [(sum(tokens) + i) % V for i in range(sum(tokens) % (k + 1))]),
    "reduced vocabulary": TableProposer(table(2, seed=4, zeros=0), V, ids=[2, 0]),
    "padded vocabulary": TableProposer(table(V + 2, seed=5, zeros=0), V),
    "nothing": FixedProposer(lambda tokens, k: []),
}

SETTINGS: dict[str, dict[str, Any]] = {
    "temperature 1": {"temperature": 1.0},
    "temperature 1, zeros in p": {"temperature": 1.0},
    "temperature 0.7": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top_k": {"temperature": 1.0, "top_k": 2},
    "top_p": {"temperature": 1.0, "top_p": 0.73},
    "min_p": {"temperature": 1.0, "min_p": 0.4},
    "typical_p": {"temperature": 1.0, "typical_p": 0.6},
    "repetition_penalty": {"temperature": 1.0, "repetition_penalty": 1.5},
    "frequency_penalty": {"temperature": 1.0, "frequency_penalty": 0.5},
    "presence_penalty": {"temperature": 1.0, "presence_penalty": -0.3},
    "logit_bias": {"temperature": 1.0, "logit_bias": {0: 0.7, 2: -0.4}},
    "banned_token_ids": {"temperature": 1.0, "banned_token_ids": [1]},
    "stop_token_ids": {"temperature": 1.0, "stop_token_ids": [1]},
    "min_new_tokens": {"temperature": 1.0, "stop_token_ids": [1], "min_new_tokens": 3},
    "greedy with penalties": {"temperature": 0.0, "frequency_penalty": 0.6, "repetition_penalty": 1.3},
    "all together": {
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
}
RULES: dict[str, Rule] = {"temperature 1, zeros in p": SPARSE}  # elsewhere FULL: settings make zeros of their own


def exact_law(
    sampler: Sampler,
    extra: Mapping[str, dict[str, Any]] | None = None,
    gamma: int = GAMMAS[-1],
    advance: Callable[[int], None] = lambda cases: None,
) -> Finding:
    """Every proposal kind x every setting x gamma 1..3: the largest error of the joint law of the first tokens.

    Longer drafts, up to `gamma`, are explored in single steps: all that a whole step may emit.

    Args:
        sampler: the rule under audit.
        extra: more settings by name, such as the run's own.
        gamma: the run's draft length.
        advance: told how many cases are done since it was told last.
    """
    cases: list[dict[str, Any]] = []
    with _one_thread():
        for k, proposals, name, settings in sweep(extra, gamma):
            cases.append({"gamma": k, "proposals": proposals, "settings": name})
            try:
                rule = RULES.get(name, FULL)
                if k > GAMMAS[-1]:
                    cases[-1]["error"] = step_error(sampler, long_proposals(k)[proposals], k, settings, rule)
                else:
                    cases[-1]["error"] = law_error(sampler, PROPOSALS[proposals], k, settings, rule)
            except NotExplorable as error:
                raise UserError(f"{type(sampler).__name__} {error}", key="sampler") from error
            except Exception as error:  # whatever a user's own rule raises
                cases[-1] |= {"error": 1.0, "raised": f"{type(error).__name__}: {one_line(error)}"}
            advance(1)
    worst = max(cases, key=lambda case: case["error"])
    right = worst["error"] <= BOUND
    where = f"{worst['proposals']}, {worst['settings']}, gamma {worst['gamma']}"
    raised = f" ({worst['raised']})" if "raised" in worst else ""
    wrong = sum(case["error"] > BOUND for case in cases)
    reason = (
        f"{len(cases)} combinations of proposals, settings and gamma are off by {worst['error']:.1e} at most"
        if right
        else f"{wrong} of {len(cases)} combinations are off by more than {BOUND:g}; worst {worst['error']:.2g} "
        f"with {where}{raised}"
    )
    numbers = {"bound": BOUND, "largest_error": worst["error"], "vocabulary": V, "tokens": N, "cases": cases}
    return Finding("exact law", PASSED if right else FAILED, f"{reason}.", numbers)


def sweep(
    extra: Mapping[str, dict[str, Any]] | None = None, gamma: int = GAMMAS[-1]
) -> Iterator[tuple[int, str, str, dict[str, Any]]]:
    """(gamma, proposals, name of the settings, settings) of every case."""
    for name, settings in {**SETTINGS, **(extra or {})}.items():
        for proposals in PROPOSALS:
            for k in GAMMAS if proposals != "nothing" else GAMMAS[:1]:
                yield k, proposals, name, settings
    if gamma > GAMMAS[-1]:
        for name, settings in {"temperature 1": SETTINGS["temperature 1"], **(extra or {})}.items():
            for proposals in long_proposals(gamma):
                yield gamma, proposals, name, settings


def long_proposals(gamma: int) -> dict[str, Proposer]:
    """Drafts of a length at which not every block of tokens can be explored: at most three places of each are drawn."""
    drawn, end = table(V, seed=7, zeros=0), len(PROMPT) + gamma

    def law(places: range) -> Rule:
        def rule(ids: list[int]) -> Tensor:
            return drawn(ids) if len(ids) in places else _surely(sum(ids) % V)

        return rule

    return {
        "one-hot q": PROPOSALS["one-hot q"],
        "soft q at first": TableProposer(law(range(len(PROMPT), len(PROMPT) + 3)), V),
        "soft q at last": TableProposer(law(range(end - 3, end)), V),
    }


def law_error(
    sampler: Sampler, proposer: Proposer, gamma: int, settings: dict[str, Any], rule: Rule = FULL, size: int = V
) -> float:
    """Largest difference between the joint law of the first N tokens and the target's."""
    pipeline = table_pipeline(rule, size, proposer, sampler, gamma=gamma, max_new_tokens=N, **settings)
    return largest_difference(output_law(pipeline, PROMPT, N), target_law(rule, PROMPT, N, pipeline.settings))


def step_error(
    sampler: Sampler, proposer: Proposer, gamma: int, settings: dict[str, Any], rule: Rule = FULL, size: int = V
) -> float:
    """Largest error of one step that is continued by the target, over all beginnings of what the step may emit.

    That is enough: a text that leaves every such beginning was continued by the target alone from there.
    """
    pipeline = table_pipeline(rule, size, proposer, sampler, gamma=gamma, max_new_tokens=gamma + 1, **settings)
    law = step_law(pipeline, PROMPT)
    stops = frozenset(pipeline.settings.stop_token_ids)

    def p(ids: tuple[int, ...], x: int) -> float:
        before = Prefix(PROMPT, ids, stops)
        return probabilities(rule([*PROMPT, *ids]), pipeline.settings, before)[x].item()

    errors = [abs(sum(law.values()) - 1)]
    for text in {block[:n] for block in law for n in range(1, len(block) + 1)}:
        shares = [1.0]  # of the target behind the first n tokens of the text: p of token n, n + 1, ... together
        for n in range(len(text), 0, -1):
            shares.append(shares[-1] * p(text[: n - 1], text[n - 1]))
        emitted = sum(mass for block, mass in law.items() if block[: len(text)] == text)
        continued = sum(law.get(text[:n], 0.0) * shares[len(text) - n] for n in range(1, len(text)))
        errors.append(abs(emitted + continued - shares[-1]))
    return max(errors)


def table_pipeline(
    rule: Rule, size: int, proposer: Proposer, sampler: Sampler, *, gamma: int, seed: int = 0, **settings: Any
) -> Pipeline:
    """The shipped pipeline over a table model."""
    return Pipeline(
        verifier=TableVerifier(rule, size),
        proposer=proposer,
        sampler=sampler,
        settings=GenerationSettings(**settings),
        num_speculative_tokens=gamma,
        seed=seed,
    )


ONLY = "only chance.passes and chance.draw can be explored."
UNEXPLORABLE = f"draws random numbers of its own; {ONLY}"


class NotExplorable(Exception):
    """The sampler took randomness from elsewhere than `chance.passes` and `chance.draw`."""


class Explorer(Chance):
    """Follows `path`, then takes the first option of each new decision; `others` are the paths of the other options."""

    def __init__(self, path: list[int]) -> None:
        self.path = path
        self.others: list[list[int]] = []
        self.mass = 1.0
        self._taken = 0

    def propose(self, q: Tensor) -> int:
        return self._decide(q.tolist())

    def draw(self, law: Tensor) -> int:
        return self._decide(law.tolist())

    def passes(self, p: float, q: float) -> bool:
        accept = 1.0 if p >= q else p / q
        return bool(self._decide([1 - accept, accept]))

    def uniforms(self, k: int) -> tuple[list[float], float]:
        raise NotExplorable(f"asks for raw random numbers; {ONLY}")

    def _decide(self, weights: list[float]) -> int:
        if self._taken == len(self.path):
            options = [i for i, weight in enumerate(weights) if weight > 0]
            if not options:
                raise FloatingPointError(f"a law without mass was drawn from: {weights}")
            self.others += [[*self.path, option] for option in options[1:]]
            self.path = [*self.path, options[0]]
        choice = self.path[self._taken]
        self._taken += 1
        self.mass *= weights[choice] / math.fsum(weights)
        return choice


def explore(decide: Callable[[Chance], Outcome]) -> Iterator[tuple[Outcome, float]]:
    """Every outcome of `decide` under every sequence of decisions, with its probability."""
    paths: list[list[int]] = [[]]
    outside = _other_randomness()
    once, again = Explorer([]), Explorer([])
    if (decide(once), once.mass) != (decide(again), again.mass):
        raise NotExplorable(UNEXPLORABLE)
    while paths:
        chance = Explorer(paths.pop())
        yield decide(chance), chance.mass
        paths += chance.others
    if _other_randomness() != outside:
        raise NotExplorable(UNEXPLORABLE)


def step_law(pipeline: Pipeline, prompt: list[int], emitted: tuple[int, ...] = (), n: int = 99) -> Law:
    """What one step appends behind `prompt` and `emitted`, with its probability, at most up to n tokens in all."""

    def block(chance: Chance) -> tuple[int, ...]:
        stop_ids = pipeline.settings.stop_token_ids
        sequence = Sequence(prompt, pipeline.settings, stop_ids=stop_ids, chance=chance)
        sequence.tokens += emitted
        return tuple(pipeline.step([sequence])[0].tokens[: n - len(emitted)])

    law: Law = {}
    for tokens, mass in explore(block):
        law[tokens] = law.get(tokens, 0.0) + mass
    return law


def output_law(pipeline: Pipeline, prompt: list[int], n: int) -> Law:
    """The joint law of the first n tokens out of the pipeline: every decision of every step, explored."""
    unfinished: Law = {(): 1.0}
    finished: Law = {}
    stops = set(pipeline.settings.stop_token_ids)
    while unfinished:
        emitted, mass = unfinished.popitem()
        for block, share in step_law(pipeline, prompt, emitted, n).items():
            after = emitted + block
            goal = finished if len(after) == n or stops & set(block) else unfinished
            goal[after] = goal.get(after, 0.0) + mass * share
    return finished


def target_law(rule: Rule, prompt: list[int], n: int, settings: GenerationSettings) -> Law:
    """The joint law of n tokens drawn one by one from the target, fewer where a stop id ends them."""
    stops = frozenset(settings.stop_token_ids)
    law: Law = {(): 1.0}
    for _ in range(n):
        longer: Law = {}
        for ids, mass in law.items():
            if stops & set(ids):
                longer[ids] = mass
                continue
            p = probabilities(rule([*prompt, *ids]), settings, Prefix(prompt, ids, stops))
            longer |= {(*ids, x): mass * weight for x, weight in enumerate(p.tolist()) if weight > 0}
        law = longer
    return law


def largest_difference(a: Law, b: Law) -> float:
    return max(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys())


def total_variation(a: Law, b: Law) -> float:
    return sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in a.keys() | b.keys()) / 2


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Tensors of three numbers are done sooner by one thread than by several that wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _surely(x: int) -> Tensor:
    return torch.full((V,), -torch.inf, dtype=torch.float64).index_fill(0, torch.tensor(x), 0.0)


def _other_randomness() -> tuple[object, ...]:
    """State of the generators that a sampler must leave alone."""
    return random.getstate(), torch.random.get_rng_state().numpy().tobytes()
