"""Where prompts come from (config group `prompts`). Knows files; knows nothing of models."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from specpipe.errors import UserError, flag, integer
from specpipe.paths import from_start

DEMO = Path(__file__).with_name("demo.jsonl")


@dataclass(frozen=True)
class Prompts:
    """Texts to decode, and whether they go through the chat template (None: if the model has one).

    categories: of each text, where the source names one; results are then also summed up by category.
    """

    texts: list[str]
    chat: bool | None = None
    categories: list[str | None] | None = None


def jsonl(
    *, path: str | Path, limit: int | None = None, per_category: int | None = None, chat: bool | None = None
) -> Prompts:
    """One JSON object a line, with `prompt` (a text) or `turns` (a list of texts, the first is decoded).

    Args:
        path: of the file, relative to the folder the command was started in.
        limit: take only the first so many; what follows is not read.
        per_category: take only the first so many of each value of the field `category`.
        chat: apply the chat template; None if there is one.

    Raises:
        UserError: naming the file and the line that cannot be used.
    """
    if not isinstance(path, (str, Path)):
        raise UserError(f"{path!r} is not the path of a file.", key="path")
    for key, value in (("limit", limit), ("per_category", per_category)):
        if value is not None:
            integer(key, value, 1)
    file = from_start(path)
    try:
        with file.open(encoding="utf-8-sig") as lines:
            rows = list(islice(_some_of_each(_rows(lines, file.name), per_category, file.name), limit))
    except UnicodeDecodeError as error:
        raise UserError(f"{str(path)!r} is not UTF-8 text.", key="path") from error
    except OSError as error:
        raise UserError(f"{str(path)!r} cannot be read: {error.strerror or error}.", key="path") from error
    if not rows:
        raise UserError(f"{str(path)!r} holds no prompts.", key="path")
    categories = [row.category for row in rows]
    return Prompts([row.text for row in rows], _chat(chat), categories if any(categories) else None)


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


class _Row(NamedTuple):
    text: str
    category: str | None


def _some_of_each(rows: Iterable[_Row], count: int | None, name: str) -> Iterator[_Row]:
    """The first `count` rows of each category; all rows if None."""
    seen: Counter[str] = Counter()
    for row in rows:
        if count is not None:
            if row.category is None:
                raise UserError(f"{name} has rows without a 'category'.", key="per_category")
            seen[row.category] += 1
        if count is None or seen[row.category or ""] <= count:
            yield row


def _rows(lines: Iterable[str], name: str) -> Iterator[_Row]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _row(line, f"{name}, line {number}")


def _row(line: str, where: str) -> _Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({getattr(error, 'msg', error)}).", key="path") from error
    text = _prompt_of(row) if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{where}: has neither a text 'prompt' nor a list of texts 'turns'.", key="path")
    category = row.get("category")
    return _Row(_encodable(text, where, "path"), None if category is None else str(category))


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
