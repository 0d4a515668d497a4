"""Where prompts come from (config group `prompts`). Knows files and their formats; knows nothing of models.

All files may be gzipped. Those of JSON hold an object a line, or one list of objects.
"""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from specpipe.errors import UserError, choice, flag, integer
from specpipe.paths import from_start

DEMO = Path(__file__).with_name("demo.jsonl")
GZIP = b"\x1f\x8b"  # how a packed file begins
TURNS = ("first", "all")
TESTS = "Your code should pass these tests:"  # between task and tests, as in the paper on MBPP (arXiv 2108.07732)


@dataclass(frozen=True)
class Prompts:
    """Texts to decode, and whether they go through the chat template (None: if the model has one).

    categories: of each text, where the source names one; results are then also summed up by category. later: what the
    user goes on to say after each text, turn by turn; None where first turns alone are asked.
    """

    texts: list[str]
    chat: bool | None = None
    categories: list[str | None] | None = None
    later: list[list[str]] | None = None


def jsonl(
    *,
    path: str | Path,
    limit: int | None = None,
    per_category: int | None = None,
    turns: str = "first",
    chat: bool | None = None,
) -> Prompts:
    """JSON objects with `prompt` (a text), `turns` (what the user says, a list of texts) or `messages`.

    Messages are objects with `role` and `content`, the user's and the assistant's in turn; what the assistant says in
    the file is left out, for the model answers itself.

    Args:
        path: of the file, relative to the folder the command was started in.
        limit: take only the first so many; what follows is not read.
        per_category: take only the first so many of each value of the field `category`.
        turns: of several, decode the first or all of them, each behind the model's own answers.
        chat: apply the chat template; None if there is one.

    Raises:
        UserError: naming the file and the line that cannot be used.
    """
    return _from_json(path, _turns_of_any, limit, chat, per_category=per_category, turns=turns)


def spec_bench(
    *,
    path: str | Path,
    limit: int | None = None,
    per_category: int | None = None,
    turns: str = "first",
    chat: bool | None = None,
) -> Prompts:
    """Spec-Bench's or MT-bench's `question.jsonl`: `turns`, a list of texts, and `category`. Arguments as `jsonl`'s."""
    return _from_json(path, _turns_of_question, limit, chat, per_category=per_category, turns=turns)


def humaneval(*, path: str | Path, limit: int | None = None, chat: bool | None = None) -> Prompts:
    """`HumanEval.jsonl.gz`: the `prompt` of each task, the head of a function, as it is. Arguments as `jsonl`'s."""
    return _from_json(path, lambda row: [_text(row, "prompt")], limit, chat)


def mbpp(*, path: str | Path, limit: int | None = None, chat: bool | None = None) -> Prompts:
    """`mbpp.jsonl`, `sanitized-mbpp.json` or MBPP+: each task with its tests, worded as in arXiv 2108.07732.

    The task is `text` or `prompt`, the tests are `test_list`; without it (`MbppPlus.jsonl`, where the task holds its
    test) the task stands alone. Arguments as `jsonl`'s.
    """
    return _from_json(path, _turns_of_mbpp, limit, chat)


def text(*, path: str | Path, split: str = "paragraph", limit: int | None = None, chat: bool | None = None) -> Prompts:
    """A plain text file.

    Args:
        path: of the file, relative to the folder the command was started in.
        split: a prompt is a `line` that is not blank, a `paragraph` (lines up to a blank one) or the whole `file`.
        limit: take only the first so many; what follows is not read.
        chat: apply the chat template; None if there is one.

    Raises:
        UserError: for a file that cannot be read, is not UTF-8 or holds no prompts.
    """
    parts = SPLITS[choice("split", split, SPLITS)]
    with _opened(path) as lines:
        return _taken((_Row([part], None) for part in parts(lines)), path, limit, chat)


def demo(*, limit: int | None = None, per_category: int | None = None, chat: bool | None = None) -> Prompts:
    """A dozen prompts over chat, code, summary, extraction, translation and arithmetic."""
    return jsonl(path=DEMO, limit=limit, per_category=per_category, chat=chat)


def one(prompt: str, chat: bool | None) -> Prompts:
    """A single prompt; `-` reads standard input."""
    given = standard_input("prompt") if prompt == "-" else prompt
    return Prompts([_encodable(given, "the text", "prompt")], _chat(chat, "prompts.chat"))


def _chat(chat: bool | None, key: str = "chat") -> bool | None:
    return None if chat is None else flag(key, chat)


def standard_input(key: str) -> str:
    """All of it, but for the newline that `echo` puts at its end. As UTF-8, whatever the locale says.

    Raises:
        UserError: under `key`, if there is none, or it is no text.
    """
    if sys.stdin is None:
        raise UserError("there is no standard input to read.", key=key)
    try:
        given = sys.stdin.buffer.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError("standard input is not UTF-8 text.", key=key) from error
    return given.replace("\r\n", "\n").removesuffix("\n")


class _Row(NamedTuple):
    turns: list[str]  # at least one
    category: str | None


def _from_json(
    path: str | Path,
    turns_of: Callable[[Mapping[str, Any]], list[str]],
    limit: int | None,
    chat: bool | None,
    *,
    per_category: int | None = None,
    turns: str = "first",
) -> Prompts:
    """Prompts of the rows of a file; `turns_of` raises UserError for what a row lacks."""
    choice("turns", turns, TURNS)
    if per_category is not None:
        integer("per_category", per_category, 1)
    with _opened(path) as lines:
        name = Path(path).name
        rows = (_row(value, where, turns_of) for where, value in _values(lines, name))
        return _taken(_some_of_each(rows, per_category, name), path, limit, chat, with_later=turns == "all")


