"""Text to token ids and back: chat template, and streaming that never emits half a character.

Knows tokenizers; knows nothing of models or of how tokens came about, beyond the name of their kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from specpipe.errors import UserError
from specpipe.sequence import Step


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
    """Turns steps into text as soon as it can no longer change; joined, the pieces are `decode` of all ids."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._ids: list[int] = []
        self._shown = 0  # ids whose text is out
        self._context = 0  # ids before this no longer influence how later ones read
        self._kind = "plain"

    def push(self, step: Step) -> Iterator[Piece]:
        """Pieces that this step completed."""
        for token, kind in zip(step.tokens, step.kinds, strict=True):
            self._ids.append(token)
            self._kind = kind
            text = self._unshown()
            if text and not text.endswith("�"):  # an unfinished character waits for its bytes
                yield self._show(text)

    def flush(self) -> Iterator[Piece]:
        """What was held back, at the end of the answer."""
        text = self._unshown()
        if text:
            yield self._show(text)

    def _unshown(self) -> str:
        """Text of the ids not shown yet, read behind some that were, since tokenizers join words by context."""
        before = self._codec.decode(self._ids[self._context : self._shown])
        return self._codec.decode(self._ids[self._context :])[len(before) :]

    def _show(self, text: str) -> Piece:
        self._context, self._shown = self._shown, len(self._ids)
        return Piece(text, self._kind)
