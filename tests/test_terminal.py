"""What `decode` shows: on standard output the text and nothing else, untouched; all else beside it."""

from __future__ import annotations

import io
import re
from typing import Any

import pytest
from rich.cells import cell_len

from specpipe.errors import UserError
from specpipe.sequence import Step
from specpipe.stats import summarise
from specpipe.terminal import SEPARATOR, DecodeView, OutputClosed
from specpipe.text import Piece

AWKWARD = "a [bold]b[/bold] [/x] **c**\t:smile: " + "long " * 60 + "\r\n  é 日本 🏔️ \x1b[31m\n"
SECONDS = {"prefill": 2.0, "draft": 2.0, "verify": 2.0, "accept": 2.0, "other": 2.0}
RECORD: dict[str, Any] = {"tokens_per_s": 12.5}


class Screen(io.StringIO):
    """A stream that says of itself that it is a terminal."""

    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def show(
    *answers: list[Piece], out: io.StringIO | None = None, err: io.StringIO | None = None, prompt: str = "Name a river."
) -> tuple[str, str]:
    """What arrives on standard output and standard error, pipes unless given."""
    out, err = out or io.StringIO(), err or io.StringIO()
    with DecodeView(len(answers), out, err) as view:
        for number, pieces in enumerate(answers):
            view.begin(number, prompt)
            for piece in pieces:
                view.piece(piece)
            view.end(RECORD)
    return out.getvalue(), err.getvalue()


def show_summary(summary: dict[str, Any], out: io.StringIO | None = None) -> str:
    err = type(out or io.StringIO())()
    DecodeView(1, out or io.StringIO(), err).summary(summary)
    return err.getvalue()


def summary_of(*steps: Step) -> dict[str, Any]:
    for step in steps:
        step.seconds = dict(SECONDS)
    return summarise([[step] for step in steps], 4)


def plain_text(text: str) -> str:
    """Without escape sequences."""
    return re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", text)


def on_screen(written: str) -> list[str]:
    """The lines that a terminal shows in the end; it does what rich asks of it, and wraps nothing."""
    lines, row = [""], 0
    for token in re.findall(r"\x1b\[[?0-9;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", written):
        if token == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        elif token == "\x1b[1A":
            row -= 1
        elif token == "\x1b[2K":
            lines[row] = ""
        elif not token.startswith(("\x1b", "\r")):
            lines[row] += token
    return [line.rstrip(" ") if not line.strip() else line for line in lines]


def test_piped_output_is_exactly_the_text_and_a_newline() -> None:
    kinds = ["plain", "accepted", "correction", "bonus"]
    out, err = show([Piece(letter, kinds[i % 4]) for i, letter in enumerate(AWKWARD)])
    assert out == AWKWARD + "\n"
    assert err == ""


def test_several_piped_answers_are_separated_by_a_line_with_a_form_feed() -> None:
    out, err = show([Piece("one\n\n---\n", "plain")], [], [Piece("three", "bonus")])
    assert out.split("\n" + SEPARATOR) == ["one\n\n---\n", "", "three\n"]
    assert err.splitlines() == [f"[{n}/3] Name a river." for n in (1, 2, 3)]


def test_each_kind_of_token_has_its_colour_and_plain_tokens_have_none() -> None:
    kinds = [Piece("p", "plain"), Piece("a", "accepted"), Piece("c", "correction"), Piece("b", "bonus")]
    out, _ = show(kinds, out=Screen())
    assert out == "p\x1b[32ma\x1b[0m\x1b[31mc\x1b[0m\x1b[36mb\x1b[0m\n"


