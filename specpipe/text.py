"""Text to token ids and back: chat template, and streaming that never emits half a character.

Knows tokenizers; knows nothing of models or of how tokens came about, beyond the name of their kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specpipe.errors import UserError
from specpipe.sequence import Step

BROKEN = "\N{REPLACEMENT CHARACTER}"  # how bytes read that are no character, or not yet one
PENDING = 3  # a character has up to 4 bytes, so at most 3 of them may be waiting for the last
WINDOW = 14  # ids re-read for each new one before the oldest are let go
KEPT = 12  # of them: enough that broken bytes, up to 3 to a U+FFFD, are more than what is waiting
LONGEST_WINDOW = 64  # where only ids without text and broken bytes are mixed; the join may then differ


@dataclass(frozen=True)
class Piece:
    """Some text of the answer. kind: accepted, correction, bonus or plain, of the token that completed it."""

    text: str
    kind: str


class TextCodec:
    """A tokenizer with or without its chat template.

    Args:
        tokenizer: of `transformers`.
        chat: wrap prompts as a user's message; None does so if the tokenizer has a template.

    Raises:
        UserError: if a template is asked for and there is none.
    """

    def __init__(self, tokenizer: Any, chat: bool | None = None) -> None:
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if chat and not has_template:
            raise UserError("the target's tokenizer has no chat template; use prompts.chat=false.", key="prompts.chat")
        self._tokenizer = tokenizer
        self.chat = has_template if chat is None else chat

    def encode(self, prompt: str) -> list[int]:
        """Token ids of one prompt, special tokens included."""
        if not self.chat:
            return list(self._tokenizer(prompt)["input_ids"])
        messages = [{"role": "user", "content": prompt}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids without special tokens; bytes that are no character become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def pieces(self) -> PieceStream:
        """A fresh stream for one answer."""
        return PieceStream(self)


class PieceStream:
    """Turns steps into text as soon as it can no longer change; joined, the pieces are `decode` of all ids.

    Tokenizers join words by context, so each id is read behind some that came before it. That window is kept short:
    the cost of an answer is linear in its length. What was shown is never taken back, so the join differs from `decode`
    only for a tokenizer that would (a byte-fallback one, behind bytes that are no character).
    """

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._window: list[int] = []
        self._text = ""  # of the window
        self._out = ""  # what of it was shown
        self._disturbed = 0  # ids for which the text has not begun with what was shown
        self._kind = "plain"

    def push(self, step: Step) -> Iterator[Piece]:
        """Pieces that this step completed."""
        for token, kind in zip(step.tokens, step.kinds, strict=True):
            self._kind = kind
            self._read(token)
            yield from self._show(len(self._text) - self._pending())
            self._shorten()

    def flush(self) -> Iterator[Piece]:
        """What was held back, at the end of the answer."""
        yield from self._show(len(self._text))

    def _read(self, token: int) -> None:
        text = self._codec.decode([*self._window, token])
        if text and text == self._text and not text.endswith(BROKEN):
            return  # a special token: it has no text, and many in a row must not fill the window
        self._window.append(token)
        self._text = text
        self._disturbed = 0 if text.startswith(self._out) else self._disturbed + 1

    def _pending(self) -> int:
        """How many characters at the end may still become another one."""
        if 0 < self._disturbed <= PENDING:
            return len(self._text)  # byte-fallback tokenizers: one unfinished character breaks those before it
        broken = len(self._text) - len(self._text.rstrip(BROKEN))
        return min(broken, PENDING)

    def _show(self, end: int) -> Iterator[Piece]:
        start = len(self._out)
        if end > start:
            self._out = self._text[:end]
            yield Piece(self._text[start:end], self._kind)

    def _shorten(self) -> None:
        """Let the oldest ids go where the text falls into two parts that read alone as they do together."""
        length = len(self._window)
        if length <= WINDOW or (self._disturbed and length < LONGEST_WINDOW):
            return
        waiting = len(self._text) - len(self._out)
        cuts = range(length - KEPT, length - KEPT + PENDING + 1)  # one of them is not inside a character
        cut = next((cut for cut in cuts if self._splits(cut, waiting)), None)
        if cut is None and length < LONGEST_WINDOW:
            return
        self._window = self._window[cut or cuts[0] :]
        self._text = self._codec.decode(self._window)
        self._out = self._text[: max(0, len(self._text) - waiting)]
        self._disturbed = 0

    def _splits(self, cut: int, waiting: int) -> bool:
        left, right = self._codec.decode(self._window[:cut]), self._codec.decode(self._window[cut:])
        # Some tokenizers drop the space in front of the first word.
        return len(right) > waiting and self._text in (left + right, f"{left} {right}")
