"""Prompts from files, from standard input and from the command line."""

from __future__ import annotations

import gzip
import io
import json
import sys
from collections import Counter
from collections.abc import Callable
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
        tmp_path, '{"prompt": "one"}', "", '{"turns": ["two", "three"], "id": 7}', '{"turns": null, "prompt": "four"}'
    )
    assert prompts.jsonl(path=file).texts == ["one", "two", "four"]


def test_all_turns_are_what_the_user_goes_on_to_say(tmp_path: Path) -> None:
    talk = [("user", "one"), ("assistant", "theirs"), ("user", "two"), ("assistant", "theirs")]
    messages = [{"role": role, "content": content} for role, content in talk]
    rows = [{"turns": ["a", "b", "c"]}, {"prompt": "alone"}, {"messages": messages}]
    file = write(tmp_path, *map(json.dumps, rows))
    assert prompts.jsonl(path=file, turns="all").texts == ["a", "alone", "one"]
    assert prompts.jsonl(path=file, turns="all").later == [["b", "c"], [], ["two"]]
    assert prompts.jsonl(path=file).texts == ["a", "alone", "one"]
    assert prompts.jsonl(path=file).later is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "turns": ["b"]}, "has both 'prompt' and 'turns', of which only one can be decoded."),
        ({"turns": [], "prompt": "four"}, "has both 'prompt' and 'turns'"),
        ({"turns": ["a"], "messages": []}, "has both 'turns' and 'messages'"),
        ({"turns": []}, "has no list of texts 'turns'."),
        ({"turns": ["a", 3]}, "has no list of texts 'turns'."),
        ({"messages": ["a"]}, "'messages' is not a list of objects with 'role' and 'content'."),
        ({"messages": []}, "'messages' are not of the roles 'user' and 'assistant' in turn"),
        ({"messages": [{"role": "system", "content": "a"}]}, "'messages' are not of the roles"),
        ({"messages": [{"role": "user", "content": "a"}] * 2}, "'messages' are not of the roles"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "has no text 'content'."),
    ],
)
def test_a_row_that_is_no_conversation_says_why(tmp_path: Path, row: dict[str, object], message: str) -> None:
    assert refusal(write(tmp_path, json.dumps(row))).startswith(f"path: some.jsonl, line 1: {message}")


def test_a_packed_file_is_read_whatever_its_name(tmp_path: Path) -> None:
    plain, packed = b'{"prompt": "one"}\n', tmp_path / "packed"
    packed.write_bytes(gzip.compress(b"\xef\xbb\xbf" + plain))
    assert prompts.jsonl(path=packed).texts == ["one"]
    misnamed = tmp_path / "plain.jsonl.gz"
    misnamed.write_bytes(plain)
    assert prompts.jsonl(path=misnamed).texts == ["one"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b'{"prompt": "one"}' * 99)[:-12], "cannot be read: Compressed file ended"),
        (gzip.compress(b"x")[:-8] + bytes(8), "cannot be read: CRC check failed"),
        (b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 9, "cannot be read: Error -3"),
        (gzip.compress(b"\xff\xfe"), "is not UTF-8 text"),
        (gzip.compress(b'{"prompt": "one"}\n{'), "line 2: not JSON"),
    ],
    # named, because the bytes hold the time: names made of them would differ between workers
    ids=["cut", "checksum", "garbage", "not UTF-8", "not JSON"],
)
def test_a_packed_file_that_is_broken_is_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "some.jsonl.gz"
    file.write_bytes(content)
    assert message in refusal(file)


def test_a_list_of_objects_is_rows_too(tmp_path: Path) -> None:
    file = write(tmp_path, "", "[", '  {"prompt": "one"},', '  {"prompt": "two"}', "]")
    assert prompts.jsonl(path=file).texts == ["one", "two"]
    assert refusal(write(tmp_path, "[1]")) == "path: some.jsonl, row 1: is not a JSON object."
    assert refusal(write(tmp_path, "", "[", '{"prompt": "one"},', "{,}", "]")).startswith(
        "path: some.jsonl, line 4: not JSON"
    )
    assert "holds no prompts" in refusal(write(tmp_path, "[]"))


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


def test_spec_bench_rows_have_turns_and_a_category(tmp_path: Path) -> None:
    rows = [{"question_id": i, "category": "ab"[i % 2], "turns": [f"{i}", f"{i}b"][: 1 + i % 2]} for i in range(6)]
    file = write(tmp_path, *map(json.dumps, rows))
    some = prompts.spec_bench(path=file, per_category=2, turns="all", limit=3, chat=False)
    assert some == prompts.Prompts(["0", "1", "2"], False, ["a", "b", "a"], [[], ["1b"], []])
    assert prompts.spec_bench(path=file).later is None


