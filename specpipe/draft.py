"""What passes from a proposer to the verifier and the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draft:
    """Proposed tokens of B requests, K being the longest proposal.

    Args:
        tokens: [B, K] int64; a row's entries beyond its length mean nothing.
        lengths: B lengths; 0 means a plain step.
        probs: [B, K, V] the law each token was drawn from, after the request's settings, or None if the proposal was
            deterministic (q is one-hot at the token). That each token was drawn from exactly its row is a contract:
            the output law is only right if it holds.
    """

    tokens: Tensor
    lengths: list[int]
    probs: Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]], device: torch.device | str = "cpu") -> Draft:
        """A deterministic draft from Python lists, one per request."""
        longest = max((len(row) for row in rows), default=0)
        padded = [[*row, *[0] * (longest - len(row))] for row in rows]
        return cls(torch.tensor(padded, dtype=torch.long, device=device), [len(row) for row in rows])

    def row(self, b: int) -> tuple[list[int], Tensor | None]:
        """Row b as (tokens, q): a list of k tokens, and q [k, V] or None."""
        k = self.lengths[b]
        return self.tokens[b, :k].tolist(), None if self.probs is None else self.probs[b, :k]


class ContractError(RuntimeError):
    """A proposer broke its contract: more tokens than asked, an id the target lacks, a token its q gives no mass."""
