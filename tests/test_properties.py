"""Properties of the sampling settings, of drawing and of the acceptance rules, on random cases with many corners.

Every property that a plausible slip could break silently comes with that slip, and hypothesis must find a case
that tells the two apart.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given
from hypothesis import strategies as st
from torch import Tensor

from specpipe.audit.exact import explore
from specpipe.audit.tables import TableProposer, table
from specpipe.chance import Chance
from specpipe.distribution import NUCLEUS_HEAD, Prefix, Rows, draw, probabilities
from specpipe.errors import ContractError, UserError
from specpipe.samplers.block import Block
from specpipe.samplers.exact_match import ExactMatch
from specpipe.samplers.rejection import Rejection, residual
from specpipe.settings import GenerationSettings
from tests.stand_ins import pipeline_of
from tests.wrong_rules import TOKEN_RULES, FirstFailure, Redraw, TokenResidual

MANY = hypothesis.settings(
    max_examples=80, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
FEW = hypothesis.settings(MANY, max_examples=25)
FIRST_FOUND = hypothesis.settings(MANY, phases=[Phase.generate])


def found(case: Any, condition: Any) -> Any:
    """The first case that meets the condition; the same ones are tried in every run."""
    return hypothesis.find(case, condition, settings=FIRST_FOUND, random=random.Random(0))


Case = TypeVar("Case")
Law = dict[tuple[int, ...], float]

# ---- logits and settings ----

EIGHTHS = st.integers(-40, 40).map(lambda n: n / 8)  # exact in floating point, and often tied
LOGITS = st.lists(EIGHTHS, min_size=1, max_size=20)
UNTIED = st.lists(EIGHTHS, min_size=1, max_size=20, unique=True)
MASKED = st.tuples(st.lists(st.one_of(EIGHTHS, st.just(-math.inf)), max_size=12), EIGHTHS).map(lambda t: [*t[0], t[1]])
TEMPERATURE = st.sampled_from([0.1, 0.7, 1.0, 2.5, 10.0])
SHARE = st.integers(1, 99).map(lambda n: n / 100)
FILTERS: dict[str, Any] = {"top_k": st.integers(1, 9), "top_p": SHARE, "min_p": SHARE, "typical_p": SHARE}
SIZE = 8
IDS = st.lists(st.integers(0, SIZE - 1), max_size=5)
PENALTY = EIGHTHS.map(lambda n: n / 2)
LOOKS_BACK: dict[str, Any] = {
    "logit_bias": st.dictionaries(st.integers(0, SIZE - 1), st.one_of(EIGHTHS, st.just(-math.inf)), max_size=3),
    "repetition_penalty": st.sampled_from([0.5, 0.8, 1.3, 2.0]),
    "frequency_penalty": PENALTY,
    "presence_penalty": PENALTY,
    "banned_token_ids": IDS,
    "min_new_tokens": st.integers(0, 5),
}


def sampled(**names: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the named settings, at a temperature above 0."""
    return st.fixed_dictionaries({"temperature": TEMPERATURE}, optional=names)


def law(logits: Sequence[float], dtype: torch.dtype = torch.float64, **asked: Any) -> Tensor:
    return probabilities(torch.tensor(logits, dtype=dtype), GenerationSettings(**{"temperature": 1.0, **asked}))


def support(p: Tensor) -> set[int]:
    return set(p.nonzero()[:, 0].tolist())


@MANY
@given(MASKED, sampled(**FILTERS), st.sampled_from([torch.float16, torch.float32, torch.float64]))
def test_a_law_is_not_negative_sums_to_one_and_gives_nothing_to_masked_ids(
    logits: list[float], asked: dict[str, Any], dtype: torch.dtype
) -> None:
    p = law(logits, dtype, **asked)
    assert (p >= 0).all()
    assert p.double().sum().item() == pytest.approx(1, abs=1e-6)
    assert support(p) <= {i for i, score in enumerate(logits) if score > -math.inf}


@MANY
@given(MASKED, sampled(**FILTERS), st.integers(-1000, 1000))
def test_a_constant_added_to_all_logits_changes_nothing(logits: list[float], asked: dict[str, Any], c: int) -> None:
    assert torch.equal(law(logits, **asked), law([score + c for score in logits], **asked))


