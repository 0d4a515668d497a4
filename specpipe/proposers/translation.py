"""Whose tokens a draft model reads: the target's, or its own where the two have different tokenizers.

Token-level intersection (arXiv 2502.05202): what was committed is read as text, in the draft's tokens; what is drafted
are the tokens that both have, and q is the draft's law over those alone, renormalised, on the target's ids. So the
samplers need not know, and the output law is the target's whatever the two have in common.

The strings of both vocabularies are compared as bytes, so that byte-level and sentencepiece spellings meet. It knows
tokenizers and requests; it knows nothing of models and their caches.
"""

from __future__ import annotations

import codecs
import re
import warnings
from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from specpipe.errors import UserError
from specpipe.sequence import Sequence
from specpipe.verifier.targets import Target

# Of the draft's ordinary tokens, the share that the target must have. Token frequencies fall about as 1 / rank, and
# common words are in every vocabulary: a twentieth of 50,000 tokens stands for some seven tenths of a text, while the
# 256 single bytes that any two byte-level tokenizers share are the tokens that a text is hardly ever made of.
LEAST_SHARED = 0.05

SPACE = "\u2581"  # of sentencepiece
BYTE = re.compile("<0x([0-9A-F]{2})>")  # a lone byte of sentencepiece

PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
LETTERS = {chr(byte): byte for byte in PRINTABLE} | {
    chr(0x100 + i): byte for i, byte in enumerate(sorted(set(range(256)) - set(PRINTABLE)))
}


class SameTokens:
    """The draft has the target's ids.

    Args:
        ids: [D] int64, those that its head knows, in its order; None: as many as the head has rows, from 0 up.
    """

    def __init__(self, ids: torch.Tensor | None = None) -> None:
        self.ids = ids

    def follow(self, sequence: Sequence, given: list[int]) -> tuple[Sequence, list[int]]:
        """What the model reads of a request and of guesses behind it: both as they are."""
        return sequence, given

    def own(self, token: int) -> int:
        """The model's id of a token that was drafted."""
        return token


class Translation:
    """From the target's tokens to the draft's and back.

    `ids` [D] int64 on the draft's device: the target's id of each of the draft's, or -1.

    Args:
        target: whose ids are proposed.
        draft: who drafts.

    Raises:
        UserError: if the two share too little of the draft's vocabulary.
    """

    def __init__(self, target: Target, draft: Target) -> None:
        self._theirs, ours = Spelling(target.tokenizer), Spelling(draft.tokenizer)
        pairs = _matched(self._theirs, ours)
        self._own = {t: d for t, d in pairs.items() if t < target.vocabulary and d < draft.vocabulary}
        _judge(sum(d in ours.text for d in self._own.values()), len(ours.text), target.name, draft.name)
        ids = torch.full((draft.vocabulary,), -1)
        ids[list(self._own.values())] = torch.tensor(list(self._own))
        self.ids = ids.to(next(draft.model.parameters()).device)
        self._tokenizer = draft.tokenizer
        first = list(draft.tokenizer("")["input_ids"])[:1]
        self._front = first if first == [draft.tokenizer.bos_token_id] else []
        self._mirrors: WeakKeyDictionary[Sequence, Mirror] = WeakKeyDictionary()

    def follow(self, sequence: Sequence, given: list[int]) -> tuple[Mirror, list[int]]:
        """What the model reads of a request and of guesses behind it: the text of both, encoded as a whole."""
        mirror = self._mirrors.setdefault(sequence, Mirror(sequence))
        mirror.tokens = self.encode([*sequence.tokens, *given])
        return mirror, []

    def own(self, token: int) -> int:
        """The draft's id of a token that both have."""
        return self._own[token]

    def encode(self, tokens: list[int]) -> list[int]:
        """The draft's tokens for a text in the target's, with one BOS in front if its tokenizer puts one there.

        Special tokens become their counterparts, or nothing where they have none; never text. Empty where nothing can
        be drafted: the text ends inside a character.
        """
        ids: list[int] = []
        unfinished, padded = b"", self._theirs.pads
        for special, run in groupby(tokens, self._theirs.special.__contains__):
            if special:
                ids += [self._own[token] for token in run if token in self._own]
                unfinished = b""
                continue
            text, unfinished = _characters(b"".join(self._theirs.text.get(token, b"") for token in run))
            ids += self._encode(text.removeprefix(" ") if padded else text)
            padded = False
        if unfinished:
            return []
        doubled = self._front and ids[:1] == self._front
        return self._front + (ids[1:] if doubled else ids)

    def _encode(self, text: str) -> list[int]:
        """Ordinary tokens only, whatever the text spells."""
        read = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)
        return list(read["input_ids"])


