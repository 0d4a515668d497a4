"""What students are taught with: against the sums written out, theory.md section 11, and laws at the edge."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor

from specpipe.config import CONF, build
from specpipe.errors import UserError
from train.losses import (
    LOSSES,
    TINY,
    LkHybrid,
    Mixture,
    ce,
    head_weights,
    jsd,
    kl,
    lk_hybrid,
    mean_over,
    mixture,
    nla,
    overlap,
    reverse_kl,
    tv,
)

Law = list[float]
FILES = sorted(Path(CONF, "loss").glob("*.yaml"))
EVEN = ([0.5, 0.5], [0.9, 0.1])
P3 = ([0.5, 0.3, 0.2], [0.6, 0.3, 0.1])
P4 = ([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4])
TABLE = {  # theory.md section 11
    "kl": (0.5108, 0.0475, 0.4564),
    "reverse_kl": (0.3681, 0.0401, 0.4564),
    "jsd": (0.1017, 0.0108, 0.1064),
    "tv": (0.4, 0.1, 0.4),
    "nla": (0.5108, 0.1054, 0.5108),
    "lk_hybrid": (0.4183, 0.0965, 0.4093),
    "ce": (0.1054, 0.5108, 2.3026),
}
NO_MASS = dict.fromkeys(TABLE, 0.0) | {"tv": 1.0, "nla": -math.log(TINY)}


# The sums, written out over lists.


def softmax(logits: Law) -> Law:
    weights = [math.exp(each - max(logits)) for each in logits]
    return [each / sum(weights) for each in weights]


def divergence(p: Law, q: Law) -> float:
    return sum(a * math.log(a / max(b, TINY)) for a, b in zip(p, q, strict=True) if a > 0)


def written_out(name: str, p: Law, logits: Law) -> float:
    q, mass = softmax(logits), sum(p)
    within = [each / mass for each in p]
    middle = [(a + b) / 2 for a, b in zip(within, q, strict=True)]
    alpha = sum(min(a, b) for a, b in zip(p, q, strict=True))
    if name == "lk_hybrid":
        r = math.exp(-3 * alpha)
        return r * divergence(within, q) + (1 - r) * (1 - alpha)
    return {
        "kl": divergence(within, q),
        "reverse_kl": divergence(q, within),
        "jsd": (divergence(within, middle) + divergence(q, middle)) / 2,
        "tv": 1 - alpha,
        "nla": -math.log(alpha),
        "ce": -math.log(q[p.index(max(p))]),
    }[name]


def slope(name: str, p: Law, logits: Law) -> Law:
    """The gradient to the logits, by central differences."""
    if name == "lk_hybrid":
        alpha = 1 - written_out("tv", p, logits)
        r = math.exp(-3 * alpha)
        pairs = zip(slope("kl", p, logits), slope("tv", p, logits), strict=True)
        return [r * a + (1 - r) * b for a, b in pairs]
    return differences(name, p, logits)


def differences(name: str, p: Law, logits: Law, step: float = 1e-5) -> Law:
    def at(i: int, by: float) -> float:
        return written_out(name, p, [each + by * (j == i) for j, each in enumerate(logits)])

    return [(at(i, step) - at(i, -step)) / (2 * step) for i in range(len(logits))]


def random_laws(count: int, mass: float, zeros: int = 2, size: int = 7) -> tuple[list[Law], list[Law]]:
    """Target laws of the given mass in D, some ids without any, and logits."""
    chance = random.Random(f"{count} {mass}")
    p, logits = [], []
    for _ in range(count):
        weights = [chance.random() ** 2 for _ in range(size - zeros)] + [0.0] * zeros
        chance.shuffle(weights)
        p.append([mass * each / sum(weights) for each in weights])
        logits.append([chance.gauss(0, 2) for _ in range(size)])
    return p, logits


WHOLE, TRIMMED = random_laws(60, mass=1.0), random_laws(60, mass=0.6)


def gradient(loss: Callable[[Tensor, Tensor], Tensor], p: Tensor, logits: Tensor) -> Tensor:
    logits = logits.detach().clone().requires_grad_()
    loss(p, logits).sum().backward()
    assert logits.grad is not None
    return logits.grad


def far_from_sums(loss: Callable[[Tensor, Tensor], Tensor], name: str, laws: tuple[list[Law], list[Law]]) -> float:
    """The largest difference of any row from the sum written out."""
    told = loss(torch.tensor(laws[0]), torch.tensor(laws[1])).tolist()
    rows = [written_out(name, p, logits) for p, logits in zip(*laws, strict=True)]
    return max(abs(a - b) for a, b in zip(told, rows, strict=True))


def far_from_slopes(loss: Callable[[Tensor, Tensor], Tensor], name: str, laws: tuple[list[Law], list[Law]]) -> float:
    told = gradient(loss, torch.tensor(laws[0]), torch.tensor(laws[1]))
    rows = torch.tensor([slope(name, p, logits) for p, logits in zip(*laws, strict=True)])
    return (told - rows).abs().max().item()


def one_hot(ids: list[int], size: int) -> Tensor:
    return torch.eye(size)[ids]


# Values and gradients.


@pytest.mark.parametrize("name", TABLE)
def test_values_of_theory_md(name: str) -> None:
    for (p, q), value in zip((EVEN, P3, P4), TABLE[name], strict=True):
        [told] = LOSSES[name](torch.tensor([p]), torch.tensor([q]).log()).tolist()
        assert told == pytest.approx(value, abs=6e-5)


def test_every_loss_has_a_value_of_theory_md() -> None:
    assert set(TABLE) == set(LOSSES)


@pytest.mark.parametrize("laws", [WHOLE, TRIMMED], ids=["whole", "trimmed"])
@pytest.mark.parametrize("name", TABLE)
def test_values_and_gradients_are_the_sums_written_out(name: str, laws: tuple[list[Law], list[Law]]) -> None:
    assert far_from_sums(LOSSES[name], name, laws) < 2e-5
    assert far_from_slopes(LOSSES[name], name, laws) < 2e-5


def renormalising_first(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda p, logits: loss(p / p.sum(-1, keepdim=True), logits)


@pytest.mark.parametrize("name", ["tv", "nla", "lk_hybrid"])
def test_alpha_on_renormalised_probabilities_is_caught(name: str) -> None:
    wrong = renormalising_first(LOSSES[name])
    assert far_from_sums(wrong, name, WHOLE) < 2e-5  # which a whole vocabulary cannot tell
    assert far_from_sums(wrong, name, TRIMMED) > 0.1
    assert far_from_slopes(wrong, name, TRIMMED) > 0.1


def test_kl_without_renormalising_is_caught() -> None:
    def wrong(p: Tensor, logits: Tensor) -> Tensor:
        return (torch.xlogy(p, p) - p * logits.log_softmax(-1)).sum(-1)

    assert far_from_sums(wrong, "kl", WHOLE) < 2e-5
    assert far_from_sums(wrong, "kl", TRIMMED) > 0.1


def test_hybrid_whose_weight_has_a_gradient_is_caught() -> None:
    def wrong(p: Tensor, logits: Tensor) -> Tensor:
        r = torch.exp(-3 * overlap(p, logits))
        return r * kl(p, logits) + (1 - r) * tv(p, logits)

    assert far_from_sums(wrong, "lk_hybrid", TRIMMED) < 2e-5  # the values are right
    assert far_from_slopes(wrong, "lk_hybrid", TRIMMED) > 0.1


def test_overlap_is_at_most_the_mass_within_the_kept_ids() -> None:
    p, logits = map(torch.tensor, TRIMMED)
    assert (overlap(p, logits) <= p.sum(-1) + 1e-6).all()
    p3, q3 = map(torch.tensor, P3)
    assert overlap(p3[None, :2], q3[None, :2].log()).item() == pytest.approx(0.5 + 0.3)  # q' = (2/3, 1/3)


# The identities of theory.md section 11.


@pytest.mark.parametrize("name", sorted(set(TABLE) - {"ce"}))
def test_the_target_as_its_own_student_has_no_loss(name: str) -> None:
    logits = torch.tensor(WHOLE[1])
    torch.testing.assert_close(LOSSES[name](logits.softmax(-1), logits), torch.zeros(len(logits)), atol=1e-6, rtol=0)


def test_with_a_certain_target_nla_is_ce_is_kl() -> None:
    logits = torch.tensor(WHOLE[1])
    p = one_hot([row % 7 for row in range(len(logits))], 7)
    for loss in (nla, kl):
        torch.testing.assert_close(loss(p, logits), ce(p, logits))
        torch.testing.assert_close(gradient(loss, p, logits), gradient(ce, p, logits), atol=1e-6, rtol=1e-5)


def test_hybrid_goes_from_kl_to_tv_with_eta() -> None:
    p, logits = map(torch.tensor, TRIMMED)
    assert torch.equal(lk_hybrid(p, logits, eta=0), kl(p, logits))
    torch.testing.assert_close(lk_hybrid(p, logits, eta=1e6), tv(p, logits))


def test_tv_is_at_most_the_root_of_half_kl() -> None:
    p, logits = map(torch.tensor, WHOLE)
    assert (tv(p, logits) <= (kl(p, logits) / 2).sqrt() + 1e-6).all()


def test_gradient_of_nla_is_that_of_tv_over_alpha() -> None:
    p, logits = map(torch.tensor, TRIMMED)
    alpha = overlap(p, logits)[:, None]
    torch.testing.assert_close(gradient(nla, p, logits), gradient(tv, p, logits) / alpha, atol=1e-6, rtol=1e-5)


def test_jsd_is_at_most_log_2_and_knows_no_order() -> None:
    certain = one_hot([0], 3)
    assert jsd(certain, torch.tensor([[-60.0, 0.0, 0.0]])).item() == pytest.approx(math.log(2))
    p, logits = map(torch.tensor, random_laws(20, mass=1.0, zeros=0))
    torch.testing.assert_close(jsd(p, logits), jsd(logits.softmax(-1), p.log()))
    torch.testing.assert_close(reverse_kl(p, logits), kl(logits.softmax(-1), p.log()))
    torch.testing.assert_close(overlap(p, logits), overlap(logits.softmax(-1), p.log()))


@pytest.mark.parametrize(("loss", "norm"), [(kl, 1.798), (tv, 0.0020), (nla, 0.0198)])
def test_tv_hardly_moves_an_untrained_student(loss: Any, norm: float) -> None:
    size = 1000
    p = torch.full((1, size), 0.1 / (size - 1))
    p[0, 17] = 0.9
    assert gradient(loss, p, torch.zeros(1, size)).abs().sum().item() == pytest.approx(norm, rel=0.01)


def test_ce_takes_the_lowest_of_equally_likely_ids() -> None:
    p, logits = torch.tensor([[0.2, 0.4, 0.4]]), torch.tensor([[0.0, 1.0, 2.0]])
    assert ce(p, logits).item() == -logits.log_softmax(-1)[0, 1].item()


# Laws at the edge.


@pytest.mark.parametrize("name", TABLE)
def test_row_without_mass_teaches_nothing(name: str) -> None:
    p, logits = torch.zeros(2, 5), torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 0.0, -300.0, 300.0, 1.0]])
    assert LOSSES[name](p, logits).tolist() == pytest.approx([NO_MASS[name]] * 2)
    assert torch.equal(gradient(LOSSES[name], p, logits), torch.zeros(2, 5))


@pytest.mark.parametrize("name", TABLE)
def test_extreme_laws_give_finite_values_and_gradients(name: str) -> None:
    p = torch.tensor([[1.0, 0, 0], [0, 1.0, 0], [1 - 1e-7, 1e-7, 0], [1.0, 1e-45, 1e-39], [0, 1e-39, 0], [0.5, 0.5, 0]])
    for scale in (0.0, 1.0, 50.0, 120.0, 1e4, 1e30):
        logits = torch.tensor([[1.0, 0.0, -1.0], [-1.0, 0.0, 1.0], [-1.0, -1.0, 1.0]]) * scale
        for row in logits:
            values, slopes = LOSSES[name](p, row.expand(6, 3)), gradient(LOSSES[name], p, row.expand(6, 3))
            assert values.isfinite().all(), (scale, row)
            assert slopes.isfinite().all(), (scale, row)


def test_logarithm_of_zero_is_caught_by_a_certain_target() -> None:
    def wrong(p: Tensor, logits: Tensor) -> Tensor:
        return (p * (p.log() - logits.log_softmax(-1))).sum(-1)

    assert wrong(one_hot([0], 3), torch.zeros(1, 3)).isnan().all()


def test_reverse_kl_of_a_certain_target_costs_87_nats_for_all_mass_elsewhere() -> None:
    value = reverse_kl(one_hot([0], 2), torch.tensor([[-40.0, 0.0]])).item()
    assert value == pytest.approx(-math.log(TINY)) == pytest.approx(87.3, abs=0.1)


@pytest.mark.parametrize("name", TABLE)
def test_half_precision_is_computed_in_float32(name: str) -> None:
    p, logits = (torch.tensor(each).bfloat16() for each in TRIMMED)
    exact = LOSSES[name](p.float(), logits.float())
    assert torch.equal(LOSSES[name](p, logits), exact)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(LOSSES[name](p, logits), exact)


def test_sums_in_half_precision_are_caught() -> None:
    def wrong(p: Tensor, logits: Tensor) -> Tensor:
        return (1 - torch.minimum(p, logits.softmax(-1)).sum(-1)).float()

    p, logits = (torch.tensor(each).bfloat16() for each in TRIMMED)
    assert (wrong(p, logits) - tv(p.float(), logits.float())).abs().max() > 1e-3


# Means.

VALUES = torch.tensor([[3.0, 1.0, 4.0, 1.0], [5.0, 9.0, 2.0, 6.0], [5.0, 3.0, 5.0, 8.0]])
MASK = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])  # each row one rank's, or one accumulated batch's
MEAN = (3 + 5 + 9 + 2) / 4


def step_loss(of_part: Callable[[Tensor, Tensor], Tensor]) -> float:
    return sum(of_part(values, mask).item() for values, mask in zip(VALUES, MASK, strict=True))


def test_parts_of_a_step_add_up_to_its_mean() -> None:
    assert mean_over(VALUES, MASK, 4).item() == MEAN
    assert step_loss(lambda values, mask: mean_over(values, mask, MASK.sum())) == MEAN


@pytest.mark.parametrize(
    "wrong",
    [
        lambda values, mask: (values * mask).sum() / VALUES.numel(),
        lambda values, mask: (values * mask).sum() / mask.sum().clamp(min=1) / len(VALUES),
        lambda values, mask: values.sum() / VALUES.numel(),
    ],
    ids=["over batch times length", "mean of the parts' means", "mask left out"],
)
def test_wrong_mean_is_caught_by_unequal_masks(wrong: Any) -> None:
    assert step_loss(wrong) != pytest.approx(MEAN, rel=0.05)


@pytest.mark.parametrize("count", [0, 0.0, torch.tensor(0), 4.0])
def test_batch_without_supervised_rows_gives_0_and_no_gradient(count: Tensor | float) -> None:
    values, nobody = VALUES.clone().requires_grad_(), torch.zeros_like(VALUES, dtype=torch.bool)
    loss = mean_over(values, nobody, count)
    assert loss.item() == 0
    [slopes] = torch.autograd.grad(loss, values)
    assert torch.equal(slopes, torch.zeros_like(VALUES))


def test_gradient_reaches_supervised_rows_only() -> None:
    p, logits = map(torch.tensor, WHOLE)
    mask = torch.arange(len(logits)) % 3 == 0
    slopes = gradient(lambda p, logits: mean_over(lk_hybrid(p, logits), mask, mask.sum()), p, logits)
    assert torch.equal(slopes.abs().sum(-1) > 0, mask)


def test_head_weights_fall_by_the_decay_and_sum_to_1() -> None:
    assert head_weights(3).tolist() == pytest.approx([1 / 2.44, 0.8 / 2.44, 0.64 / 2.44])
    assert head_weights(1).tolist() == [1.0]
    assert head_weights(4, decay=1.0).tolist() == [0.25] * 4


# Components.


def test_group_has_an_option_for_every_loss() -> None:
    assert {file.stem for file in FILES} == {*LOSSES, "mixture"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_option_builds_the_loss_of_its_name(file: Path) -> None:
    p, logits = map(torch.tensor, TRIMMED)
    built = build(OmegaConf.load(file), "loss")
    expected = 0.1 * ce(p, logits) + 0.9 * tv(p, logits) if file.stem == "mixture" else LOSSES[file.stem](p, logits)
    torch.testing.assert_close(built(p, logits), expected, rtol=0, atol=1e-6)


def test_eta_and_weights_reach_the_loss() -> None:
    p, logits = map(torch.tensor, TRIMMED)
    assert torch.equal(LkHybrid(eta=0.5)(p, logits), lk_hybrid(p, logits, eta=0.5))
    assert torch.equal(Mixture(weights={"kl": 2})(p, logits), 2 * kl(p, logits))
    assert torch.equal(mixture(p, logits, {"kl": 1, "tv": 3}), kl(p, logits) + 3 * tv(p, logits))


def test_weight_0_takes_a_loss_out() -> None:
    p, logits = map(torch.tensor, TRIMMED)
    assert torch.equal(Mixture(weights={"ce": 0, "tv": 1.0})(p, logits), tv(p, logits))


@pytest.mark.parametrize(
    ("option", "values", "message"),
    [
        ("lk_hybrid", {"eta": -1}, "loss.eta: -1 is not a number from 0 up."),
        ("mixture", {"weights": {"tvv": 1}}, "loss.weights.tvv: no such loss; there are ce, .*Did you mean 'tv'?"),
        ("mixture", {"weights": {"mixture": 1}}, "loss.weights.mixture: no such loss"),
        ("mixture", {"weights": {"kl": -1}}, "loss.weights.kl: -1 is not a number from 0 up."),
        ("mixture", {"weights": {"ce": 0, "tv": 0}}, "loss.weights: .* has no loss with a weight above 0."),
        ("mixture", {"weights": "kl"}, "loss.weights: 'kl' does not give losses a weight"),
        ("kl", {"eta": 3}, "loss.eta: no such key"),
    ],
)
def test_wrong_value_is_refused_by_its_key(option: str, values: dict[str, Any], message: str) -> None:
    node = OmegaConf.load(Path(CONF, "loss", f"{option}.yaml"))
    with pytest.raises(UserError, match=message):
        build(OmegaConf.merge(node, values), "loss")


def test_mixture_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match=r"weights: \{\} has no loss"):
        Mixture(weights={})
