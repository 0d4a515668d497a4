"""`report` as a person runs it: folders in, one page, one table, and a word where runs do not compare."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from markupsafe import Markup

from specpipe.commands import report
from specpipe.console import OutputClosed
from specpipe.errors import UserError
from specpipe.report import charts
from specpipe.report.comparison import NO_ROWS, comparison_page, shown
from specpipe.report.page import ABSENT
from tests.command_line import Run
from tests.test_bench_page import EVIL, Page, heads, looked_at, peer, rows, small, spread, traces
from tests.test_training_page import training


@pytest.fixture(autouse=True)
def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charts, "library", lambda: Markup("/* plotly.js */"))


@pytest.fixture
def specpipe(specpipe: Run) -> Run:
    """`specpipe report`, its run folder `out`."""
    return lambda *words: specpipe("report", *words, "hydra.run.dir=out")


def decoded(proposer: str = "ngram", **changed: Any) -> dict[str, Any]:
    """result.json of a decode."""
    config = {
        "proposer": {"_target_": f"specpipe.{proposer}"},
        "generation": {"temperature": 0.0, "max_new_tokens": 128},
        "prompts": {"_target_": "specpipe.prompts.demo", "limit": None},
        "prompt": None,
        "batch_size": 1,
    }
    return {
        "command": "decode",
        "version": "9.8.7",
        "target": {"model": "SomeLM-1B", "dtype": "bfloat16", "device": "cpu"},
        "proposer": proposer,
        "sampler": "rejection",
        "num_speculative_tokens": 5,
        "lossless": True,
        "batch_size": 1,
        "config": config,
        "requests": [{"finish_reason": "length"}] * 3,
        "summary": {
            "tokens_per_s": 41.5,
            "tokens_per_target_pass": 1.75,
            "alpha": spread(0.5, 0.125),
            "cost_ratio": 0.003,
        },
        **changed,
    }


def benched(**changed: Any) -> dict[str, Any]:
    return small(config=decoded()["config"], prompts={"count": 3}, **changed)


def put(folder: str, result: dict[str, Any], **provenance: Any) -> str:
    """A run folder."""
    Path(folder).mkdir(parents=True)
    Path(folder, "result.json").write_text(json.dumps(result))
    known = {"time": f"2026-11-30T10:00:0{len(folder) % 10}+0000", "git": "0123456789abcdef+", **provenance}
    Path(folder, "provenance.json").write_text(json.dumps(known))
    return folder


def found() -> dict[str, Any]:
    return json.loads(Path("out/result.json").read_text())


def runs(*results: dict[str, Any], machines: tuple[str | None, ...] = ()) -> list[dict[str, Any]]:
    """As the command reads them."""
    given = [*machines, *[None] * (len(results) - len(machines))]
    return [
        {"number": i, "folder": Path(f"/runs/{i}"), "result": result, "provenance": {"machine": {"gpu": gpu}}}
        for i, (result, gpu) in enumerate(zip(results, given, strict=True), 1)
    ]


# ---- the command ----


def test_a_decode_a_bench_and_a_training_make_one_table(specpipe: Run) -> None:
    """A row, a row for each cell, and a row; what a kind of run does not measure is absent."""
    words = [put("a/x", decoded()), put("a/y", benched()), put("b/z", training())]
    ran = specpipe(*words)
    assert ran.code == 0
    table = found()["rows"]
    assert [(row["run"], row["proposer"]) for row in table] == [
        (1, "ngram"),
        *((2, name) for name in ("none", "ngram", "mlp")),
        (3, "mlp"),
    ]
    decode, *cells, train = table
    assert (decode["tokens_per_s"], decode["speedup"], decode["temperature"]) == (41.5, None, 0.0)
    assert [row["speedup"] for row in cells] == [cell["summary"]["speedup"] for cell in benched()["cells"]]
    assert (train["tokens_per_target_pass"], train["alpha"]["mean"], train["tokens_per_s"]) == (1.875, 0.4375, None)
    assert {file.name for file in Path("out").iterdir()} >= {"result.json", "report.html", "provenance.json"}


def test_runs_are_named_with_folder_command_time_and_revision(specpipe: Run) -> None:
    specpipe(put("a/x", decoded(), time="2026-11-30T10:11:12+0000"), put("b/z", benched()))
    first, second = found()["runs"]
    assert (first["command"], first["time"], first["git"]) == (
        "decode",
        "2026-11-30T10:11:12+0000",
        "0123456789abcdef+",
    )
    assert first["folder"] == str(Path("a/x").resolve())
    assert (second["proposer"], second["prompts"]) == ("none, ngram, mlp", 3)
    text = Page(Path("out/report.html").read_text()).text
    for words in ("a/x", "b/z", "2026-11-30T10:11:12", "0123456789+", "SomeLM-1B, bfloat16, cpu", "none, ngram, mlp"):
        assert words in text


def test_the_terminal_shows_the_runs_and_a_short_table(specpipe: Run) -> None:
    ran = specpipe(put("x", decoded()), put("y", benched(gammas=[2, 4, 6])))
    lines = ran.out.splitlines()
    assert lines[:2] == ["1  decode  x", "2  bench  y"]
    assert lines[4].split() == ["1", "ngram", "5", "0", "1", ABSENT, "41.5", "1.75", "0.5"]
    assert len(lines) == 4 + 1 + 3  # of each proposer of the bench the best
    assert max(map(len, lines)) <= 80
    assert f"report: {Path('out').resolve() / 'report.html'}" in ran.err.splitlines()


def test_a_folder_without_a_result_is_left_out_and_named(specpipe: Run) -> None:
    """As a refused command leaves one; a run may also be named by its result.json."""
    Path("b/refused").mkdir(parents=True)
    ran = specpipe(put("a/x", decoded()) + "/result.json", "b/refused")
    assert ran.code == 0
    assert len(found()["runs"]) == 1
    assert "warning: 'b/refused' has no result.json and is left out." in ran.err


def test_folders_may_be_given_as_the_key_they_are(specpipe: Run) -> None:
    put("it's {a}, b", decoded())
    assert specpipe("it's {a}, b").code == 0
    assert specpipe("""folders=["it's {a}, b"]""").code == 0
    put("x", decoded())
    assert specpipe("folders=x").code == 0
    assert found()["config"]["folders"] == "x"


def test_folders_are_meant_from_where_the_command_was_typed(specpipe: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    put("home/x", decoded())
    put("y", decoded())
    monkeypatch.setenv("HOME", str(Path("home").resolve()))
    assert specpipe("folders=['~/x',y]", "hydra.job.chdir=true").code == 0
    assert [Path(each["folder"]).name for each in found()["runs"]] == ["x", "y"]


REFUSED = {
    "": "folders: none is given: specpipe report outputs/bench/*",
    "nowhere": "folders: 'nowhere' has no result.json that can be read: No such file or directory.",
    "x file": "folders: 'file' has no result.json that can be read: Not a directory.",
    "x broken": "folders: result.json in 'broken' is not JSON.",
    "x list": "folders: result.json in 'list' is not that of a run.",
    "x plan": "folders: 'plan' is a run of plan; there is something to compare in runs of decode, bench, train.",
    "x ./x": "folders: 'x' is given twice.",
    "folders=[1]": "folders: [1] is not a list of run folders",
    "folders=[]": "folders: none is given",
}


@pytest.mark.parametrize("words", REFUSED)
def test_wrong_folders_are_one_line_and_nothing_is_written(specpipe: Run, words: str) -> None:
    put("x", decoded())
    put("plan", {"command": "plan"})
    put("list", decoded())
    Path("list/result.json").write_text("[]")
    put("broken", decoded())
    Path("broken/result.json").write_text("{")
    Path("file").touch()
    ran = specpipe(*shlex.split(words))
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
    assert ran.err.startswith(f"specpipe: {REFUSED[words]}")
    assert not Path("out/result.json").exists()


def test_a_run_without_provenance_is_compared(specpipe: Run) -> None:
    put("x", decoded())
    Path("x/provenance.json").unlink()
    put("y", decoded())
    Path("y/provenance.json").write_text("{")
    assert specpipe("x", "y").code == 0
    assert [each["git"] for each in found()["runs"]] == [None, None]


def test_a_reader_that_has_gone_costs_no_page(specpipe: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> None:
        raise OutputClosed

    monkeypatch.setattr(report, "_show", gone)
    assert specpipe(put("x", decoded())).code == 141
    assert Path("out/report.html").exists()


# ---- what differs, and what does not compare ----


def test_keys_that_differ_are_told_with_the_values_of_every_run() -> None:
    other = decoded("suffix")
    other["config"] |= {"batch_size": 8, "generation": {"temperature": 1.0, "max_new_tokens": 128}}
    other["config"]["proposer"]["max_depth"] = 24
    assert report.differences(runs(decoded(), other)) == {
        "proposer._target_": ["specpipe.ngram", "specpipe.suffix"],
        "generation.temperature": [0.0, 1.0],
        "batch_size": [1, 8],
        "proposer.max_depth": [None, 24],
    }


def test_a_key_that_only_another_command_has_is_no_difference() -> None:
    result = benched()
    result["config"] = {**result["config"], "repeats": 2, "batch_size": 4}
    assert report.differences(runs(decoded(), result)) == {"batch_size": [1, 4]}
    assert report.differences(runs(decoded(), decoded())) == {}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"target": {"model": "OtherLM", "dtype": "bfloat16"}}, "different targets"),
        ({"target": {"model": "SomeLM-1B", "dtype": "float32"}}, "different targets"),
        ({"requests": [{}] * 2}, "different prompts"),
        ({"config": {"prompt": "hello"}}, "different prompts"),
        ({"config": {"prompts": {"_target_": "specpipe.prompts.demo", "limit": 3}}}, "different prompts"),
    ],
)
def test_runs_that_do_not_compare_are_told_of(changed: dict[str, Any], told: str) -> None:
    [line] = report.warnings(runs(decoded(), decoded("suffix"), decoded(**changed)))
    assert told in line
    assert "runs 1, 2: " in line
    assert "run 3: " in line


def test_runs_that_compare_are_not_warned_of() -> None:
    assert list(report.warnings(runs(decoded(), decoded("suffix"), benched(), machines=("A", "A")))) == []


def test_speeds_of_two_engines_do_not_compare() -> None:
    [line] = report.warnings(runs(decoded() | {"verifier": "packed"}, decoded() | {"verifier": "compiled"}))
    assert "different engines, compare acceptance, not speed (run 1: packed; run 2: compiled)." in line


def test_speeds_of_two_machines_do_not_compare() -> None:
    [line] = report.warnings(runs(decoded(), decoded(), machines=("A", "B")))
    assert "different machines, compare acceptance, not speed (run 1: A; run 2: B)." in line


def test_text_that_was_held_out_is_no_prompt_of_a_decode() -> None:
    [line] = report.warnings(runs(training(data={"sha256": "abcdef0123"}), decoded()))
    assert "run 1: held-out text abcdef01" in line
    same = [training(data={"sha256": "abcdef0123"})] * 2
    assert list(report.warnings(runs(*same))) == []


def test_what_is_unfinished_is_told_of() -> None:
    cut = decoded(requests=[{"finish_reason": "stop"}, {}, {"finish_reason": "interrupted"}])
    lines = list(report.warnings(runs(benched(rounds={"done": 1, "wanted": 4}), cut)))
    assert lines == ["run 1 is unfinished: 1 of 4 rounds.", "run 2 was interrupted, after 3 prompts."]


def test_warnings_are_on_the_page_and_on_the_terminal(specpipe: Run) -> None:
    ran = specpipe(put("x", decoded()), put("y", decoded(target={"model": "OtherLM"})))
    [line] = found()["warnings"]
    assert f"warning: {line}" in ran.err.splitlines()
    page = Path("out/report.html").read_text()
    assert line in Page(page).text
    assert page.index(line) < page.index("<section>")


def test_folders_are_wanted_as_text() -> None:
    for wrong in (None, {"a": 1}, ["x", ""]):
        with pytest.raises(UserError, match=r"^folders: "):
            report._folders(wrong)


# ---- the page ----


def page_of(*results: dict[str, Any]) -> str:
    """Of these runs, as the command makes it."""
    read = runs(*results)
    return comparison_page(
        {
            "runs": [report._about(each) for each in read],
            "rows": [row for each in read for row in report.ROWS[each["result"]["command"]](each)],
            "differences": report.differences(read),
            "mixed": report.mixed(read),
            "warnings": list(report.warnings(read)),
        }
    )


def test_charts_hold_the_figures_of_the_rows() -> None:
    result = benched(peers=[peer("hf", 0.9)])
    page = Page(page_of(decoded(), result))
    bars = traces(page.figure("speedup"))
    assert list(bars) == ["ngram", "mlp", "none", "hf"]
    cells = {cell["proposer"]: cell["summary"]["speedup"] for cell in result["cells"]}
    assert bars["mlp"]["x"] == [cells["mlp"]["mean"]]
    assert bars["mlp"]["error_x"]["array"] == [cells["mlp"]["high"] - cells["mlp"]["mean"]]
    speeds = traces(page.figure("tokens/s"))
    assert [label.replace("<br>", " ").replace("\N{NO-BREAK SPACE}", " ") for label in speeds["ngram"]["y"]] == [
        "1: ngram, gamma 5",
        "2: ngram, gamma 4",
    ]
    assert speeds["ngram"]["x"][0] == 41.5
    assert traces(page.figure("alpha"))["ngram"]["x"][0] == 0.5
    assert speeds["ngram"]["marker"]["color"] == bars["ngram"]["marker"]["color"]


def test_figures_that_no_run_has_have_no_chart_and_no_column() -> None:
    page = page_of(training())
    assert [each["layout"]["xaxis"]["title"]["text"] for each in Page(page).figures] == ["tokens per pass", "alpha"]
    assert heads(page) == ["run", "proposer", "gamma", "tokens per pass", "alpha"]


def test_the_page_begins_with_the_highest_of_what_says_most() -> None:
    result = benched()
    best = result["summary"]["best"][0]
    text = Page(page_of(decoded(), result)).text
    assert f"highest speedup is {best['speedup']['mean']:.2f} [" in text
    assert f"{best['proposer']} with 4 drafted tokens, in run 2." in text
    assert "The highest tokens/s is 41.5: ngram with 5 drafted tokens, in run 1." in Page(page_of(decoded())).text


def test_of_many_cells_the_fastest_are_drawn_and_all_are_in_the_table() -> None:
    result = benched(gammas=[2, 4, 6], temperatures=[0.0, 1.0])
    page = page_of(result)
    assert len(rows(page)) == len(result["cells"]) == 14
    few = shown(list(report.ROWS["bench"](runs(result)[0])))
    assert [(row["proposer"], row["temperature"]) for row in few] == [
        (name, temperature) for temperature in (0.0, 1.0) for name in ("none", "ngram", "mlp")
    ]
    for row in few:
        same = [
            cell["summary"]["speedup"]["mean"]
            for cell in result["cells"]
            if (cell["proposer"], cell["temperature"]) == (row["proposer"], row["temperature"])
        ]
        assert row["speedup"]["mean"] == max(same)
    assert "the table has all" in page


@pytest.mark.parametrize("missing", [*decoded(), "all but the command"])
def test_page_stands_whatever_a_run_lacks(missing: str) -> None:
    result = {"command": "decode"} if missing == "all but the command" else decoded()
    if missing != "command":
        result.pop(missing, None)
    page = Page(page_of(result, benched(cells=[])))
    assert page.open == []
    assert "None" not in page.text


def test_runs_that_measured_nothing_are_still_named() -> None:
    page = Page(page_of(benched(cells=[])))
    assert NO_ROWS in page.text
    assert "bench" in page.text
    assert page.figures == []


def test_nothing_of_a_run_becomes_part_of_the_page() -> None:
    result = decoded(proposer=EVIL, target={"model": EVIL}, version=EVIL, sampler=EVIL)
    result["config"]["proposer"]["x"] = EVIL
    page = Page(page_of(result, decoded()))
    assert page.open == []
    assert page.scripts == 3
    assert page.text.count(EVIL) >= 5
    html = page_of(result, decoded())
    assert not re.search(r"https?:|url\(|@import", html)


def test_a_browser_draws_and_sorts_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    page = page_of(decoded(), benched(gammas=[2, 4], temperatures=[0.0, 1.0]), training())
    seen = looked_at(page, tmp_path, "--window-size=1000,900")
    assert seen["complaints"] == []
    assert seen["wide"]
    assert len(seen["plots"]) == 4
    assert all(each["drawn"] and each["fits"] and each["points"] for each in seen["plots"])
    known = [each for each in seen["down"][0] if each != ABSENT]
    assert known == sorted(known, reverse=True)
    assert seen["down"][0][len(known) :] == [ABSENT] * (len(seen["down"][0]) - len(known))