class Mirror:
    """A request in the draft's tokens, for a `Reader` to follow; it lives as long as the request does."""

    def __init__(self, sequence: Sequence) -> None:
        self.tokens: list[int] = []
        self._sequence = ref(sequence)

    @property
    def finish_reason(self) -> str | None:
        sequence = self._sequence()
        return sequence.finish_reason if sequence is not None else "interrupted"


class Spelling:
    """What each id of a tokenizer stands for.

    text: the bytes of each ordinary id. ids: the other way; of several with the same bytes one that is not spelled as a
    lone byte. special: the name of each special id. eos: the id that ends a text, or None. pads: a space that is not in
    the text is put in front of it.
    """

    def __init__(self, tokenizer: Any) -> None:
        added = tokenizer.added_tokens_decoder
        names = {*tokenizer.all_special_tokens, *(token.content for token in added.values() if token.special)}
        pieces = {number: piece for piece, number in tokenizer.get_vocab().items()}
        self.special = {number: piece for number, piece in pieces.items() if piece in names}
        for number in self.special:
            del pieces[number]
        spelled = [piece for number, piece in pieces.items() if number not in added]
        spelling = _spelling(spelled)
        self.text = {n: piece.encode() if n in added else spelling(piece) for n, piece in pieces.items()}
        lone_bytes_first = sorted(pieces, key=lambda n: (BYTE.fullmatch(pieces[n]) is None, -n))
        self.ids = {self.text[number]: number for number in lone_bytes_first if self.text[number]}
        self.eos: int | None = tokenizer.eos_token_id
        example = tokenizer("a", add_special_tokens=False)["input_ids"]
        self.pads = self.text.get(next(iter(example), -1), b"").startswith(b" ")


def _spelling(pieces: Iterable[str]) -> Callable[[str], bytes]:
    """From a piece of a vocabulary to the bytes it stands for; how it is spelled shows in all pieces together."""
    letters = set().union(*pieces)
    if SPACE in letters:
        return _sentencepiece
    return str.encode if " " in letters else _byte_level


def _sentencepiece(piece: str) -> bytes:
    byte = BYTE.fullmatch(piece)
    return bytes([int(byte[1], 16)]) if byte else piece.replace(SPACE, " ").encode()


def _byte_level(piece: str) -> bytes:
    """GPT-2's: each byte has a letter, printable ones their own."""
    if all(letter in LETTERS for letter in piece):
        return bytes(LETTERS[letter] for letter in piece)
    return piece.encode()


def _matched(theirs: Spelling, ours: Spelling) -> dict[int, int]:
    """Target id -> draft id, one to one: ordinary tokens of the same bytes, special ones of the same name or role."""
    pairs = {theirs.ids[text]: number for text, number in ours.ids.items() if text in theirs.ids}
    named = {name: number for number, name in ours.special.items()}
    pairs |= {number: named[name] for number, name in theirs.special.items() if name in named}
    if theirs.eos is not None and ours.eos is not None and ours.eos not in pairs.values():
        pairs.setdefault(theirs.eos, ours.eos)
    return pairs


def _judge(shared: int, total: int, target: str, draft: str) -> None:
    """Say how many of the draft's ordinary tokens the target has; raise UserError if they are too few."""
    what = f"{draft} has another tokenizer than {target}, and {shared} of its {total} tokens are tokens there too"
    if shared < LEAST_SHARED * total:
        raise UserError(f"{what}: too few to draft with, {LEAST_SHARED:.0%} are needed.", key="model")
    warnings.warn(f"{what} ({shared / total:.0%}): it drafts with these", stacklevel=2)


def _characters(data: bytes) -> tuple[str, bytes]:
    """The whole characters of UTF-8 `data`, and the bytes of one that is not finished."""
    reader = codecs.getincrementaldecoder("utf-8")("replace")
    return reader.decode(data), reader.getstate()[0]
