"""Counts of 1- to 3-grams over token ids, the law smoothed from them, and the file they are kept in.

Knows token ids and files; knows nothing of models, requests or sampling settings.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specpipe.errors import UserError, one_line

LONGEST = 3  # tokens of an n-gram
LARGEST = 2**21 - 1  # ids: three of them fit one int64
FORMAT, VERSION = "specpipe counts", "1"


@dataclass(frozen=True)
class Counts:
    """How often each n-gram occurred, as `fit` makes them.

    grams: for n = 1, 2, .. the n-grams, [R_n, n] int32 in ascending order. times: occurrences of each, [R_n] int32.
    discounts: D_n for each n, see `Smoothed`. tokens: of all texts. size: ids end at size - 1.
    """

    grams: tuple[Tensor, ...]
    times: tuple[Tensor, ...]
    discounts: tuple[float, ...]
    tokens: int
    size: int

    @property
    def order(self) -> int:
        """n of the longest n-grams."""
        return len(self.grams)

    @property
    def largest(self) -> int:
        """The highest id; -1 in an empty table."""
        return int(self.grams[0].max()) if len(self.grams[0]) else -1

    def without_singletons(self) -> Counts:
        """Without what occurred once, most of a table; the law still knows how much that was, not what it was."""
        kept = [times > 1 for times in self.times]
        grams = tuple(ids[rows] for ids, rows in zip(self.grams, kept, strict=True))
        times = tuple(times[rows] for times, rows in zip(self.times, kept, strict=True))
        return Counts(grams, times, self.discounts, self.tokens, self.size)

    def occurrences(self, n: int, contexts: Tensor) -> Tensor:
        """How often each n-gram, given as its key [R], occurred: [R] int64, 0 where it is not in the table."""
        if n == 0:
            return torch.full_like(contexts, self.tokens)
        keys, times = _keys(self.grams[n - 1], self.size), self.times[n - 1].long()
        if not len(keys):
            return torch.zeros_like(contexts)
        places = torch.searchsorted(keys, contexts).clamp(max=len(keys) - 1)
        return times[places] * (keys[places] == contexts)


def fit(texts: Iterable[Tokens[int]], *, order: int, size: int) -> Counts:
    """Count the n-grams of all lengths up to `order`; none reaches from one text into the next.

    Args:
        texts: token ids, best the target's own output alone, from the first token behind the prompt to the end id: what
            stands in prompts is not what it says.
        order: 1 to 3, n of the longest n-grams.
        size: ids of the target.

    Raises:
        ValueError: for another order and for an id that is not in the vocabulary.
    """
    if not 1 <= order <= LONGEST or not 0 < size <= LARGEST:
        raise ValueError(f"order {order} is not in 1..{LONGEST}, or size {size} is not in 1..{LARGEST}")
    rows = [torch.tensor(list(text), dtype=torch.long) for text in texts]
    ids = torch.cat([torch.empty(0, dtype=torch.long), *rows])
    if len(ids) and not 0 <= ids.min() <= ids.max() < size:
        raise ValueError(f"the texts hold ids from {ids.min()} to {ids.max()}, but the vocabulary ends at {size - 1}")
    text = torch.repeat_interleave(torch.tensor([len(row) for row in rows], dtype=torch.long))
    counted = [_distinct(ids, text, n, size) for n in range(1, order + 1)]
    grams, times = tuple(grams for grams, _ in counted), tuple(times for _, times in counted)
    return Counts(grams, times, tuple(_discount(each) for each in times), len(ids), size)


def _distinct(ids: Tensor, text: Tensor, n: int, size: int) -> tuple[Tensor, Tensor]:
    """The n-grams inside texts, [R, n] ascending, and how often each occurs; `text` numbers each token's text."""
    if len(ids) < n:
        return torch.empty(0, n, dtype=torch.int32), torch.empty(0, dtype=torch.int32)
    inside = text[: len(text) - n + 1] == text[n - 1 :]
    keys, times = _keys(ids.unfold(0, n, 1)[inside], size).unique(return_counts=True)
    grams = torch.stack([keys // size**i % size for i in reversed(range(n))], 1)
    return grams.int(), times.int()


def _discount(times: Tensor) -> float:
    """n_1 / (n_1 + 2 n_2) of how many n-grams occurred once and twice, with one more of each: never 0 or 1."""
    once, twice = (int((times == count).sum()) + 1 for count in (1, 2))
    return once / (once + 2 * twice)


def _keys(ids: Tensor, size: int) -> Tensor:
    """[R, n] ids as [R] numbers in the same order; all 0 where n is 0."""
    keys = torch.zeros(len(ids), dtype=torch.long)
    for column in ids.unbind(1):
        keys = keys * size + column
    return keys


class Smoothed:
    """The law of the next token by absolute discounting, interpolated over all orders down to a uniform floor.

    With c(h, w) how often w followed the context h and c(h) how often h occurred,

        q_n(w | h) = (c(h, w) - D_n) / c(h) + r(h) q_{n-1}(w | h'),  r(h) = 1 - sum_w (c(h, w) - D_n) / c(h)

    over the w in the table, where h' lacks the first token of h, q_0 is 1/V and D_n is estimated by n_1 / (n_1 + 2 n_2)
    (Ney, Essen & Kneser 1994, Computer Speech and Language 8; compared with others by Chen & Goodman, cmp-lg/9606011).
    So what is not in the table, dropped singletons and ends of texts, goes to the lower order. On the default target's
    text, 4,000 tokens counted, Kneser-Ney's lower orders gave no higher sum of min(p, q) and Witten-Bell a lower one.

    Args:
        counts: the table.
        order: n-grams used, up to the table's.
        vocabulary: V, ids of the target; all of the table's are below it.
    """

    def __init__(self, counts: Counts, order: int, vocabulary: int) -> None:
        self.order, self._size = order, counts.size
        self._levels = [_Level(counts, n) for n in range(1, order + 1)]
        uniform = torch.full((vocabulary,), 1 / vocabulary, dtype=torch.float64)
        self._unigrams = self._levels[0].over(uniform, 0)

    def context(self, tokens: Tokens[int]) -> tuple[int, ...]:
        """As many of the last tokens as the law looks at, `order` - 1 of them or fewer."""
        return tuple(tokens[max(0, len(tokens) + 1 - self.order) :])

    def law(self, context: Tokens[int]) -> Tensor:
        """[V] float64: the law of what follows a `context`."""
        law = self._unigrams
        for n in range(2, len(context) + 2):
            key = 0
            for token in context[len(context) + 1 - n :]:
                key = key * self._size + token
            law = self._levels[n - 1].over(law, key)
        return law


class _Level:
    """One order of a table: for each n-gram (c(h, w) - D) / c(h), those of one context side by side."""

    def __init__(self, counts: Counts, n: int) -> None:
        ids = counts.grams[n - 1]
        self.contexts, self.words = _keys(ids[:, :-1], counts.size), ids[:, -1].long()
        discounted = counts.times[n - 1].double() - counts.discounts[n - 1]
        self.shares = discounted / counts.occurrences(n - 1, self.contexts)

    def over(self, lower: Tensor, context: int) -> Tensor:
        """The law behind the context, with the rest of its mass spread as in the `lower` law, [V]; that if unknown."""
        ends = torch.searchsorted(self.contexts, torch.tensor([context, context + 1]))
        rows = slice(*ends.tolist())
        if rows.start == rows.stop:
            return lower
        law = lower * (1 - self.shares[rows].sum())
        law[self.words[rows]] += self.shares[rows]
        return law


# ---- the file ----


@dataclass(frozen=True)
class Origin:
    """Where counts come from.

    target: whose output was counted. vocabulary: hash of its tokenizer's. source: of the texts, and their licence.
    """

    target: str
    vocabulary: str
    source: str


def vocabulary_hash(tokenizer: Any) -> str:
    """Equal exactly for tokenizers that give the same tokens the same ids."""
    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def save(counts: Counts, origin: Origin, path: Path) -> None:
    """Write one safetensors file: `1.grams` [R, 1], `1.times` [R], `2.grams` .. as uint16 or int32, and metadata."""
    tensors: dict[str, Tensor] = {}
    for n, (grams, times) in enumerate(zip(counts.grams, counts.times, strict=True), 1):
        tensors |= {f"{n}.grams": _narrow(grams), f"{n}.times": _narrow(times)}
    numbers = {key: json.dumps(getattr(counts, key)) for key in ("order", "discounts", "tokens", "size")}
    save_file(tensors, path, {"format": FORMAT, "version": VERSION, **numbers, **vars(origin)})


def _narrow(numbers: Tensor) -> Tensor:
    fits = len(numbers) == 0 or int(numbers.max()) <= torch.iinfo(torch.uint16).max
    return numbers.contiguous().to(torch.uint16 if fits else torch.int32)


def load(path: Path) -> tuple[Counts, Origin]:
    """What `save` wrote.

    Raises:
        UserError: for a file that cannot be read, is something else, is of another version or holds impossible counts.
    """
    if not path.is_file():
        raise UserError(f"there is no file {str(path)!r}.", key="path")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, not a mapping
    except (OSError, SafetensorError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {one_line(error)}.", key="path") from error
    if metadata.get("format") != FORMAT:
        raise UserError(f"{str(path)!r} is not a table of token counts.", key="path")
    if metadata.get("version") != VERSION:
        what = f"is of version {metadata.get('version')}; this specpipe reads version {VERSION}"
        raise UserError(f"{str(path)!r} {what}.", key="path")
    try:
        order, discounts, tokens, size = (json.loads(metadata[key]) for key in ("order", "discounts", "tokens", "size"))
        grams, times = (
            tuple(_wide(tensors[f"{n}.{kind}"]) for n in range(1, order + 1)) for kind in ("grams", "times")
        )
        counts = Counts(grams, times, tuple(map(float, discounts)), int(tokens), int(size))
        origin = Origin(metadata["target"], metadata["vocabulary"], metadata["source"])
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"{str(path)!r} is damaged: {one_line(error)}.", key="path") from error
    if fault := _fault(counts):
        raise UserError(f"{str(path)!r} is damaged: {fault}.", key="path")
    return counts, origin


def _wide(numbers: Tensor) -> Tensor:
    if numbers.dtype not in (torch.uint16, torch.int32):
        raise ValueError(f"counts of {numbers.dtype}")
    return numbers.int()


def _fault(counts: Counts) -> str | None:
    """Why nothing can have these counts, or None."""
    if not 1 <= counts.order <= LONGEST or not 0 < counts.size <= LARGEST:
        return f"order {counts.order}, {counts.size} ids"
    if len(counts.discounts) != counts.order or not all(0 < discount < 1 for discount in counts.discounts):
        return f"discounts {list(counts.discounts)}"
    return next((fault for n in range(1, counts.order + 1) if (fault := _level_fault(counts, n))), None)


def _level_fault(counts: Counts, n: int) -> str | None:
    grams, times = counts.grams[n - 1], counts.times[n - 1]
    if times.dim() != 1 or grams.shape != (len(times), n):
        return f"its {n}-grams are {list(grams.shape)}, their counts {list(times.shape)}"
    if ((grams < 0) | (grams >= counts.size)).any() or (times < 1).any():
        return f"its {n}-grams have ids or counts out of range"
    keys = _keys(grams, counts.size)
    if (keys.diff() <= 0).any():
        return f"its {n}-grams are not in ascending order"
    contexts, group = _keys(grams[:, :-1], counts.size).unique_consecutive(return_inverse=True)
    followers = torch.zeros_like(contexts).index_add_(0, group, times.long())
    if (followers > counts.occurrences(n - 1, contexts)).any():
        return f"its {n}-grams occur more often than their beginnings"
    return None