@pytest.mark.parametrize(("name", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_without_colours_gets_none(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    out, _ = show([Piece("a", "accepted"), Piece("\tb", "bonus")], out=Screen(), err=Screen())
    assert out == "a\tb\n"


def test_force_color_colours_a_pipe_and_still_writes_only_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    out, _ = show([Piece("a", "accepted")], [Piece("b\n", "bonus")])
    assert out == "\x1b[32ma\x1b[0m\n" + SEPARATOR + "\x1b[36mb\n\x1b[0m\n"


def test_text_on_a_terminal_is_untouched_but_for_characters_the_terminal_would_obey() -> None:
    out, _ = show([Piece(AWKWARD, "plain")], out=Screen())
    assert out == AWKWARD.replace("\x1b", "␛").replace("\r", "␍") + "\n"


@pytest.mark.parametrize("columns", ["80", "20", "1"])
def test_with_a_progress_bar_each_answer_still_stands_whole_under_its_prompt(
    monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("LINES", "25")
    monkeypatch.setattr("specpipe.terminal.REDRAW_S", 0.0)
    long = "word " * 40
    answers = [Piece("a [b] ", "accepted"), Piece(f"{long}\nsecond", "bonus")], [Piece("日本 🏔\n", "plain")]
    out, err = show(*map(list, answers), out=Screen(), err=Screen())
    first, *between, last = [line for line in on_screen(out) if line]
    assert between == [f"a [b] {long}", "second", first.replace("1/", "2/")]
    assert last == "日本 🏔"
    assert err == ""
    assert out.count("\x1b[?25l") == out.count("\x1b[?25h") == 1  # the cursor is back
    drawn = plain_text(out)
    assert ("1/2  12.5 tokens/s  0:00 left" in drawn) == (columns == "80")
    assert ("1/2" in drawn) == (columns != "1")


def test_the_bar_goes_to_standard_error_when_the_text_is_piped() -> None:
    out, err = show([Piece("a", "accepted")], [Piece("b", "bonus")], err=Screen())
    assert out == f"a\n{SEPARATOR}b\n"
    assert "1/2" in plain_text(err)


def test_a_dumb_terminal_gets_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out, err = show([Piece("a", "accepted")], [Piece("b", "bonus")], out=Screen(), err=Screen())
    assert out == "a\n\nb\n"
    assert "\x1b" not in err


def test_a_heading_is_one_line_cut_to_the_width() -> None:
    _, err = show([], [], prompt="Explain [this] to\na child: " + "日本" * 60)
    first, second = err.splitlines()
    assert first.startswith("[1/2] Explain [this] to a child: 日本")
    assert second.endswith("…")
    assert cell_len(first) <= 80


@pytest.mark.parametrize("total", [1, 2])
def test_an_interruption_leaves_the_text_shown_and_the_cursor_on_a_line_of_its_own(total: int) -> None:
    out = Screen()

    def interrupted() -> None:
        with DecodeView(total, out, Screen()) as view:
            view.begin(0, "prompt")
            view.piece(Piece("half a line", "accepted"))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "half a line\n" in plain_text(out.getvalue())
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h")


def test_the_table_names_every_number_and_fits_80_columns() -> None:
    steps = [Step(4, n, [1] * (n + 1), [0.5] * min(n + 1, 4)) for n in (4, 0, 2)]
    table = show_summary(summary_of(*steps)).splitlines()
    assert table == [
        "",
        "new tokens          9 in 30.0 s",
        "tokens/s            0.3",
        "tokens/target pass  3.00",
        "alpha               0.50 (95 % interval 0.50 to 0.50)",
        "accepted            6 of 12 draft tokens (50%)",
        "time                prefill 20%, draft 20%, verify 20%, accept 20%, other 20%",
    ]
    assert max(map(len, table)) <= 80


def test_on_a_narrow_terminal_the_table_breaks_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "34")
    lines = show_summary(summary_of(Step(4, 2, [1, 1, 1], [0.5] * 3))).splitlines()
    assert max(map(len, lines)) <= 34
    assert lines[-3:] == ["time                prefill 20%,", "  draft 20%, verify 20%, accept", "  20%, other 20%"]


def test_a_note_is_one_line_so_that_it_copies_as_one() -> None:
    err = io.StringIO()
    DecodeView(1, io.StringIO(), err).note("result: [/x] " + "x" * 200)
    assert err.getvalue() == "result: [/x] " + "x" * 200 + "\n"


def test_the_legend_is_there_when_the_text_has_colours() -> None:
    summary = summary_of(Step(4, 2, [1, 1, 1], [0.5] * 3))
    legend = "\x1b[32maccepted draft\x1b[0m  \x1b[31mcorrection\x1b[0m  \x1b[36mbonus\x1b[0m\n"
    assert legend in show_summary(summary, Screen())
    assert "correction" not in show_summary(summary)


def test_nothing_decoded_is_na_and_never_a_division_by_zero() -> None:
    assert show_summary(summarise([[]], 4)).splitlines() == [
        "",
        "new tokens          0 in 0.0 s",
        "tokens/s            n/a",
        "tokens/target pass  n/a",
        "time                n/a",
    ]


def test_drafts_that_are_hardly_ever_accepted_are_mentioned() -> None:
    """C44."""
    never = show_summary(summary_of(*(Step(4, 0, [1], [0.1]) for _ in range(30))))
    assert never.splitlines()[-1] == "warning: hardly any draft was accepted (1.00 tokens per step)"
    assert "warning" not in show_summary(summary_of(Step(4, 1, [1, 1], [0.1, 0.1])))


class Broken(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self._error = error

    def flush(self) -> None:
        raise self._error


def test_a_reader_who_has_gone_is_told_from_a_full_disk() -> None:
    with pytest.raises(OutputClosed):
        show([Piece("a", "plain")], out=Broken(BrokenPipeError(32, "Broken pipe")))
    with pytest.raises(UserError, match="standard output: No space left on device"):
        show([Piece("a", "plain")], out=Broken(OSError(28, "No space left on device")))


def test_a_closed_standard_error_does_not_stop_the_text() -> None:
    out, _ = show([Piece("a", "plain")], [Piece("b", "plain")], err=Broken(BrokenPipeError(32, "Broken pipe")))
    assert out == f"a\n{SEPARATOR}b\n"
