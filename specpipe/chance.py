"""The randomness of one request: three independent streams, for drafting, accepting and drawing.

The streams depend on the seed and the request only (its prompt, and its number among equal prompts), so a request's
text does not depend on its neighbours. Proposers and samplers ask for decisions, not for numbers; whoever
wants the exact law of the output instead of one sample passes an object with the same methods that explores every
decision.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Sequence

from torch import Tensor

from specpipe import distribution


class Chance:
    """Decisions of one request, reproducible from `seed`, `prompt_ids` and `repeat`.

    Args:
        seed: of the run.
        prompt_ids: of the request.
        repeat: how many equal prompts came before this one in the run.
    """

    def __init__(self, seed: int, prompt_ids: Sequence[int] = (), repeat: int = 0) -> None:
        self.repeat = repeat
        request = f"{seed}/{repeat}/{','.join(map(str, prompt_ids))}"
        self.key = hashlib.sha256(request.encode()).digest()  # equal for requests that draw the same numbers
        self._drafting, self._accepting, self._drawing = (
            Stream(hashlib.sha256(f"{stream}/{request}".encode()).digest())
            for stream in ("drafting", "accepting", "drawing")
        )
        self._ahead: list[float] = []  # of the accepting stream: looked at, not used

    def propose(self, q: Tensor) -> int:
        """A draft token from the law q, [V]."""
        return distribution.draw(q, self._drafting.random())

    def passes(self, p: float, q: float) -> bool:
        """True with probability min(1, p/q). Strict and without division: p = 0 never passes, p >= q always does.

        Raises FloatingPointError for a p that is not a number.
        """
        if math.isnan(p):
            raise FloatingPointError("a probability that is not a number decides nothing")
        u = self._ahead.pop(0) if self._ahead else self._accepting.random()
        return u * q < p

    def draw(self, law: Tensor) -> int:
        """An emitted token from `law`, [V], which need not sum to one."""
        return distribution.draw(law, self._drawing.random())

    def uniforms(self, k: int) -> tuple[list[float], float]:
        """The numbers behind the next k calls of `passes` and the next of `draw`, for acceptance on a device.

        Call `spend` with how many of the k were needed: the rest stay for the next step, as if never looked at.
        """
        self._ahead += [self._accepting.random() for _ in range(k - len(self._ahead))]
        return self._ahead[:k], self._drawing.random()

    def spend(self, n: int) -> None:
        """n of the numbers that `uniforms` gave were used for decisions."""
        del self._ahead[:n]

    def mark(self) -> None:
        """What is decided from here on can be taken back by `rewind`."""
        self._marked = list(self._ahead)
        for stream in (self._drafting, self._accepting, self._drawing):
            stream.mark()

    def rewind(self) -> None:
        """Back to the last `mark`: the same numbers decide once more."""
        self._ahead = self._marked
        for stream in (self._drafting, self._accepting, self._drawing):
            stream.rewind()


class Stream:
    """Uniform numbers on [0, 1), of which those since the last mark can be given once more."""

    def __init__(self, seed: bytes) -> None:
        self._source = random.Random(seed)
        self._given: list[float] | None = None  # since the mark, if there is one
        self._again: list[float] = []  # to be given before new ones, the next one last

    def random(self) -> float:
        """The next number."""
        number = self._again.pop() if self._again else self._source.random()
        if self._given is not None:
            self._given.append(number)
        return number

    def mark(self) -> None:
        """Where `rewind` goes back to."""
        self._given = []

    def rewind(self) -> None:
        """Give what was given since the mark once more, in its order."""
        self._again += reversed(self._given or [])
        self._given = []
