"""Prompts from files, from standard input and from the command line."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from specpipe import prompts
from specpipe.errors import UserError


def write(folder: Path, *lines: str, encoding: str = "utf-8") -> Path:
    file = folder / "some.jsonl"
    file.write_text("\n".join(lines), encoding=encoding)
    return file


def refusal(path: object, **keys: object) -> str:
    with pytest.raises(UserError) as caught:
        prompts.jsonl(path=path, **keys)  # type: ignore[arg-type]
    return str(caught.value)


def give_standard_input(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="ascii"))


def test_a_row_is_a_prompt_or_the_first_of_its_turns(tmp_path: Path) -> None:
    file = write(
        tmp_path, '{"prompt": "one"}', "", '{"turns": ["two", "three"], "id": 7}', '{"turns": [], "prompt": "four"}'
    )
    assert prompts.jsonl(path=file).texts == ["one", "two", "four"]


def test_nothing_is_special_in_a_file(tmp_path: Path) -> None:
    """D3: prompts also from a file, where nothing is special."""
    text = 'a=b, {c} #1 @x: 50% ${HOME} "quoted" \\n\n\ttwo lines, ünïcödé 🙂'
    assert prompts.jsonl(path=write(tmp_path, json.dumps({"prompt": text}))).texts == [text]


def test_limit_stops_reading(tmp_path: Path) -> None:
    file = write(tmp_path, '{"prompt": "one"}', "broken")
    assert prompts.jsonl(path=file, limit=1).texts == ["one"]


def test_some_rows_of_each_category(tmp_path: Path) -> None:
    rows = [{"turns": [f"{c}{i}"], "category": c} for i in range(3) for c in "ab"]
    file = write(tmp_path, *map(json.dumps, rows))
    some = prompts.jsonl(path=file, per_category=2)
    assert some.texts == ["a0", "b0", "a1", "b1"]
    assert some.categories == ["a", "b", "a", "b"]
    assert prompts.jsonl(path=file, per_category=2, limit=3).texts == ["a0", "b0", "a1"]


def test_rows_without_a_category_cannot_be_counted_by_it(tmp_path: Path) -> None:
    file = write(tmp_path, '{"prompt": "one"}')
    assert prompts.jsonl(path=file).categories is None
    assert refusal(file, per_category=1).startswith("per_category: ")


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    assert prompts.jsonl(path=write(tmp_path, '{"prompt": "one"}', encoding="utf-8-sig")).texts == ["one"]


@pytest.mark.parametrize("line", ["{broken", '{"prompt": 3}', '{"text": "a"}', "[1]", '{"turns": [3]}', "[" * 10_000])
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, line: str) -> None:
    good = ['{"prompt": "fine"}'] * 6
    assert refusal(write(tmp_path, *good, line)).startswith("path: some.jsonl, line 7: ")


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    assert "line 1: holds '\\ud83d'" in refusal(write(tmp_path, '{"prompt": "\\ud83d"}'))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read: No such file"), (b"", "holds no prompts"), (b"\xff\xfe", "not UTF-8")],
)
def test_a_file_that_gives_nothing_says_why(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "some.jsonl"
    if content is not None:
        file.write_bytes(content)
    assert message in refusal(file)


def test_a_folder_is_not_a_file_of_prompts(tmp_path: Path) -> None:
    assert "Is a directory" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"limit": 0}, "limit: 0 is not a whole number from 1 up."),
        ({"limit": "x"}, "limit: 'x' is not"),
        ({"chat": "maybe"}, "chat: 'maybe' is not true or false."),
        ({"path": 3}, "path: 3 is not the path of a file."),
    ],
)
def test_a_wrong_value_is_named_with_its_key(tmp_path: Path, keys: dict[str, object], message: str) -> None:
    assert message in refusal(**{"path": write(tmp_path, '{"prompt": "one"}'), **keys})


def test_the_demo_prompts_are_a_dozen() -> None:
    assert len(prompts.demo().texts) == 12
    assert len(prompts.demo(limit=2).texts) == 2


def test_one_prompt_is_taken_as_it_is() -> None:
    assert prompts.one("a\nb ", chat=True) == prompts.Prompts(["a\nb "], True)


@pytest.mark.parametrize(
    ("content", "text"), [(b"", ""), (b"two\r\nlines\n\n", "two\nlines\n"), ("grüße 🙂".encode(), "grüße 🙂")]
)
def test_a_dash_reads_standard_input_as_utf8(monkeypatch: pytest.MonkeyPatch, content: bytes, text: str) -> None:
    give_standard_input(monkeypatch, content)
    assert prompts.one("-", chat=None).texts == [text]


def test_standard_input_that_is_not_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    give_standard_input(monkeypatch, b"\xff")
    with pytest.raises(UserError, match="prompt: standard input is not UTF-8 text"):
        prompts.one("-", chat=None)
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="prompt: there is no standard input"):
        prompts.one("-", chat=None)


def test_a_byte_of_the_command_line_that_is_no_text_is_refused() -> None:
    with pytest.raises(UserError, match="prompt: the text: holds"):
        prompts.one("caf\udce9", chat=None)