def _taken(
    rows: Iterable[_Row], path: str | Path, limit: int | None, chat: bool | None, *, with_later: bool = False
) -> Prompts:
    if limit is not None:
        integer("limit", limit, 1)
    chat = _chat(chat)
    taken = list(islice(rows, limit))
    if not taken:
        raise UserError(f"{str(path)!r} holds no prompts.", key="path")
    categories = [row.category for row in taken]
    return Prompts(
        [row.turns[0] for row in taken],
        chat,
        categories if any(categories) else None,
        [row.turns[1:] for row in taken] if with_later else None,
    )


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[TextIO]:
    """The lines of a file, unpacked if what it holds is gzip, whatever its name; UserError if they cannot be read."""
    if not isinstance(path, (str, Path)):
        raise UserError(f"{path!r} is not the path of a file.", key="path")
    try:
        with from_start(path).open("rb") as raw:
            packed = raw.peek(len(GZIP)).startswith(GZIP)
            yield io.TextIOWrapper(gzip.GzipFile(fileobj=raw) if packed else raw, encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{str(path)!r} is not UTF-8 text.", key="path") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{str(path)!r} cannot be read: {reason}.", key="path") from error


def _values(lines: TextIO, name: str) -> Iterator[tuple[str, Any]]:
    """Each JSON value, behind the words for where it stands."""
    filled = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    for number, line in islice(filled, 1):
        if line.lstrip().startswith("["):
            rows = _loaded(line + lines.read(), name, number)
            yield from ((f"{name}, row {place}", row) for place, row in enumerate(rows, 1))
        else:
            yield f"{name}, line {number}", _loaded(line, name, number)
    for number, line in filled:
        yield f"{name}, line {number}", _loaded(line, name, number)


def _loaded(given: str, name: str, number: int) -> Any:
    """The value of a JSON text that begins in line `number`."""
    try:
        return json.loads(given.rstrip())  # else what is missing at the end is looked for in the next line
    except (ValueError, RecursionError) as error:
        where = f"{name}, line {number + getattr(error, 'lineno', 1) - 1}"
        raise UserError(f"{where}: not JSON ({getattr(error, 'msg', error)}).", key="path") from error


def _row(value: Any, where: str, turns_of: Callable[[Mapping[str, Any]], list[str]]) -> _Row:
    try:
        if not isinstance(value, dict):
            raise UserError("is not a JSON object.")
        turns = turns_of(value)
    except UserError as error:
        raise UserError(f"{where}: {error.message}", key="path") from error
    category = value.get("category")
    return _Row([_encodable(turn, where, "path") for turn in turns], None if category is None else str(category))


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


def _turns_of_any(row: Mapping[str, Any]) -> list[str]:
    given = [key for key in ("prompt", "turns", "messages") if row.get(key) is not None]
    if len(given) > 1:
        raise UserError(f"has both {given[0]!r} and {given[1]!r}, of which only one can be decoded.")
    if given == ["messages"]:
        return _said_by_the_user(row["messages"])
    if given == ["turns"]:
        return _texts(row, "turns")
    if not isinstance(row.get("prompt"), str):
        raise UserError("has neither a text 'prompt' nor a list of texts 'turns' nor a list 'messages'.")
    return [row["prompt"]]


def _said_by_the_user(messages: Any) -> list[str]:
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise UserError("'messages' is not a list of objects with 'role' and 'content'.")
    if not messages or any(each.get("role") != ("user", "assistant")[place % 2] for place, each in enumerate(messages)):
        raise UserError("'messages' are not of the roles 'user' and 'assistant' in turn, beginning with 'user'.")
    return [_text(each, "content") for each in messages[::2]]


def _turns_of_question(row: Mapping[str, Any]) -> list[str]:
    if row.get("category") is None:
        raise UserError("has no 'category'.")
    return _texts(row, "turns")


def _turns_of_mbpp(row: Mapping[str, Any]) -> list[str]:
    task = _text(row, "text" if "text" in row else "prompt")
    if row.get("test_list") is None:
        return [task]
    return ["\n".join([task.rstrip(), TESTS, "", *_texts(row, "test_list")])]


def _text(row: Mapping[str, Any], key: str) -> str:
    if not isinstance(row.get(key), str):
        raise UserError(f"has no text {key!r}.")
    return str(row[key])


def _texts(row: Mapping[str, Any], key: str) -> list[str]:
    found = row.get(key)
    if not isinstance(found, list) or not found or not all(isinstance(each, str) for each in found):
        raise UserError(f"has no list of texts {key!r}.")
    return found


def _filled_lines(lines: TextIO) -> Iterator[str]:
    yield from (line.rstrip("\n") for line in lines if line.strip())


def _paragraphs(lines: TextIO) -> Iterator[str]:
    for blank, block in groupby(lines, lambda line: not line.strip()):
        if not blank:
            yield "".join(block).rstrip("\n")


def _whole_file(lines: TextIO) -> Iterator[str]:
    """But for the newline at its end; nothing of a file that is blank."""
    if (content := lines.read()).strip():
        yield content.removesuffix("\n")


SPLITS: Mapping[str, Callable[[TextIO], Iterator[str]]] = {
    "line": _filled_lines,
    "paragraph": _paragraphs,
    "file": _whole_file,
}


def _encodable(given: str, where: str, key: str) -> str:
    """Half a surrogate pair, or a byte of the command line that is no UTF-8, would fail in the tokenizer or on disk."""
    try:
        given.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: holds {given[error.start]!r}, which is not a character.", key=key) from error
    return given