@MANY
@given(LOGITS, st.sampled_from(["top_k", "top_p", "min_p"]), st.data())
def test_a_stricter_filter_keeps_no_token_more(logits: list[float], name: str, data: st.DataObject) -> None:
    low, high = sorted(data.draw(st.tuples(FILTERS[name], FILTERS[name])))
    strict, loose = (high, low) if name == "min_p" else (low, high)
    assert support(law(logits, **{name: strict})) <= support(law(logits, **{name: loose}))


@MANY
@given(LOGITS, sampled(top_k=FILTERS["top_k"], top_p=SHARE, min_p=SHARE))
def test_the_best_token_is_always_kept(logits: list[float], asked: dict[str, Any]) -> None:
    assert law(logits, **asked)[logits.index(max(logits))] > 0


@MANY
@given(LOGITS, st.integers(1, 25), TEMPERATURE)
def test_top_k_keeps_what_is_no_smaller_than_the_kth(logits: list[float], k: int, temperature: float) -> None:
    kth = sorted(logits, reverse=True)[min(k, len(logits)) - 1]
    assert support(law(logits, top_k=k, temperature=temperature)) == {i for i, s in enumerate(logits) if s >= kth}


@FEW
@given(st.integers(0, 9), st.data())
def test_top_p_that_is_reached_exactly_keeps_no_token_behind(power: int, data: st.DataObject) -> None:
    size = 2**power
    kept = data.draw(st.integers(1, size))
    assert support(law([0.5] * size, top_p=kept / size)) == set(range(kept))


@FEW
@given(LOGITS)
def test_min_p_of_one_keeps_the_best_and_its_equals(logits: list[float]) -> None:
    assert support(law(logits, min_p=1)) == {i for i, score in enumerate(logits) if score == max(logits)}


@MANY
@given(
    st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=70),
    sampled(top_k=FILTERS["top_k"], min_p=SHARE, typical_p=SHARE),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_equal_logits_are_treated_alike(logits: list[float], asked: dict[str, Any], dtype: torch.dtype) -> None:
    """By all filters but top_p, which ranks them by id."""
    p = law(logits, dtype, **asked).tolist()
    assert len(set(zip(logits, p, strict=True))) == len(set(logits))


@MANY
@given(UNTIED, sampled(**FILTERS), st.randoms(use_true_random=False))
def test_renumbered_tokens_have_the_same_law(logits: list[float], asked: dict[str, Any], source: random.Random) -> None:
    order = list(range(len(logits)))
    source.shuffle(order)
    renumbered = law([logits[i] for i in order], **asked)
    assert torch.allclose(renumbered, law(logits, **asked)[order], rtol=0, atol=1e-12)


@MANY
@given(MASKED)
def test_temperature_zero_is_the_lowest_best_id(logits: list[float]) -> None:
    p = law(logits, temperature=0, top_k=2, top_p=0.5, min_p=0.5, typical_p=0.5)
    assert p.tolist() == [float(i == logits.index(max(logits))) for i in range(len(logits))]


