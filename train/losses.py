"""What a student is taught with (config group `loss`): per-row distances between the target's law and the student's.

Knows probabilities and logits; knows neither models nor batches of text. The letters: D the kept ids, p the target's
true probabilities of them, P_D = sum_D p <= 1 the target's mass in D, p' = p / P_D, q = softmax(logits) on D.

    alpha = sum_D min(p, q)        with the true p: what lies outside D can never be accepted

`kl`, `reverse_kl` and `jsd` compare q with p'; `tv`, `nla` and the weight of `lk_hybrid` use alpha. Every loss takes
p [N, D] and finite logits [N, D] of any float type, computes in float32 and returns [N]. Values and gradients are
finite for every law, also a one-hot p (temperature 0), with 0 log 0 = 0. In a row with P_D = 0 no student on D can do
better: its gradient is 0, its value 1 for `tv`, -log(TINY) for `nla`, 0 for all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from specpipe.errors import UserError, nearest, number

TINY = torch.finfo(torch.float32).tiny  # the smallest normal number, 1.2e-38; no logarithm is taken of less


class Loss(Protocol):
    """A callable component; a class with this one method, named in a YAML file, is a loss."""

    def __call__(self, p: Tensor, logits: Tensor) -> Tensor:
        """The distance of each row, [N].

        Args:
            p: [N, D] the target's probabilities of the kept ids, not renormalised; they carry no gradient.
            logits: [N, D] of the student.
        """
        ...


def overlap(p: Tensor, logits: Tensor) -> Tensor:
    """alpha = sum_D min(p, q) [N]: the probability that the target accepts one token drawn from q."""
    return _overlap(p.float(), _log_softmax(logits))


def kl(p: Tensor, logits: Tensor) -> Tensor:
    """KL(p' | q) = sum p' log(p'/q) [N], nats."""
    return _kl(p.float(), _log_softmax(logits))


def reverse_kl(p: Tensor, logits: Tensor) -> Tensor:
    """KL(q | p') = sum q log(q/p') [N], nats; seeks one mode of p'.

    It is infinite where p' = 0. Here p' counts as at least TINY, which changes no probability that float32 holds in
    full; mass of q where p' = 0 thus costs -log(TINY) = 87.3 nats, and rows of temperature 0 outweigh sampled ones.
    """
    p, log_q = p.float(), _log_softmax(logits)
    values = (log_q.exp() * (log_q - _log(_renormalised(p)))).sum(-1)
    return _zero_without_mass(values, p)


def jsd(p: Tensor, logits: Tensor) -> Tensor:
    """KL(p' | m)/2 + KL(q | m)/2 with m = (p' + q)/2 [N], nats; at most log 2."""
    p, log_q = p.float(), _log_softmax(logits)
    p_, q = _renormalised(p), log_q.exp()
    log_m = _log((p_ + q) / 2)
    values = (p_ * (_log(p_) - log_m) + q * (log_q - log_m)).sum(-1) / 2
    return _zero_without_mass(values, p)


def tv(p: Tensor, logits: Tensor) -> Tensor:
    """1 - alpha [N]: the probability of a rejection, what speculation pays for. Hardly moves an untrained student."""
    return 1 - overlap(p, logits)


def nla(p: Tensor, logits: Tensor) -> Tensor:
    """-log alpha [N], nats: the gradient of `tv` over alpha. An alpha below TINY counts as TINY and has no gradient."""
    return -_log(overlap(p, logits))


def ce(p: Tensor, logits: Tensor) -> Tensor:
    """-log q(argmax_D p) [N], nats: the hard label; of equals the lowest id."""
    p = p.float()
    label = p.argmax(-1, keepdim=True)  # the first of equals
    return _zero_without_mass(-_log_softmax(logits).gather(-1, label).squeeze(-1), p)


def lk_hybrid(p: Tensor, logits: Tensor, eta: float = 3.0) -> Tensor:
    """r kl + (1 - r) tv with r = exp(-eta alpha), r without gradient [N] (LK losses, arXiv 2602.23881).

    Starts as `kl`, whose gradient is large where alpha is small, and ends as `tv`, the quantity itself.
    """
    p, log_q = p.float(), _log_softmax(logits)
    alpha = _overlap(p, log_q)
    r = torch.exp(-eta * alpha.detach())
    return r * _kl(p, log_q) + (1 - r) * (1 - alpha)


LOSSES: dict[str, Loss] = {
    "ce": ce,
    "jsd": jsd,
    "kl": kl,
    "lk_hybrid": lk_hybrid,
    "nla": nla,
    "reverse_kl": reverse_kl,
    "tv": tv,
}


def mixture(p: Tensor, logits: Tensor, weights: Mapping[str, float]) -> Tensor:
    """sum of weight * loss over `weights` [N], names as in LOSSES; `lk_hybrid` with its own eta."""
    return torch.stack([weight * LOSSES[name](p, logits) for name, weight in weights.items()]).sum(0)


class Kl:
    """`kl` as a component."""

    __call__ = staticmethod(kl)


class ReverseKl:
    """`reverse_kl` as a component."""

    __call__ = staticmethod(reverse_kl)


class Jsd:
    """`jsd` as a component."""

    __call__ = staticmethod(jsd)


class Tv:
    """`tv` as a component."""

    __call__ = staticmethod(tv)


class Nla:
    """`nla` as a component."""

    __call__ = staticmethod(nla)


class Ce:
    """`ce` as a component."""

    __call__ = staticmethod(ce)


class LkHybrid:
    """`lk_hybrid` with a given eta.

    Args:
        eta: how fast it goes from `kl` to `tv` as alpha grows; 0 is `kl`.
    """

    def __init__(self, *, eta: float = 3.0) -> None:
        self._eta = number("eta", eta, 0)

    def __call__(self, p: Tensor, logits: Tensor) -> Tensor:
        return lk_hybrid(p, logits, self._eta)


class Mixture:
    """`mixture` with given weights.

    Args:
        weights: loss name to weight, 0 or more; they need not sum to 1. A loss with weight 0 is left out.
    """

    def __init__(self, *, weights: Mapping[str, float]) -> None:
        if not isinstance(weights, Mapping):
            raise UserError(f"{weights!r} does not give losses a weight, as {{ce: 0.1, tv: 0.9}} does.", key="weights")
        self._weights: dict[str, float] = {}
        for name, value in weights.items():
            key = f"weights.{name}"
            if name not in LOSSES:
                raise UserError(f"no such loss; there are {', '.join(LOSSES)}.{nearest(str(name), LOSSES)}", key=key)
            if weight := number(key, value, 0):
                self._weights[name] = weight
        if not self._weights:
            raise UserError(f"{dict(weights)!r} has no loss with a weight above 0.", key="weights")

    def __call__(self, p: Tensor, logits: Tensor) -> Tensor:
        return mixture(p, logits, self._weights)


def mean_over(values: Tensor, mask: Tensor, count: Tensor | float) -> Tensor:
    """The sum of `values` where `mask` holds, over `count` [].

    With the count of the whole optimiser step the parts of ranks and of accumulated batches add up to its mean, however
    unequal their masks. (DDP averages over its ranks: there the result times the number of ranks.)

    Args:
        values: per-row losses, any shape.
        mask: the same shape; true, or not 0, in supervised rows.
        count: supervised rows of the whole optimiser step, over all ranks and accumulated batches. 0 counts as 1, so
            that a step without supervised rows gives 0.
    """
    return values.where(mask.bool(), 0.0).sum() / torch.as_tensor(count).clamp(min=1)


def head_weights(n: int, decay: float = 0.8) -> Tensor:
    """[n] float32: decay^i / sum of decay^i for head i; they sum to 1, so the learning rate does not depend on n."""
    weights = decay ** torch.arange(n, dtype=torch.float32)
    return weights / weights.sum()


def _log_softmax(logits: Tensor) -> Tensor:
    return logits.float().log_softmax(-1)


def _log(x: Tensor) -> Tensor:
    """log x, at least log(TINY): finite, so that 0 log 0 is 0, and without gradient below TINY."""
    return x.clamp(min=TINY).log()


def _renormalised(p: Tensor) -> Tensor:
    """p' [N, D]; 0 throughout in a row without mass."""
    return p / p.sum(-1, keepdim=True).clamp(min=TINY)


def _zero_without_mass(values: Tensor, p: Tensor) -> Tensor:
    """`values` [N], 0 and without gradient in rows with P_D = 0."""
    return values.where(p.sum(-1) > 0, 0.0)


def _overlap(p: Tensor, log_q: Tensor) -> Tensor:
    return torch.minimum(p, log_q.exp()).sum(-1)


def _kl(p: Tensor, log_q: Tensor) -> Tensor:
    p_ = _renormalised(p)
    return (p_ * (_log(p_) - log_q)).sum(-1)
