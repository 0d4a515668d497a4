"""What a text has said before is likelier to come again: a bias for tokens that once followed the same few tokens.

A small model or a head has little room for what stands in the prompt: names, numbers, lines of code. The tokens that
followed the text's last n tokens earlier in the same text are few and known; their logits are raised before the
proposer's law is made, so it stays a law of the prefix alone, and drafts are drawn from it as it is. The cache of a
neural language model (Grave et al., arXiv 1612.04426) mixes such counts into the law; here they are added to logits,
where what the model believes has its say.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as Items
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specpipe.errors import UserError, number
from specpipe.sequence import Sequence

LARGEST = 100.0  # a bias: beyond all that logits say


class Copying:
    """Raises the logits of tokens that followed the last tokens of the text before.

    Args:
        bias: one number for each n = 1, 2, ...: what a token's logit gains if it followed the last n tokens. They add
            up, since what followed n tokens followed the last n - 1 of them too. Empty: none.

    Raises:
        UserError: naming `copy_bias`, for anything but a list of numbers from 0 to 100.
    """

    def __init__(self, bias: Items[float]) -> None:
        if isinstance(bias, str) or not isinstance(bias, Items):
            raise UserError(f"{bias!r} is not a list of numbers.", key="copy_bias")
        self._bias = [number("copy_bias", each, 0, LARGEST) for each in bias]
        self._followers: WeakKeyDictionary[Sequence, Followers] = WeakKeyDictionary()

    def raised(self, logits: Tensor, sequence: Sequence, behind: list[int]) -> Tensor:
        """[V] the logits behind the request's tokens and the drafts `behind` them, a new tensor if any is raised."""
        return added(logits, self.gains(sequence, behind))

    def gains(self, sequence: Sequence, behind: list[int]) -> dict[int, float]:
        """What the logit of each token gains there, of those that gain anything."""
        if not self._bias:
            return {}
        known = self._followers.get(sequence)
        if known is None:
            known = self._followers[sequence] = Followers(len(self._bias))
        known.catch_up(sequence.tokens)
        gains: dict[int, float] = defaultdict(float)
        for tokens, gain in zip(known.of(sequence.tokens, behind), self._bias, strict=True):
            for token in tokens:
                gains[token] += gain
        return gains


def added(logits: Tensor, gains: Mapping[int, float]) -> Tensor:
    """[..., D] logits with something added at some places, a new tensor if at any."""
    if not gains:
        return logits
    places = torch.tensor(list(gains), device=logits.device)
    return logits.index_add(-1, places, torch.tensor(list(gains.values()), dtype=logits.dtype, device=logits.device))


class Followers:
    """Which tokens followed each n-gram of one text, n = 1 .. `longest`; one entry per token and n at most."""

    def __init__(self, longest: int) -> None:
        self._after: list[dict[tuple[int, ...], set[int]]] = [{} for _ in range(longest)]
        self._read = 0

    def catch_up(self, tokens: Items[int]) -> None:
        """Take up what the text has gained."""
        for i in range(self._read, len(tokens)):
            for n, after in enumerate(self._after, 1):
                if i >= n:
                    after.setdefault(tuple(tokens[i - n : i]), set()).add(tokens[i])
        self._read = len(tokens)

    def of(self, tokens: Items[int], behind: list[int]) -> list[set[int]]:
        """For each n what followed the last n tokens of text and drafts before, in the text or in the drafts."""
        found = []
        for n, after in enumerate(self._after, 1):
            end = [*tokens[-n:], *behind]
            last = end[-n:]
            drafted = {end[i] for i in range(max(n, len(end) - len(behind)), len(end)) if end[i - n : i] == last}
            found.append(after.get(tuple(last), set()) | drafted if len(last) == n else set())
        return found