def test_humaneval_prompts_are_taken_as_they_are(tmp_path: Path) -> None:
    head = 'from typing import List\n\n\ndef twice(x: List[int]) -> List[int]:\n    """ Each doubled. """\n'
    row = {"task_id": "HumanEval/0", "prompt": head, "entry_point": "twice", "canonical_solution": "", "test": ""}
    file = tmp_path / "HumanEval.jsonl.gz"
    file.write_bytes(gzip.compress(f"{json.dumps(row)}\n".encode() * 3))
    assert prompts.humaneval(path=file, limit=2) == prompts.Prompts([head, head])


def test_mbpp_tasks_come_with_their_tests_in_each_of_its_formats(tmp_path: Path) -> None:
    asked = "Write a function.\nYour code should pass these tests:\n\nassert f(1) == 2\nassert f(2) == 4"
    tests = ["assert f(1) == 2", "assert f(2) == 4"]
    original = {"task_id": 1, "text": "Write a function.", "code": "", "test_list": tests, "challenge_test_list": []}
    assert prompts.mbpp(path=write(tmp_path, json.dumps(original))).texts == [asked]
    sanitised = {"task_id": 1, "prompt": "Write a function.", "test_imports": [], "test_list": tests}
    assert prompts.mbpp(path=write(tmp_path, json.dumps([sanitised] * 3, indent=1)), limit=2).texts == [asked] * 2
    plus = {"task_id": "Mbpp/1", "prompt": '"""\nWrite.\nassert f(1) == 2\n"""\n', "entry_point": "f"}
    assert prompts.mbpp(path=write(tmp_path, json.dumps(plus))).texts == [plus["prompt"]]


@pytest.mark.parametrize(
    ("read", "row", "message"),
    [
        (prompts.spec_bench, {"turns": ["a"]}, "has no 'category'."),
        (prompts.spec_bench, {"category": "a", "prompt": "b"}, "has no list of texts 'turns'."),
        (prompts.humaneval, {"task_id": "a"}, "has no text 'prompt'."),
        (prompts.mbpp, {"text": 3}, "has no text 'text'."),
        (prompts.mbpp, {"code": ""}, "has no text 'prompt'."),
        (prompts.mbpp, {"text": "a", "test_list": "b"}, "has no list of texts 'test_list'."),
    ],
)
def test_a_row_of_another_format_is_named_by_its_line(
    tmp_path: Path, read: Callable[..., object], row: dict[str, object], message: str
) -> None:
    file = write(tmp_path, "", json.dumps(row))
    with pytest.raises(UserError) as caught:
        read(path=file)
    assert str(caught.value) == f"path: some.jsonl, line 2: {message}"


@pytest.mark.parametrize(
    ("split", "texts"),
    [
        ("line", ["one", "  two", "three"]),
        ("paragraph", ["one\n  two", "three"]),
        ("file", ["\none\n  two\n \n\nthree\n"]),
    ],
)
def test_a_text_file_falls_into_lines_or_paragraphs_or_is_one_prompt(
    tmp_path: Path, split: str, texts: list[str]
) -> None:
    file = tmp_path / "book.txt"
    file.write_bytes(b"\r\none\r\n  two\r\n \r\n\r\nthree\r\n\r\n")
    assert prompts.text(path=file, split=split).texts == texts
    assert prompts.text(path=file, split=split, limit=1).texts == texts[:1]
    file.write_bytes(gzip.compress(file.read_bytes()))
    assert prompts.text(path=file, split=split).texts == texts


def test_a_text_file_falls_into_paragraphs_unless_told(tmp_path: Path) -> None:
    file = write(tmp_path, "one", "", "two")
    assert prompts.text(path=file).texts == ["one", "two"]
    with pytest.raises(UserError, match="split: 'word' is not one of line, paragraph, file"):
        prompts.text(path=file, split="word")


@pytest.mark.parametrize("split", ["line", "paragraph", "file"])
def test_a_blank_text_file_holds_no_prompts(tmp_path: Path, split: str) -> None:
    with pytest.raises(UserError, match="holds no prompts"):
        prompts.text(path=write(tmp_path, " ", "", ""), split=split)


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
        ({"per_category": 0}, "per_category: 0 is not a whole number from 1 up."),
        ({"turns": "last"}, "turns: 'last' is not one of first, all."),
        ({"chat": "maybe"}, "chat: 'maybe' is not true or false."),
        ({"path": 3}, "path: 3 is not the path of a file."),
    ],
)
def test_a_wrong_value_is_named_with_its_key(tmp_path: Path, keys: dict[str, object], message: str) -> None:
    assert message in refusal(**{"path": write(tmp_path, '{"prompt": "one"}'), **keys})


def test_the_demo_prompts_are_a_dozen() -> None:
    assert len(prompts.demo().texts) == 12
    assert len(prompts.demo(limit=2).texts) == 2
    assert set(Counter(prompts.demo(per_category=1).categories).values()) == {1}


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
