"""Text to token ids and back: chat template, and streaming that never emits half a character.

Knows tokenizers; knows nothing of models or of how tokens came about, beyond the name of their kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

from specpipe.errors import UserError, one_line
from specpipe.sequence import Sequence, Step

BETWEEN_TURNS = "\n\n"  # without a chat template: behind an answer, which itself goes on where the user stopped
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
        return self._ids(self._written([prompt]))

    def encode_next(self, said: Items[str], before: Sequence) -> tuple[list[int], bool]:
        """Token ids of a conversation up to the next answer, and whether they hold its last answer's ids as they are.

        If so they are the ids of `before`, prompt and answer, and behind them what the template puts there; an
        end-of-text id is the template's to put. Otherwise the whole is encoded anew from its text: where a stop string
        cut the answer, where the template changes it (strips it, leaves thoughts out), and where the tokenizer joins it
        with what follows. Without a chat template a blank line stands between an answer and the user's next turn.

        Args:
            said: texts of user and model in turn; the last is what the user says now.
            before: the request that the last answer in `said` is from, finished.
        """
        *earlier, answer, _ = said
        whole, begun = self._written(said), self._written(earlier) + answer
        ids = self._ids(whole)
        behind = self._tokenizer(whole[len(begun) :], add_special_tokens=False)["input_ids"]
        kept = before.tokens[: len(before.tokens) - self._ends_without_text(before)]
        as_it_is = self.decode(kept[before.prompt_length :]) == answer and whole.startswith(begun)
        if as_it_is and ids[len(ids) - len(behind) :] == behind:
            return kept + behind, True
        return ids, False

    def _written(self, said: Items[str]) -> str:
        """The text that the model reads when user and model have said this in turn and it is the model's turn."""
        if not self.chat:
            return BETWEEN_TURNS.join("".join(said[i : i + 2]) for i in range(0, len(said), 2))
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template is a program of the model's authors
            what = f"the target's chat template fails ({one_line(error)}); prompts.chat=false goes without"
            raise UserError(f"{what}.", key="prompts.chat") from error

    def _ids(self, written: str) -> list[int]:
        """A template brings its special tokens itself."""
        special = {"add_special_tokens": False} if self.chat else {}
        return list(self._tokenizer(written, **special)["input_ids"])

    def _ends_without_text(self, sequence: Sequence) -> bool:
        last = sequence.tokens[-1]
        return sequence.finish_reason == "stop" and last in sequence.stop_ids and not self.decode([last])

    def decode(self, ids: Items[int]) -> str:
        """Text of some ids without special tokens; bytes that are no character become U+FFFD."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def answer(self, sequence: Sequence) -> str:
        """Text of a request's output, cut at the stop string that ended it, if one did."""
        ids, settings = sequence.new_tokens, sequence.settings
        text = self.decode(ids)
        if not sequence.stopped_by_text:
            return text
        seen = len(self.decode(ids[:-1]).rstrip(BROKEN))  # the last token completed it
        found = [(text.find(string, max(0, seen - len(string) + 1)), len(string)) for string in settings.stop]
        # Behind bytes that are no character it may have been seen a token late: then it is looked for everywhere.
        hits = [hit for hit in found if hit[0] >= 0] or [(text.find(s), len(s)) for s in settings.stop if s in text]
        start, length = min(hits, key=lambda hit: hit[0] + hit[1], default=(len(text), 0))
        return text[: start + length] if settings.include_stop_str_in_output else text[:start]

    def by_token(self, ids: Items[int]) -> list[str]:
        """What text each id completes, joined `decode` of them all; empty for one that only begins a character."""
        stream = self.pieces()
        texts = ["".join(piece.text for piece in stream.add(token, "plain")) for token in ids]
        if texts:
            texts[-1] += "".join(piece.text for piece in stream.flush())
        return texts

    def name(self, token: int) -> str:
        """The text of one id by itself, special tokens included: what a person calls it."""
        return self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def pieces(self) -> PieceStream:
        """A fresh stream for one answer."""
        return PieceStream(self)

    def stream(self, sequence: Sequence, steps: Iterable[Step]) -> Iterator[Piece]:
        """The answer of `sequence` in pieces, as its steps are made; joined they are `answer`.

        Text that may become a stop string waits until it has or has not.
        """
        pieces, held = self.pieces(), HeldBack(sequence.settings.stop)
        for step in steps:
            held.add(pieces.push(step))
            if sequence.finish_reason is None:
                yield from held.ready()
        held.add(pieces.flush())
        yield from held.end(len(self.answer(sequence)))


class StopWatch:
    """Says when an answer first contains one of some strings, told its ids one by one."""

    def __init__(self, codec: TextCodec, strings: Items[str]) -> None:
        self._stream = PieceStream(codec)
        self._strings = strings
        self._tail = ""  # what a stop string may have begun in

    def __call__(self, token: int) -> bool:
        before = len(self._tail)
        text = self._tail + "".join(piece.text for piece in self._stream.add(token, "plain"))
        longest = max(map(len, self._strings))
        self._tail = text[len(text) - longest + 1 :] if 1 < longest <= len(text) else text if longest > 1 else ""
        return any(text.find(string, max(0, before - len(string) + 1)) >= 0 for string in self._strings)


class HeldBack:
    """Pieces of which the last ones may be the beginning of a stop string."""

    def __init__(self, strings: Items[str]) -> None:
        self._strings = strings
        self._waiting: list[Piece] = []
        self._out = 0  # characters passed on

    def add(self, pieces: Iterable[Piece]) -> None:
        self._waiting += pieces

    def ready(self) -> Iterator[Piece]:
        """What can no longer belong to a stop string."""
        text = "".join(piece.text for piece in self._waiting)
        yield from self._pass(len(text) - max((begin(text, string) for string in self._strings), default=0))

    def end(self, length: int) -> Iterator[Piece]:
        """The rest of an answer that turned out to be `length` characters long."""
        yield from self._pass(length - self._out)

    def _pass(self, count: int) -> Iterator[Piece]:
        while count > 0 and self._waiting:
            piece = self._waiting.pop(0)
            if len(piece.text) > count:
                self._waiting.insert(0, Piece(piece.text[count:], piece.kind))
                piece = Piece(piece.text[:count], piece.kind)
            count -= len(piece.text)
            self._out += len(piece.text)
            yield piece


def begin(text: str, string: str) -> int:
    """Length of the longest end of `text` that `string` begins with, the whole string included."""
    return next((n for n in range(min(len(text), len(string)), 0, -1) if text.endswith(string[:n])), 0)


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
            yield from self.add(token, kind)

    def add(self, token: int, kind: str) -> Iterator[Piece]:
        """Pieces that this token completed."""
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
