"""The token-level rule at its corners, and the device's version against the host's."""

from __future__ import annotations

import random

import pytest
import torch

from specpipe.chance import Chance
from specpipe.distribution import Rows
from specpipe.errors import ContractError
from specpipe.samplers.rejection import Rejection, residual
from specpipe.settings import GenerationSettings

SAMPLE = GenerationSettings(temperature=1.0)


class Fixed(Chance):
    """Plays back given uniforms."""

    def __init__(self, u: list[float], v: float) -> None:
        self._ahead: list[float] = []
        self._accepting = self._drafting = Playback(u)  # type: ignore[assignment]
        self._drawing = Playback([v])  # type: ignore[assignment]


class Playback:
    def __init__(self, values: list[float]) -> None:
        self.values = list(values)

    def random(self) -> float:
        return self.values.pop(0)


def rows(*laws: list[float]) -> Rows:
    return Rows(torch.tensor(laws, dtype=torch.float64).log(), SAMPLE)


def test_equal_laws_always_accept_even_at_the_largest_uniform() -> None:
    """Strict < without division: u = 1 - 2^-53 and u = 1 - 2^-24 still accept when p = q."""
    for u in (1 - 2**-24, 1 - 2**-53):
        for q in (0.3, 1e-30, 1.0, 1 / 3):
            assert Fixed([u], 0).passes(q, q)


def test_a_token_without_target_mass_never_passes_even_at_u_zero() -> None:
    """The wrong variant, <=, would emit a token outside top-k once in 2^24 draws."""
    assert not Fixed([0.0], 0).passes(0.0, 0.4)
    assert 0.0 * 0.4 <= 0.0


def test_residuals_of_the_worked_examples() -> None:
    p3, q3 = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.6, 0.3, 0.1]).double()
    p4, q4 = torch.tensor([0.4, 0.3, 0.2, 0.1]).double(), torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    normal = lambda law: (law / law.sum()).tolist()  # noqa: E731
    assert normal(residual(p3, q3)) == pytest.approx([0, 0, 1])
    assert normal(residual(p4, q4)) == pytest.approx([0.75, 0.25, 0, 0])
    assert normal(residual(p3, 0)) == pytest.approx([0, 0.6, 0.4])
    assert torch.minimum(p3, q3).sum().item() == pytest.approx(0.9)


def test_a_residual_that_rounds_to_nothing_falls_back_to_p() -> None:
    """C12: q one float step above p everywhere; a forced rejection draws from p, not from 0/0."""
    p = torch.tensor([0.25, 0.25, 0.5])
    q = torch.nextafter(p, torch.ones(3))
    assert (p - q).clamp(min=0).sum() == 0
    assert torch.equal(residual(p, q), p)
    assert torch.equal(residual(torch.tensor([0.0, 1.0]), 1), torch.tensor([0.0, 1.0]))


def test_the_laws_handed_in_are_left_as_they_were() -> None:
    """C11."""
    logits = torch.tensor([[0.5, 0.3, 0.2]] * 3).log()
    p, before, q = Rows(logits, SAMPLE), logits.softmax(-1), torch.full((2, 3), 1 / 3)
    for laws in (None, q):
        Rejection().accept([0, 0], p, laws, Chance(1))
        assert torch.equal(torch.stack([p[0], p[1], p[2]]), before)
    assert torch.equal(q, torch.full((2, 3), 1 / 3))


def test_bonus_and_correction_come_from_their_own_rows() -> None:
    """C9: row i can only yield ids 10i..10i+2, so the row of a token can be read off."""
    laws = torch.zeros(4, 40, dtype=torch.float64)
    for i in range(4):
        laws[i, 10 * i : 10 * i + 3] = 1 / 3
    p = Rows(laws.log(), SAMPLE)
    n, y = Rejection().accept([0, 10, 20], p, None, Fixed([0, 0, 0], 0.5))
    assert (n, y // 10) == (3, 3)
    n, y = Rejection().accept([0, 10, 20], p, None, Fixed([0, 0.9], 0.5))
    assert (n, y // 10) == (1, 1)
    assert y != 10


def test_first_rejection_ends_the_block() -> None:
    chance = Fixed([0.9, 0.0], 0.5)
    assert Rejection().accept([0, 0], rows([0.5, 0.5], [0.5, 0.5], [0.5, 0.5]), None, chance) == (0, 1)
    assert chance._accepting.values == [0.0]  # type: ignore[attr-defined]


def test_greedy_accepts_only_the_argmax() -> None:
    """C10: soft p / q is 1.5 at the draft's best token 0, yet temperature 0 emits 1 and accepts nothing."""
    logits = torch.tensor([[0.3, 0.5, 0.05, 0.05, 0.05, 0.05]] * 2).log()
    greedy = Rows(logits, GenerationSettings(temperature=0.0))
    assert Rejection().accept([0], greedy, None, Chance(0)) == (0, 1)
    assert Rejection().accept([1], greedy, None, Chance(0)) == (1, 1)


def test_a_draft_its_own_q_excludes_is_an_error() -> None:
    """C3: q(x) = 0 for the proposal x with p(x) > 0: never NaN, never accepted in silence."""
    q = torch.tensor([[0.0, 1.0]])
    with pytest.raises(ContractError, match="token 0"):
        Rejection().accept([0], rows([0.5, 0.5], [0.5, 0.5]), q, Chance(0))
    x, u, v = torch.tensor([0]), torch.tensor([0.5]).double(), torch.tensor(0.5).double()
    assert Rejection().accept_on_device(x, torch.full((2, 2), 0.5), q, u, v)[0] == -1


def test_acceptance_on_a_device_decides_as_on_the_host() -> None:
    """Same uniforms, same decision: 500 random blocks, soft and one-hot q, rows with zeros, k from 0 to 4."""
    compare(torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_acceptance_on_cuda_decides_as_on_the_host() -> None:
    compare(torch.device("cuda"))


def compare(device: torch.device) -> None:
    generator, source = torch.Generator().manual_seed(3), random.Random(3)
    for case in range(500):
        k, size = case % 5, 7
        p = torch.rand(k + 1, size, generator=generator) ** 3
        p[torch.rand(k + 1, size, generator=generator) < 0.3] = 0
        p[:, 0] += 0.01
        q = torch.rand(k, size, generator=generator) + 0.01
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
        x = torch.randint(size, (k,), generator=generator)
        laws = None if case % 2 else q
        u, v = [source.random() for _ in range(k)], source.random()
        host = Rejection().accept(x.tolist(), p, laws, Fixed(u, v))  # type: ignore[arg-type]
        there = Rejection().accept_on_device(
            x.to(device),
            p.to(device),
            None if laws is None else laws.to(device),
            torch.tensor(u, dtype=torch.float64, device=device),
            torch.tensor(v, dtype=torch.float64, device=device),
        )
        assert there.tolist() == list(host)
