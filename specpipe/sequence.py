"""What one request owns: its tokens, limits, stop state, randomness and the record of its steps.

It knows where a block of tokens must end; it knows nothing of models, caches or acceptance rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from specpipe.chance import Chance
from specpipe.distribution import Prefix
from specpipe.errors import UserError
from specpipe.settings import GenerationSettings


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability (natural) of an emitted token, and the best ids with theirs, best first."""

    token: int
    logprob: float
    top: list[tuple[int, float]]


@dataclass
class Step:
    """One propose - verify - accept round. Counts are those of what was emitted (theory.md section 1).

    `asked` is what the proposer was allowed; drafted (k_s) tokens were scored, the first `accepted` (N_s) of them
    emitted, then `extra` (0 or 1) more. `overlaps` holds sum_x min(p, q) of each verified position; `has_q`: the draft
    came with the laws it was drawn from; `logprobs` has an entry per emitted token where they were asked for,
    `draft_token_ids`, `log_p` and `log_q` one per draft where drafts are scored (its id, and the natural logarithms of
    its probability under target and proposer); `seconds` is the time by part of the pass, one dict
    for all `rows` requests that shared it; `source` names the member that drafted, where a proposer has several.
    """

    drafted: int
    accepted: int
    tokens: list[int]
    overlaps: list[float]
    asked: int = 0
    prefill: bool = False
    has_q: bool = False
    logprobs: list[TokenLogprobs] | None = None
    draft_token_ids: list[int] | None = None
    log_p: list[float] | None = None
    log_q: list[float] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    rows: int = 1
    source: str | None = None

    @property
    def extra(self) -> int:
        return len(self.tokens) - self.accepted

    @property
    def kinds(self) -> list[str]:
        """For each emitted token: accepted, then correction or bonus; plain where nothing was drafted."""
        last = "plain" if self.drafted == 0 else "bonus" if self.accepted == self.drafted else "correction"
        return ["accepted"] * self.accepted + [last] * self.extra


class Sequence:
    """One request while it is decoded.

    Args:
        prompt: token ids, at least one.
        settings: how to draw and when to end.
        stop_ids: ids that end the request.
        stop_text: told each emitted id, says whether a stop string is now complete.
        context: positions the target has, or None if it has no limit.
        chance: the request's randomness.

    Raises:
        UserError: for an empty prompt, and for one longer than the context.
    """

    def __init__(
        self,
        prompt: Tokens[int],
        settings: GenerationSettings,
        *,
        stop_ids: Collection[int] = (),
        stop_text: Callable[[int], bool] | None = None,
        context: int | None = None,
        chance: Chance,
    ) -> None:
        if not prompt:
            raise UserError("the prompt has no tokens; there is nothing to continue.", key="prompt")
        if context is not None and len(prompt) > context:
            raise UserError(f"{len(prompt)} tokens do not fit the target's context of {context}.", key="prompt")
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.settings = settings
        self.stop_ids = frozenset(stop_ids)
        self.stop_text = stop_text
        self.stopped_by_text = False
        self.chance = chance
        self.steps: list[Step] = []
        self._ends = self._limits(settings.max_new_tokens, context)
        self.finish_reason: str | None = self._limit_reached()

    @property
    def new_tokens(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def prefix(self) -> Prefix:
        """What was committed, as the sampling settings see it."""
        return Prefix(self.tokens[: self.prompt_length], self.new_tokens, self.stop_ids)

    @property
    def longest(self) -> int:
        """Tokens that it has at most when it is finished, the prompt's among them."""
        return min(end for end, _ in self._ends)

    def room(self, wanted: int) -> int:
        """How many drafts the next step may score: never so many that a limit would cut the block."""
        return max(0, min(wanted, self.longest - len(self.tokens) - 1))

    def commit(self, block: Tokens[int], drafted: int, overlaps: Tokens[float], *, prefill: bool = False) -> Step:
        """Take a step's tokens, the accepted drafts and one more, up to the first stop or limit inside the block."""
        emitted: list[int] = []
        for token in block:
            emitted.append(token)
            self.tokens.append(token)
            self.finish_reason = "stop" if self._stops(token) else self._limit_reached()
            if self.finish_reason:
                break
        accepted = min(len(block) - 1, len(emitted))
        verified = min(drafted, len(emitted))
        self.steps.append(Step(drafted, accepted, emitted, list(overlaps[:verified]), prefill=prefill))
        return self.steps[-1]

    def _stops(self, token: int) -> bool:
        completed = self.stop_text is not None and self.stop_text(token)
        if len(self.tokens) - self.prompt_length < self.settings.min_new_tokens:
            return False
        self.stopped_by_text = completed
        return completed or token in self.stop_ids

    def _limits(self, max_new_tokens: int | None, context: int | None) -> list[tuple[int, str]]:
        limits = [] if max_new_tokens is None else [(self.prompt_length + max_new_tokens, "length")]
        limits += [] if context is None else [(context, "context")]
        if not limits:
            raise UserError("null needs a target with a context limit; this one states none.", key="max_new_tokens")
        return limits

    def _limit_reached(self) -> str | None:
        return next((reason for end, reason in self._ends if len(self.tokens) >= end), None)
