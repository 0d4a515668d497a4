"""What a request asks for: how tokens are drawn and when it ends. Checked once, here; never changed afterwards.

Imports no model code, so that a wrong value is refused before anything is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from specpipe.errors import UserError, choice, flag, integer, number

LARGEST = 1e30  # logits stay finite in float32
MOST_DIVIDED = 1e6  # so do those of that size when a penalty below 1 raises them
COLDEST = 1e-30  # a smaller divisor is not a normal float32
LONGEST_DRAFT = 1000  # tokens of a step's draft; no proposer guesses so many
LARGEST_SEED = 2**32 - 1  # numpy's


class GenerationSettings:
    """Sampling settings and limits of a request (config group `generation`). Applied in this order, to p and to q:

    Args:
        logit_bias: added to the logit of an id.
        repetition_penalty: divides positive and multiplies negative logits of ids in prompt or output; 1 is none.
        frequency_penalty: subtracted from an id's logit once per occurrence in the output.
        presence_penalty: subtracted from the logit of every id that occurs in the output.
        banned_token_ids: never emitted.
        min_new_tokens: no end before that many tokens are out; stop ids are not drawn until then.
        temperature: 0 is greedy, and the settings below do nothing; otherwise logits are divided by it.
        top_k: keep the k largest logits, ties with the k-th included; 0 keeps all.
        top_p: keep the smallest set of largest probabilities whose mass reaches top_p; 1 keeps all.
        min_p: keep what has at least this share of the largest probability; 0 keeps all.
        typical_p: keep the smallest set with this mass whose surprise is closest to the entropy; 1 keeps all.
        max_new_tokens: at most this many tokens; None runs to the end of the context.
        stop_token_ids: end after any of these ids, besides the model's own end-of-text ids.
        stop: end where the text contains any of these strings; ids end with the token that completes it. Special tokens
            have no text: name them in stop_token_ids.
        include_stop_str_in_output: leave the stop string in the text.
        ignore_eos: the model's own end-of-text ids do not end the request.
        logprobs: report the log-probability of each emitted token and of the so many best; None reports none.
        logprobs_mode: `raw` is the model's own law, `processed` the law under the settings above.

    Raises:
        UserError: naming the key, the value and what is allowed.
    """

    def __init__(
        self,
        *,
        logit_bias: Mapping[int, float] | None = None,
        repetition_penalty: float = 1.0,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        banned_token_ids: Sequence[int] | None = None,
        min_new_tokens: int = 0,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        typical_p: float = 1.0,
        max_new_tokens: int | None = 128,
        stop_token_ids: Sequence[int] | None = None,
        stop: str | Sequence[str] | None = None,
        include_stop_str_in_output: bool = False,
        ignore_eos: bool = False,
        logprobs: int | None = None,
        logprobs_mode: str = "raw",
    ) -> None:
        self.logit_bias = _biases("logit_bias", logit_bias)
        self.repetition_penalty = number("repetition_penalty", repetition_penalty, 1 / MOST_DIVIDED, LARGEST)
        self.frequency_penalty = number("frequency_penalty", frequency_penalty, -LARGEST, LARGEST)
        self.presence_penalty = number("presence_penalty", presence_penalty, -LARGEST, LARGEST)
        self.banned_token_ids = _ids("banned_token_ids", banned_token_ids)
        self.min_new_tokens = integer("min_new_tokens", min_new_tokens, 0)
        self.temperature = number("temperature", temperature, 0)
        if 0 < self.temperature < COLDEST:
            raise UserError(
                f"{temperature!r} is neither 0 (greedy) nor a number from {COLDEST:g} up.", key="temperature"
            )
        self.top_k = integer("top_k", top_k, 0)
        self.top_p = number("top_p", top_p, 0, 1, above=True)
        self.min_p = number("min_p", min_p, 0, 1)
        self.typical_p = number("typical_p", typical_p, 0, 1, above=True)
        self.max_new_tokens = None if max_new_tokens is None else integer("max_new_tokens", max_new_tokens, 0)
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise UserError(f"{min_new_tokens} is above max_new_tokens ({max_new_tokens}).", key="min_new_tokens")
        self.stop_token_ids = _ids("stop_token_ids", stop_token_ids)
        self.stop = _strings("stop", stop)
        self.include_stop_str_in_output = flag("include_stop_str_in_output", include_stop_str_in_output)
        self.ignore_eos = flag("ignore_eos", ignore_eos)
        self.logprobs = None if logprobs is None else integer("logprobs", logprobs, 0)
        self.logprobs_mode = choice("logprobs_mode", logprobs_mode, ("raw", "processed"))

    @property
    def depends_on_prefix(self) -> bool:
        """Whether some setting looks at what stands before a position, so that rows of a block differ in it."""
        penalties = (self.repetition_penalty != 1, self.frequency_penalty, self.presence_penalty, self.min_new_tokens)
        return any(penalties) or bool(self.logit_bias or self.banned_token_ids)

    def refuse_ids_from(self, size: int) -> None:
        """Raise UserError for an id that a vocabulary of `size` ids does not have."""
        for key in ("logit_bias", "banned_token_ids", "stop_token_ids"):
            beyond = [token for token in getattr(self, key) if token >= size]
            if beyond:
                raise UserError(f"the target has no id {beyond[0]}; its ids end at {size - 1}.", key=key)

    def stop_ids(self, eos_ids: Sequence[int]) -> frozenset[int]:
        """The ids that end a request on a model whose own end-of-text ids are `eos_ids`."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_ids))


def _biases(key: str, value: Mapping[int, float] | None) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{value!r} is not a mapping of token ids to numbers such as {{7: -1.5}}.", key=key)
    return {
        integer(key, token, 0): -math.inf if bias == -math.inf else number(key, bias, -LARGEST, LARGEST)
        for token, bias in value.items()
    }


def _strings(key: str, value: str | Sequence[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, Sequence) or not all(isinstance(each, str) and each for each in strings):
        raise UserError(f"{value!r} is not a text or a list of texts, none of them empty.", key=key)
    return tuple(strings)


def _ids(key: str, value: Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, int)) or not isinstance(value, Sequence):
        raise UserError(f"{value!r} is not a list of token ids such as [2,7].", key=key)
    return tuple(integer(key, item, 0) for item in value)