@FEW
@given(
    st.integers(0, 2**32),
    st.integers(NUCLEUS_HEAD - 1, 3 * NUCLEUS_HEAD),
    st.sampled_from([0.0, 0.5, 2.0, 9.0]),
    st.sampled_from([1, 64]),
    st.one_of(SHARE, st.sampled_from([1e-9, 0.999, 1 - 1e-6])),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_top_p_of_a_large_vocabulary_is_that_of_a_full_sort(
    seed: int, size: int, scale: float, steps: int, top_p: float, dtype: torch.dtype
) -> None:
    """Flat, peaked and tied rows, alone and together: the head decides for some and the sort for others."""
    noise = torch.randn(3, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits = ((noise * scale * torch.tensor([[0.1], [1.0], [3.0]]) * steps).round() / steps).to(dtype)
    together = probabilities(logits, GenerationSettings(temperature=1.0, top_p=top_p))
    for row, p in zip(logits, together, strict=True):
        kept = nucleus(row.softmax(-1).tolist(), top_p)
        assert support(p) == kept
        assert torch.equal(p, probabilities(row, GenerationSettings(temperature=1.0, top_p=top_p)))


def nucleus(p: list[float], top_p: float) -> set[int]:
    """The ids whose mass ranked above is below `top_p`; equals are ranked by id."""
    kept, above = set(), 0.0
    for i in sorted(range(len(p)), key=lambda i: (-p[i], i)):
        if above < top_p:
            kept.add(i)
        above += p[i]
    return kept


# ---- all settings together, against a reference in plain Python ----


class Asked(NamedTuple):
    """A row of logits, settings, and what stands before it."""

    logits: list[float]
    settings: dict[str, Any]
    prefix: Prefix

    def law(self) -> Tensor:
        return probabilities(
            torch.tensor(self.logits, dtype=torch.float64), GenerationSettings(**self.settings), self.prefix
        )


PREFIXES = st.builds(Prefix, IDS, IDS, st.frozensets(st.integers(0, SIZE - 1), max_size=3))
ROW = st.lists(EIGHTHS, min_size=SIZE, max_size=SIZE)
MASKED_ROW = st.lists(st.one_of(EIGHTHS, EIGHTHS, st.just(-math.inf)), min_size=SIZE, max_size=SIZE)
ANY_SETTINGS = st.fixed_dictionaries(
    {"temperature": st.one_of(st.just(0.0), TEMPERATURE, TEMPERATURE)}, optional={**LOOKS_BACK, **FILTERS}
)
ASKED = st.builds(Asked, MASKED_ROW, ANY_SETTINGS, PREFIXES)


@pytest.mark.parametrize("name", [*LOOKS_BACK, *FILTERS])
@FEW
@given(MASKED_ROW, PREFIXES, TEMPERATURE, st.data())
def test_each_setting_does_what_theory_says(
    name: str, logits: list[float], prefix: Prefix, temperature: float, data: st.DataObject
) -> None:
    value = data.draw({**LOOKS_BACK, **FILTERS}[name])
    agrees_with_reference(Asked(logits, {"temperature": temperature, name: value}, prefix))


@hypothesis.settings(MANY, max_examples=150)
@given(ASKED)
def test_all_settings_together_do_what_theory_says(asked: Asked) -> None:
    agrees_with_reference(asked)


def agrees_with_reference(asked: Asked) -> None:
    wanted = reference(asked)
    assume(
        support(wanted) == support(reference(nudged(asked, 1 + 1e-9))) == support(reference(nudged(asked, 1 - 1e-9)))
    )
    assert torch.allclose(asked.law(), wanted, rtol=0, atol=1e-12, equal_nan=True)


@MANY
@given(ASKED)
def test_banned_ids_have_no_mass_and_a_law_without_survivors_cannot_be_drawn_from(asked: Asked) -> None:
    p, early = asked.law(), len(asked.prefix.output) < asked.settings.get("min_new_tokens", 0)
    banned = {*asked.settings.get("banned_token_ids", ()), *(asked.prefix.stop_ids if early else ())}
    banned |= {i for i, bias in asked.settings.get("logit_bias", {}).items() if bias == -math.inf}
    banned |= {i for i, score in enumerate(asked.logits) if score == -math.inf}
    if len(banned) < SIZE:
        assert not support(p) & banned
    else:
        with pytest.raises(FloatingPointError):
            draw(p, 0.5)


@MANY
@given(
    st.lists(ROW, min_size=1, max_size=4),
    ANY_SETTINGS,
    PREFIXES,
    st.lists(st.integers(0, SIZE - 1), min_size=3, max_size=3),
    st.randoms(use_true_random=False),
)
def test_row_i_is_the_law_behind_its_own_prefix_in_whatever_order_rows_are_made(
    logits: list[list[float]], asked: dict[str, Any], prefix: Prefix, drafts: list[int], source: random.Random
) -> None:
    settings, table_of_logits = GenerationSettings(**asked), torch.tensor(logits, dtype=torch.float64)
    rows = Rows(table_of_logits, settings, prefix, drafts)
    for i in source.sample(range(len(logits)), len(logits)):
        behind = Prefix(prefix.prompt, [*prefix.output, *drafts[:i]], prefix.stop_ids)
        alone = probabilities(table_of_logits[i], settings, behind)
        assert torch.equal(rows[i].nan_to_num(-1), alone.nan_to_num(-1))
    once = Rows(table_of_logits, settings, prefix, drafts).all()
    assert torch.equal(once.nan_to_num(-1), torch.stack([rows[i] for i in range(len(rows))]).nan_to_num(-1))


@MANY
@given(
    ROW,
    st.floats(allow_nan=True),
    st.sampled_from(["temperature", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty"]),
)
def test_a_number_is_refused_by_its_name_or_gives_a_law(logits: list[float], value: float, name: str) -> None:
    asked = {"temperature": 1.0, name: value}
    if not accepted(asked):
        with pytest.raises(UserError, match=f"^{name}: "):
            GenerationSettings(**asked)
        return
    p = probabilities(torch.tensor(logits), GenerationSettings(**asked), Prefix([0], [1, 1, 2]))
    assert p.sum().item() == pytest.approx(1, abs=1e-6)


def accepted(asked: dict[str, Any]) -> bool:
    try:
        GenerationSettings(**asked)
    except UserError:
        return False
    return True


def nudged(asked: Asked, factor: float) -> Asked:
    """With every threshold moved a little: where that matters, the last bit of a sum decides."""
    moved = {name: asked.settings[name] * factor for name in ("top_p", "min_p", "typical_p") if name in asked.settings}
    return asked._replace(settings={**asked.settings, **moved})


def reference(asked: Asked) -> Tensor:
    """theory.md section 9, one step after another, on floats; all NaN where no token is left."""
    settings = GenerationSettings(**asked.settings)
    scores = adjusted(asked.logits, settings, asked.prefix)
    best = max(scores)
    if best == -math.inf:
        nothing = math.nan if settings.temperature else 0.0
        return torch.tensor([math.nan, *[nothing] * (SIZE - 1)], dtype=torch.float64)
    if settings.temperature == 0:
        return torch.tensor([float(i == scores.index(best)) for i in range(SIZE)], dtype=torch.float64)
    kth = sorted(scores, reverse=True)[min(settings.top_k or SIZE, SIZE) - 1]
    p = normal([math.exp((s - best) / settings.temperature) if s >= kth else 0.0 for s in scores])
    p = only(nucleus(p, settings.top_p), p) if settings.top_p < 1 else p
    p = only({i for i in range(SIZE) if p[i] >= settings.min_p * max(p)}, p)
    return torch.tensor(only(typical(p, settings.typical_p), p), dtype=torch.float64)


def adjusted(logits: list[float], settings: GenerationSettings, prefix: Prefix) -> list[float]:
    scores, counts = list(logits), Counter(prefix.output)
    for i in range(SIZE):
        scores[i] += settings.logit_bias.get(i, 0.0)
        if i in prefix.prompt or i in prefix.output:
            rho = settings.repetition_penalty
            scores[i] = scores[i] / rho if scores[i] > 0 else scores[i] * rho
        scores[i] -= settings.frequency_penalty * counts[i] + settings.presence_penalty * (counts[i] > 0)
        early = len(prefix.output) < settings.min_new_tokens and i in prefix.stop_ids
        if early or i in settings.banned_token_ids:
            scores[i] = -math.inf
    return scores


def typical(p: list[float], typical_p: float) -> set[int]:
    surprise = [-math.log(mass) if mass else math.inf for mass in p]
    entropy = sum(mass * s for mass, s in zip(p, surprise, strict=True) if mass)
    distance = [abs(s - entropy) for s in surprise]
    above, last = 0.0, 0.0
    for i in sorted(range(SIZE), key=distance.__getitem__):
        if above < typical_p:
            last = distance[i]
        above += p[i]
    return {i for i in range(SIZE) if distance[i] <= last}


def only(kept: set[int], p: list[float]) -> list[float]:
    return normal([mass if i in kept else 0.0 for i, mass in enumerate(p)])


def normal(weights: list[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]


# ---- drawing ----

BELOW_ONE = math.nextafter(1, 0)
UNIFORM = st.one_of(st.sampled_from([0.0, 5e-324, 2**-53, 0.5, 1 - 2**-24, BELOW_ONE]), st.floats(0, BELOW_ONE))
WEIGHTS = st.lists(st.integers(0, 9), min_size=1, max_size=20).filter(any)


@MANY
@given(
    WEIGHTS,
    st.sampled_from([1e-30, 1 / 3, 1.0, 1e30]),
    st.sampled_from([torch.float32, torch.float64]),
    UNIFORM,
)
def test_what_is_drawn_has_mass(weights: list[int], scale: float, dtype: torch.dtype, v: float) -> None:
    assert weights[draw(torch.tensor(weights, dtype=dtype) * scale, v)] > 0


@MANY
@given(WEIGHTS, st.integers(0, 2**20 - 1))
def test_drawing_inverts_the_cumulated_law(weights: list[int], v: int) -> None:
    """In whole numbers: the first id whose cumulated weight exceeds v times the total."""
    wanted = next(i for i in range(len(weights)) if sum(weights[: i + 1]) << 20 > v * sum(weights))
    assert draw(torch.tensor(weights, dtype=torch.float32), v / 2**20) == wanted


# ---- acceptance rules: safety of every single decision ----

SAMPLERS = [Rejection, Block, ExactMatch]
POOL = [0, 0, 1, 1, 2, 2, 3, 5, 8, 1e-6]
SEED = st.integers(0, 2**32)


def laws(seed: int, rows: int, size: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """[rows, size], with zeros, equal weights and tiny ones among them; no row is empty."""
    picks = torch.randint(len(POOL), (rows, size), generator=torch.Generator().manual_seed(seed))
    weights = torch.tensor(POOL, dtype=dtype)[picks]
    weights[weights.sum(-1) == 0, 0] = 1
    return weights / weights.sum(-1, keepdim=True)


class Blocks(NamedTuple):
    """The inputs of one decision: drafts that their q can have drawn, both laws, and uniforms."""

    x: list[int]
    p: Tensor  # [k + 1, V]
    q: Tensor | None  # [k, V]
    u: list[float]
    v: float

    def judged_by(self, sampler: Any) -> tuple[int, int]:
        return sampler.accept(self.x, self.p, self.q, Given(self.u, self.v))


class Given(Chance):
    """Decides by the uniforms it is given; every drawing uses v."""

    def __init__(self, u: Sequence[float], v: float) -> None:
        super().__init__(0)
        self._ahead += u
        self._v = v

    def draw(self, law: Tensor) -> int:
        return draw(law, self._v)


@st.composite
def blocks(choose: st.DrawFn, soft: bool | None = None) -> Blocks:
    size, k = choose(st.integers(1, 6)), choose(st.integers(0, 4))
    dtype = choose(st.sampled_from([torch.float32, torch.float64]))
    p, q = laws(choose(SEED), 2 * k + 1, size, dtype).split([k + 1, k])
    has_q = choose(st.booleans()) if soft is None else soft
    x = [choose(st.sampled_from(sorted(support(row)) if has_q else range(size))) for row in q]
    u = choose(st.lists(UNIFORM, min_size=k, max_size=k))
    return Blocks(x, p, q if has_q else None, u, choose(UNIFORM))


@pytest.mark.parametrize("sampler", SAMPLERS)
@MANY
@given(blocks())
def test_every_emitted_token_has_mass_under_the_target_and_no_law_is_written_to(sampler: type, block: Blocks) -> None:
    before = block.p.clone(), None if block.q is None else block.q.clone()
    n, y = block.judged_by(sampler())
    assert 0 <= n <= len(block.x)
    assert all(block.p[i, token] > 0 for i, token in enumerate([*block.x[:n], y]))
    assert torch.equal(block.p, before[0])
    assert block.q is None or torch.equal(block.q, before[1])


class NotStrict(Rejection):
    """Accepts while u q <= p: at u = 0 also what the target never says."""

    def accept(self, x: list[int], p: Rows, q: Tensor | None, chance: Chance) -> tuple[int, int]:
        for i, token in enumerate(x):
            (u, *_), _ = chance.uniforms(1)
            chance.spend(1)
            if u * (1.0 if q is None else q[i, token].item()) > p[i][token].item():
                return i, chance.draw(residual(p[i], token if q is None else q[i]))
        return len(x), chance.draw(p[len(x)])


def test_acceptance_that_is_not_strict_emits_a_token_without_mass() -> None:
    def wrong(block: Blocks) -> bool:
        n, _ = block.judged_by(NotStrict())
        return any(block.p[i, token] == 0 for i, token in enumerate(block.x[:n]))

    found(blocks(), wrong)


@pytest.mark.parametrize("sampler", [Rejection, Block])
@MANY
@given(blocks(soft=True))
def test_a_draft_from_the_targets_own_law_is_accepted_whole(sampler: type, block: Blocks) -> None:
    assert block.q is not None
    equal = block._replace(p=torch.cat([block.q, block.p[-1:]]))
    assert equal.judged_by(sampler())[0] == len(block.x)


@pytest.mark.parametrize("sampler", [Rejection, ExactMatch])
@MANY
@given(blocks())
def test_a_rejected_draft_is_not_emitted_in_its_own_place(sampler: type, block: Blocks) -> None:
    """Block verification may: it gives up drafts that it has not found wrong."""
    n, y = block.judged_by(sampler())
    assert n == len(block.x) or y != block.x[n]


@MANY
@given(blocks(soft=False))
def test_without_q_block_verification_is_the_token_rule(block: Blocks) -> None:
    assert block.judged_by(Block()) == block.judged_by(Rejection())


@MANY
@given(blocks(soft=True), st.sampled_from([Rejection, Block]))
def test_a_first_draft_that_its_q_excludes_is_refused(block: Blocks, sampler: type) -> None:
    assume(block.x)
    assert block.q is not None
    q = block.q.index_fill(0, torch.tensor([0]), 0.0)
    with pytest.raises(ContractError):
        block._replace(q=q).judged_by(sampler())


@MANY
@given(blocks())
def test_acceptance_on_a_device_is_acceptance_on_the_host(block: Blocks) -> None:
    u, v = torch.tensor(block.u, dtype=torch.float64), torch.tensor(block.v, dtype=torch.float64)
    x = torch.tensor(block.x, dtype=torch.long)
    there = Rejection().accept_on_device(x, block.p, block.q, u, v)
    assert there.tolist() == list(block.judged_by(Rejection()))


# ---- acceptance rules: the exact law, every decision explored ----


class Models(NamedTuple):
    """A target and a proposer with a law of their own behind every prefix of at most k tokens."""

    k: int
    p: dict[tuple[int, ...], Tensor]
    q: dict[tuple[int, ...], Tensor]

    def block(self, sampler: Any, chance: Chance, soft: bool) -> tuple[int, ...]:
        """What one step emits, drafts drawn from q, or without q the likeliest ones of q."""
        x: tuple[int, ...] = ()
        for _ in range(self.k):
            q = self.q[x]
            x = (*x, chance.propose(q) if soft else int(q.argmax()))
        rows = torch.stack([self.p[x[:i]] for i in range(self.k + 1)])
        drawn_from = torch.stack([self.q[x[:i]] for i in range(self.k)]) if soft and self.k else None
        n, y = sampler.accept(list(x), rows, drawn_from, chance)
        return (*x[:n], y)

    def block_law(self, sampler: Any, soft: bool = True) -> Law:
        law: Law = defaultdict(float)
        for block, mass in explore(lambda chance: self.block(sampler, chance, soft)):
            law[block] += mass
        return law

    def continued(self, law: Law) -> Law:
        """The law of k + 1 tokens, those behind what `law` gives drawn from the target."""
        for length in range(self.k + 1):
            longer: Law = defaultdict(float)
            for ids, mass in law.items():
                if len(ids) > length:
                    longer[ids] += mass
                    continue
                for token, share in enumerate(self.p[ids].tolist()):
                    longer[(*ids, token)] += mass * share
            law = longer
        return law

    def error_of(self, sampler: Any, soft: bool = True) -> float:
        """The largest difference between the law of k + 1 tokens that start with a step, and the target's."""
        got, wanted = self.continued(self.block_law(sampler, soft)), self.continued({(): 1.0})
        return max(abs(got.get(ids, 0.0) - wanted.get(ids, 0.0)) for ids in got.keys() | wanted.keys())

    def survival(self, sampler: Any) -> list[float]:
        """P(N >= i) for i = 1..k."""
        law = self.block_law(sampler)
        return [sum(mass for block, mass in law.items() if len(block) > i) for i in range(1, self.k + 1)]


@st.composite
def models(choose: st.DrawFn) -> Models:
    size, k = choose(st.sampled_from([(1, 2), (2, 0), (2, 3), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2), (4, 3)]))
    prefixes: list[tuple[int, ...]] = [()]
    for i in range(k):
        prefixes += [(*ids, token) for ids in prefixes if len(ids) == i for token in range(size)]
    p, q = laws(choose(SEED), 2 * len(prefixes), size).split(len(prefixes))
    return Models(k, dict(zip(prefixes, p, strict=True)), dict(zip(prefixes, q, strict=True)))


@pytest.mark.parametrize("sampler", SAMPLERS)
@MANY
@given(models())
def test_a_step_and_what_the_target_adds_have_the_targets_law(sampler: type, both: Models) -> None:
    assert both.error_of(sampler(), soft=True) <= 1e-12
    assert both.error_of(sampler(), soft=False) <= 1e-12


@MANY
@given(models())
def test_block_verification_keeps_at_least_as_many_drafts_at_every_place(both: Models) -> None:
    for block, token in zip(both.survival(Block()), both.survival(Rejection()), strict=True):
        assert block >= token - 1e-12


WRONG = {
    "correction from p": TOKEN_RULES["correction from p"],
    "bonus from the previous row": TOKEN_RULES["bonus from the previous row"],
    "token residual": TokenResidual(),
    "first failure": FirstFailure(),
    "redraw": Redraw(),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rule_does_not_have_the_targets_law(wrong: str) -> None:
    case = models().filter(lambda both: both.k > 0)
    found(case, lambda both: both.error_of(WRONG[wrong]) > 1e-3)


def test_a_block_that_ends_at_its_first_failure_keeps_fewer_drafts_than_the_token_rule() -> None:
    def fewer(both: Models) -> bool:
        return sum(both.survival(FirstFailure())) < sum(both.survival(Rejection())) - 1e-3

    found(models(), fewer)


# ---- chance ----

REQUEST = st.tuples(st.integers(0, 9), st.lists(st.integers(0, 20), max_size=4), st.integers(0, 2))
EVEN = torch.ones(997)


def decisions(chance: Chance, order: Sequence[str]) -> dict[str, list[Any]]:
    made: dict[str, list[Any]] = {"propose": [], "passes": [], "draw": []}
    for kind in order:
        made[kind].append(chance.passes(0.5, 1.0) if kind == "passes" else getattr(chance, kind)(EVEN))
    return made


@MANY
@given(REQUEST, st.lists(st.sampled_from(["propose", "passes", "draw"]), max_size=30))
def test_a_stream_does_not_depend_on_what_is_asked_of_the_others(request: Any, order: list[str]) -> None:
    assert decisions(Chance(*request), order) == decisions(Chance(*request), sorted(order))


@MANY
@given(REQUEST, REQUEST)
def test_requests_that_differ_have_streams_that_differ(a: Any, b: Any) -> None:
    same = decisions(Chance(*a), ["draw"] * 8) == decisions(Chance(*b), ["draw"] * 8)
    assert same == (a == b)


@MANY
@given(REQUEST, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 3)), max_size=6))
def test_uniforms_that_were_looked_at_but_not_spent_decide_later(
    request: Any, steps: list[tuple[int, int, int]]
) -> None:
    """Whether the device or the host decides, the i-th decision is made by the i-th number."""
    chance, numbers = Chance(*request), Chance(*request).uniforms(100)[0]
    used = 0
    for looked, spent, asked in steps:
        assert chance.uniforms(looked)[0] == numbers[used : used + looked]
        chance.spend(min(looked, spent))
        used += min(looked, spent)
        assert decisions(chance, ["passes"] * asked)["passes"] == [u < 0.5 for u in numbers[used : used + asked]]
        used += asked


@pytest.mark.parametrize("sampler", SAMPLERS)
@hypothesis.settings(MANY, max_examples=4)
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=2), min_size=1, max_size=4),
    st.integers(0, 9),
    st.randoms(use_true_random=False),
)
def test_a_text_depends_only_on_seed_prompt_and_repeat(
    sampler: type, prompts: list[list[int]], seed: int, source: random.Random
) -> None:
    shuffled = source.sample(prompts, len(prompts))
    alone = {tuple(prompt): texts([prompt] * len(prompts), sampler, seed)[tuple(prompt)] for prompt in prompts}
    for done in (texts(prompts, sampler, seed), texts(shuffled, sampler, seed)):
        assert all(done[prompt] == alone[prompt][: len(done[prompt])] for prompt in done)


def texts(prompts: list[list[int]], sampler: type, seed: int) -> dict[tuple[int, ...], list[list[int]]]:
    """The texts of each prompt, the first of equals first."""
    proposer = TableProposer(table(5, seed=2), 5)
    pipeline = pipeline_of(
        table(5, seed=1), 5, proposer, gamma=2, sampler=sampler(), seed=seed, temperature=1.0, max_new_tokens=6
    )
    done: dict[tuple[int, ...], list[list[int]]] = defaultdict(list)
    for prompt, completion in zip(prompts, pipeline.generate(prompts), strict=True):
        done[tuple(prompt)].append(completion.token_ids)
    return done
