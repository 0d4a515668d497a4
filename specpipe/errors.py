"""What a person did wrong, said in one line: the key, the value, what is allowed, the nearest match.

Imports nothing heavier than the standard library, so the command line can use it before any model is loaded.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from typing import Any

CLOSE = 0.6  # share of common letters from which a word counts as a slip of another


class UserError(ValueError):
    """The input is wrong and only the user can mend it; the command line prints it as one line and exits with 2.

    `key` is the configuration key the message is about, relative to the component that raised it; the code that
    builds components puts the group in front (`max_ngram` becomes `proposer.max_ngram`).
    """

    def __init__(self, message: str, *, key: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.key = key

    def __str__(self) -> str:
        return f"{self.key}: {self.message}" if self.key else self.message

    def under(self, group: str) -> UserError:
        """The same error, told from one level further out."""
        return UserError(self.message, key=f"{group}.{self.key}" if self.key else group)


class ProposerFailed(RuntimeError):
    """A proposer raised an error of its own, which is the cause, where it had to propose."""


class ContractError(RuntimeError):
    """A proposer broke its contract (too many tokens, an id the target lacks, no mass in q), or a policy its own."""


def nearest(word: str, options: Iterable[str]) -> str:
    """`" Did you mean 'x'?"` when an option is close to `word`, else the empty string.

    A dotted option is also known by its last part: `temperature` means `generation.temperature`.
    """
    known = list(options)
    leaves = {_leaf(option): option for option in reversed(known)}
    close = [option for option in known if _leaf(option) == _leaf(word)]
    close += difflib.get_close_matches(word, known, n=1, cutoff=CLOSE)
    close += [leaves[leaf] for leaf in difflib.get_close_matches(_leaf(word), leaves, n=1, cutoff=CLOSE)]
    return f" Did you mean '{close[0]}'?" if close else ""


def _leaf(option: str) -> str:
    return option.rpartition(".")[2]


def one_line(error: BaseException, limit: int = 300) -> str:
    """What an error of another library says, on one line, at most `limit` characters; its type if it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def integer(key: str, value: Any, low: int, high: int | None = None) -> int:
    """`value` as an int in `low..high`; booleans and fractions are refused."""
    wanted = f"a whole number from {low}" + (f" to {high}" if high is not None else " up")
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise UserError(f"{value!r} is not {wanted}.", key=key)
    return value


def number(key: str, value: Any, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """`value` as a finite float in `[low, high]`, or in `(low, high]` when `above`; numeric strings are taken."""
    ends = f"{'above' if above else 'from'} {low:g}" + (f" to {high:g}" if high < math.inf else " up")
    try:
        result = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        result = math.nan
    if not math.isfinite(result) or result < low or result > high or (above and result == low):
        raise UserError(f"{value!r} is not a number {ends}.", key=key)
    return result


def choice(key: str, value: Any, options: Iterable[str]) -> str:
    """`value` if it is one of `options`."""
    known = list(options)
    if value not in known:
        raise UserError(f"{value!r} is not one of {', '.join(known)}.{nearest(str(value), known)}", key=key)
    return str(value)


def flag(key: str, value: Any) -> bool:
    """`value` if it is a boolean."""
    if not isinstance(value, bool):
        raise UserError(f"{value!r} is not true or false.", key=key)
    return value


def having(key: str, value: Any, method: str) -> Any:
    """`value` if it has the method that makes it a component of its kind."""
    if not callable(getattr(value, method, None)):
        raise UserError(f"{type(value).__name__} has no method {method!r}, which it needs.", key=key)
    return value


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether it says that the machine or a device had no memory left; torch raises several errors for that."""
    says_so = any(words in str(error) for words in ("out of memory", "can't allocate memory"))
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and says_so)
