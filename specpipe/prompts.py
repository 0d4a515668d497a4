"""Where prompts come from (config group `prompts`). Knows files; knows nothing of models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specpipe.errors import UserError, flag, integer

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
        limit: take only the first so many.
        chat: apply the chat template; None if there is one.

    Raises:
        UserError: naming the file and the line that cannot be used.
    """
    file = Path(path).expanduser()
    if limit is not None:
        integer("limit", limit, 1)
    if chat is not None:
        flag("chat", chat)
    try:
        with file.open(encoding="utf-8") as lines:
            texts = [text for text, _ in zip(_texts(lines, file), range(limit or sys.maxsize), strict=False)]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{str(path)!r} cannot be read: {getattr(error, 'strerror', None) or error}", key="path") from error
    if not texts:
        raise UserError(f"{str(path)!r} holds no prompts.", key="path")
    return Prompts(texts, chat)


def demo(*, limit: int | None = None, chat: bool | None = None) -> Prompts:
    """A dozen prompts over chat, code, summary, extraction, translation and arithmetic."""
    return jsonl(path=DEMO, limit=limit, chat=chat)


def one(prompt: str, chat: bool | None) -> Prompts:
    """A single prompt; `-` reads standard input."""
    return Prompts([_standard_input() if prompt == "-" else prompt], chat)


def _standard_input() -> str:
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"standard input is not UTF-8 text: {error}", key="prompt") from error


def _texts(lines: Any, file: Path) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _text(line, f"{file.name}, line {number}")


def _text(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where}: not JSON ({error.msg}).", key="path") from error
    turns = row.get("turns") if isinstance(row, dict) else None
    text = turns[0] if isinstance(turns, list) and turns else row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(text, str):
        raise UserError(f"{where}: has neither a text 'prompt' nor a list of texts 'turns'.", key="path")
    return text
