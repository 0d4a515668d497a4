"""Token ids on disk: one JSON object a line with `prompt_ids` and `output_ids`. What `audit file=` reads."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from typing import Any

from specpipe.audit.reading import Answer
from specpipe.errors import UserError
from specpipe.paths import from_start
from specpipe.prompts import standard_input

KEYS = ("prompt_ids", "output_ids")


def read_outputs(path: str) -> list[tuple[str, Answer]]:
    """Every line's answer, with words for where it stands. `-` reads standard input.

    Raises:
        UserError: naming the file and the line that cannot be used.
    """
    if not path:
        raise UserError("is empty; it needs the path of a file.", key="file")
    name, text = ("standard input", standard_input("file")) if path == "-" else (from_start(path).name, _content(path))
    named = ((f"{name}, line {n}", line) for n, line in enumerate(text.split("\n"), 1))
    answers = [(where, _answer(line, where)) for where, line in named if line.strip()]
    if not answers:
        raise UserError(f"{path!r} holds no outputs.", key="file")
    return answers


def check_outputs(
    answers: Iterable[tuple[str, Answer]], vocabulary: int, context: int | None, stop_ids: Collection[int]
) -> list[Answer]:
    """The answers, if the target can have made them: ids it has, no longer than its context, nothing behind an end.

    Raises:
        UserError: naming the line, and what is wrong with it.
    """
    checked = []
    for where, answer in answers:
        for key, ids in zip(KEYS, (answer.prompt, answer.output), strict=True):
            if beyond := [token for token in ids if token >= vocabulary]:
                raise UserError(
                    f"{where}: {key} holds {beyond[0]}; the target's ids end at {vocabulary - 1}.", key="file"
                )
        length = len(answer.prompt) + len(answer.output)
        if context is not None and length > context:
            raise UserError(f"{where}: {length} tokens do not fit the target's context of {context}.", key="file")
        if ends := [token for token in answer.output[:-1] if token in stop_ids]:
            what = f"output_ids go on behind {ends[0]}, which ends a text"
            raise UserError(f"{where}: {what}; cut off the padding, or set generation.ignore_eos=true.", key="file")
        checked.append(answer)
    return checked


def write_outputs(answers: Iterable[Answer]) -> str:
    """The text of such a file."""
    rows = ({"prompt_ids": answer.prompt, "output_ids": answer.output} for answer in answers)
    return "".join(f"{json.dumps(row)}\n" for row in rows)


def _content(path: str) -> str:
    try:
        return from_start(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path!r} is not UTF-8 text.", key="file") from error
    except OSError as error:
        raise UserError(f"{path!r} cannot be read: {error.strerror or error}.", key="file") from error


def _answer(line: str, where: str) -> Answer:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON ({getattr(error, 'msg', error)}).", key="file") from error
    if not isinstance(row, dict) or not all(_are_ids(row.get(key)) for key in KEYS):
        raise UserError(f"{where}: needs lists of token ids, `prompt_ids` and `output_ids`.", key="file")
    if not row["prompt_ids"]:
        raise UserError(f"{where}: prompt_ids is empty; the first token has no law without a prompt.", key="file")
    return Answer(row["prompt_ids"], row["output_ids"])


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
