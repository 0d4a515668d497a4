"""What a request asks for: how tokens are drawn and when it ends. Checked once, here; never changed afterwards.

Imports no model code, so that a wrong value is refused before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

from specpipe.errors import UserError, flag, integer, number


class GenerationSettings:
    """Sampling settings and limits of a request (config group `generation`).

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k largest logits, ties with the k-th included; 0 keeps all.
        top_p: keep the smallest set of largest probabilities whose mass reaches top_p; 1 keeps all.
        max_new_tokens: at most this many tokens; None runs to the end of the context.
        stop_token_ids: end after any of these ids, besides the model's own end-of-text ids.
        ignore_eos: the model's own end-of-text ids do not end the request.

    Raises:
        UserError: naming the key, the value and what is allowed.
    """

    def __init__(
        self,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        max_new_tokens: int | None = 128,
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
    ) -> None:
        self.temperature = number("temperature", temperature, 0)
        self.top_k = integer("top_k", top_k, 0)
        self.top_p = number("top_p", top_p, 0, 1, above=True)
        self.max_new_tokens = None if max_new_tokens is None else integer("max_new_tokens", max_new_tokens, 0)
        self.stop_token_ids = _ids("stop_token_ids", stop_token_ids)
        self.ignore_eos = flag("ignore_eos", ignore_eos)

    def stop_ids(self, eos_ids: Sequence[int]) -> frozenset[int]:
        """The ids that end a request on a model whose own end-of-text ids are `eos_ids`."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else frozenset(eos_ids))


def _ids(key: str, value: Sequence[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    if isinstance(value, (str, int)) or not isinstance(value, Sequence):
        raise UserError(f"{value!r} is not a list of token ids such as [2,7].", key=key)
    return tuple(integer(key, item, 0) for item in value)
