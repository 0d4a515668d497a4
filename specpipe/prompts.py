"""Where prompts come from (config group `prompts`). Knows files; knows nothing of models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from specpipe.errors import UserError, flag, integer
from specpipe.paths import from_start

DEMO = Path(__file__).with_name("demo.jsonl")


@dataclass(frozen=True)
class Prompts:
    """Texts to decode, and whether they go through the chat template (None: if the model has one)."""

    texts: list[str]
    chat: bool | None = None


def jsonl(*, path: str | Path, limit: int | None = None, chat: bool | None = None) -> Prompts:
    """One JSON object a line, with `prompt` (a text) or `turns` (a list of texts, the first is decoded).

    Args:
        path: of the file, relative to the folder the command was started in.
        limit: take only the first so many; what follows is not read.
        chat: apply the chat template; None if there is one.

    Raises:
        UserError: naming the file and the line that cannot be used.
    """
    if not isinstance(path, (str, Path)):
        raise UserError(f"{path!r} is not the path of a file.", key="path")
    if limit is not None:
        integer("limit", limit, 1)
    file = from_start(path)
    try:
        with file.open(encoding="utf-8-sig") as lines:
            texts = list(islice(_texts(lines, file.name), limit))
    except UnicodeDecodeError as error:
        raise UserError(f"{str(path)!r} is not UTF-8 text.", key="path") from error
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read: {error.strerror or error}.", key="path") from error
    if not texts:
        raise UserError(f"{str(path)!r} holds no prompts.", key="path")
    return Prompts(texts, _chat(chat))


def demo(*, limit: int | None = None, chat: bool | None = None) -> Prompts:
    """A dozen prompts over chat, code, summary, extraction, translation and arithmetic."""
    return jsonl(path=DEMO, limit=limit, chat=chat)


def one(prompt: str, chat: bool | None) -> Prompts:
    """A single prompt; `-` reads standard input."""
    text = _standard_input() if prompt == "-" else prompt
    return Prompts([_encodable(text, "the text", "prompt")], _chat(chat, "prompts.chat"))


def _chat(chat: bool | None, key: str = "chat") -> bool | None:
    return None if chat is None else flag(key, chat)


def _standard_input() -> str:
    """All of it, but for the newline that `echo` puts at its end. As UTF-8, whatever the locale says."""
    if sys.stdin is None:
        raise UserError("there is no standard input to read.", key="prompt")
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError("standard input is not UTF-8 text.", key="prompt") from error
    return text.replace("\r\n", "\n").removesuffix("\n")


def _texts(lines: Iterable[str], name: str) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _text(line, f"{name}, line {number}")


def _text(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({getattr(error, 'msg', error)}).", key="path") from error
    text = _prompt_of(row) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{where}: has neither a text 'prompt' nor a list of texts 'turns'.", key="path")
    return _encodable(text, where, "path")


def _prompt_of(row: dict[str, Any]) -> Any:
    turns = row.get("turns")
    return turns[0] if isinstance(turns, list) and turns else row.get("prompt")


def _encodable(text: str, where: str, key: str) -> str:
    """Half a surrogate pair, or a byte of the command line that is no UTF-8, would fail in the tokenizer or on disk."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: holds {text[error.start]!r}, which is not a character.", key=key) from error
    return text
