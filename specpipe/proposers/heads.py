"""Heads on the target's last hidden state: the modules, shared by training and drafting.

A head i = 0 .. n-1 guesses the token i + 1 places behind the newest one, y, from s, the state that y was drawn from,
without running the target again. Neither the target's embedding E nor its head's rows W are part of a module: it is
given rows of E and gives features [H], and logits are features @ W^T. Knows tensors; knows nothing of requests.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specpipe.errors import UserError, integer, one_line
from specpipe.proposers.artifact import Card

EPSILON = 1e-6  # of the norms


class Heads(nn.Module):
    """What both kinds have in common.

    `kind` is that of their `Card`; `sees_drafts` says whether a guess depends on those before it.

    Args:
        hidden: H, size of the target's state.
        heads: n.
    """

    kind: str
    sees_drafts: bool

    def __init__(self, *, hidden: int, heads: int) -> None:
        super().__init__()
        self.hidden, self.heads = integer("hidden", hidden, 1), integer("heads", heads, 1)

    def step(self, i: int, carry: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Head i: from its carry and the token before its guess to the next carry and its feature, [..., H] each.

        Args:
            i: 0 .. n-1, in this order.
            carry: [..., H] the target's state for head 0, else what head i - 1 gave.
            embedded: [..., H] E[y_i], y_0 being the newest committed token and y_i the i-th draft.
        """
        raise NotImplementedError

    def features(self, states: Tensor, embedded: Tensor) -> Tensor:
        """Of all heads, for training. states: [N, H]; embedded: [N, n, H] E[y_0] .. E[y_n-1]. Returns [N, n, H]."""
        features, carry = [], states
        for i in range(self.heads):
            carry, feature = self.step(i, carry, embedded[:, i])
            features.append(feature)
        return torch.stack(features, 1)


class MlpHeads(Heads):
    """A recurrence over the drafted tokens (MLP speculator, arXiv 2404.19124), its vocabulary tables factored.

        s' = GELU(norm(proj_i s + (b/a) E[y_i] A)),   logits = s' (W B)^T,   a = 0.5^(0.5/n),  b = sqrt((1 - a^2) H/2)

    where s is at first the target's state, scaled to a root mean square of 1/sqrt(2). E A and W B stand for the paper's
    own tables of V rows; all but proj_0 is shared by the heads.

    Args:
        hidden: H, size of the target's state and of its embeddings.
        heads: n.
    """

    kind = "mlp"
    sees_drafts = True

    def __init__(self, *, hidden: int, heads: int) -> None:
        super().__init__(hidden=hidden, heads=heads)
        a = 0.5 ** (0.5 / heads)
        self.weight_of_token = math.sqrt((1 - a * a) * hidden / 2) / a
        self.proj_0 = nn.Parameter(torch.eye(hidden))
        if heads > 1:
            self.proj_1 = nn.Parameter(torch.eye(hidden))
        self.inner = nn.Parameter(torch.eye(hidden))  # A
        self.outer = nn.Parameter(torch.eye(hidden))  # B
        self.norm_weight = nn.Parameter(torch.ones(hidden))
        self.norm_bias = nn.Parameter(torch.zeros(hidden))

    def start(self, embedding: Tensor) -> None:
        """Set A, for training to begin, to the multiple of I that gives E A a standard deviation of 1/sqrt(H).

        Args:
            embedding: E [V, H].
        """
        factor = 1 / (math.sqrt(self.hidden) * embedding.float().std())
        with torch.no_grad():
            self.inner.copy_(factor * torch.eye(self.hidden, device=factor.device))

    def step(self, i: int, carry: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        projection = self.proj_1 if i else self.proj_0
        carry = carry if i else _rms(carry) / math.sqrt(2)
        mixed = F.linear(carry, projection) + self.weight_of_token * (embedded @ self.inner)
        carry = F.gelu(_rms(mixed) * self.norm_weight + self.norm_bias)
        return carry, F.linear(carry, self.outer)


class MedusaHeads(Heads):
    """A residual block for each place (Medusa, arXiv 2401.10774): feature_i = s + SiLU(W_i s).

    At the start W_i = 0, and every head guesses the newest token again.
    """

    kind = "medusa"
    sees_drafts = False

    def __init__(self, *, hidden: int, heads: int) -> None:
        super().__init__(hidden=hidden, heads=heads)
        self.blocks = nn.ParameterList([nn.Parameter(torch.zeros(hidden, hidden)) for _ in range(heads)])

    def step(self, i: int, carry: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor]:
        return carry, carry + F.silu(F.linear(carry, self.blocks[i]))


KINDS: dict[str, type[Heads]] = {each.kind: each for each in (MlpHeads, MedusaHeads)}


def heads_of(card: Card, weights: Mapping[str, Tensor]) -> Heads:
    """The module that a card describes, with its weights, for inference in float32.

    Raises:
        UserError: if card and weights do not belong together.
    """
    try:
        made = KINDS[card.kind](hidden=card.hidden, **card.shape)
        made.load_state_dict(weights)
    except (TypeError, RuntimeError, UserError) as error:
        what = f"the weights of these {card.kind} heads are not those of the card"
        raise UserError(f"{what}: {one_line(error)}", key="path") from error
    return made.eval().requires_grad_(False)


def _rms(x: Tensor) -> Tensor:
    """At root mean square 1 along the last dimension."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)
