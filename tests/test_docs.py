"""What README, CONTRIBUTING and the pages of docs/ say works as it stands there. A page that is added is read too."""

from __future__ import annotations

import functools
import importlib
import io
import itertools
import json
import re
import shlex
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser

from specpipe import cli
from specpipe.audit.exact import BOUND, PROPOSALS, law_error
from specpipe.config import CONF, compose
from specpipe.samplers.rejection import Rejection, residual
from specpipe.theory import expected_tokens
from specpipe.verifier.targets import tiny
from tests.command_line import Run
from tests.stand_ins import random_heads, saved_heads, saved_tiny

ROOT = Path(__file__).resolve().parent.parent
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in FILES}
README, CONCEPTS, EXTENDING = (PAGES[name] for name in ("README.md", "docs/concepts.md", "docs/extending.md"))

FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.S | re.M)
SHELL = ("", "sh", "bash", "shell", "console")  # languages of a fenced block that is typed
PROGRAMS = r"python -m specpipe|python -m train|specpipe|make|pip install|wandb sweep|python \w+/\w+\.py"
ANSWER = "specpipe: "  # begins what a wrong command answers
ROWS = [{"category": category, "turns": ["abcabcabc", "And again?"]} for category in ("writing", "math")]
SHIPPED = ("table", "draft", "mlp", "distilled", "layer_skip")  # proposers that need a draft for their target


# ---- what stands on a page ----


def blocks(text: str, language: str) -> list[str]:
    return [content for name, content in FENCE.findall(text) if name == language]


def code_lines(text: str) -> list[str]:
    """What is typed and what comes back: indented lines, and those of fenced blocks for a shell."""
    fenced = [line for name, content in FENCE.findall(text) if name in SHELL for line in content.splitlines()]
    return re.findall(r"^ {4,}(\S.*)$", FENCE.sub("", text), re.M) + [line for line in fenced if line]


def exchanges(text: str) -> list[tuple[str, str]]:
    """Commands, each with the line that stands under it as its answer."""
    return re.findall(rf"^ {{4,}}(?!{ANSWER})(\S.*)\n {{4,}}({ANSWER}.*)$", text, re.M)


def quoted(text: str) -> list[str]:
    """Messages that no command on the page shows, and remarks in the running text."""
    shown = {answer for _, answer in exchanges(text)}
    lines = [line for line in code_lines(text) if line.startswith(ANSWER) and line not in shown]
    return lines + re.findall(r"`((?:warning|note|wandb|specpipe): [^`\n]*)`", text)


def typed_lines(text: str) -> list[str]:
    """Commands in code lines and in the running text, without those that are there for their answer."""
    refused = {line for line, _ in exchanges(text)}
    lines = [line for line in code_lines(text) if not line.startswith(ANSWER) and line not in refused]
    prose = re.sub(r"^ {4,}.*$", "", FENCE.sub("", text), flags=re.M)
    return lines + re.findall(rf"`((?:{PROGRAMS})(?: [^`\n]*)?)`", prose)


def split(line: str) -> tuple[list[str], dict[str, str], str]:
    """(words, environment, standard input) as a shell takes a line; three dots stand for more words."""
    words, typed = [word for word in shlex.split(line, comments=True) if word != "..."], ""
    if "|" in words:
        at = words.index("|")
        typed, words = " ".join(words[1:at]), words[at + 1 :]
    given = list(itertools.takewhile(re.compile(r"[A-Z_]+=").match, words))
    return words[len(given) :], dict(word.split("=", 1) for word in given), typed


def command_of(words: list[str]) -> list[str] | None:
    """The command of specpipe and its words; None for another program."""
    if words[:2] == ["python", "-m"]:
        return words[2:] if words[2] == "train" else words[3:]
    return words[1:] if words[0] == "specpipe" else None


def commands() -> list[str]:
    """Every line that calls specpipe, once."""
    lines = dict.fromkeys(line for text in PAGES.values() for line in typed_lines(text))
    return [line for line in lines if command_of(split(line)[0])]


def fault(words: list[str]) -> str | None:
    """What another program than specpipe would not find; None if all is there."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    match words:
        case ["make", *targets]:
            there = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
            return next((f"no target {each}" for each in targets if each not in there), None)
        case ["python", file, *_] | ["wandb", "sweep", file]:
            return None if (ROOT / file).is_file() else f"no file {file}"
        case ["pip", "install", *rest]:
            extras = re.findall(r"\[(\w+)\]", " ".join(rest))
            return next((f"no extra {each}" for each in extras if f"\n{each} = [" not in project), None)
        case ["vllm", "serve", _, "--speculative-config", told]:
            path, _, name = json.loads(told)["model"].rpartition(".")
            return None if hasattr(importlib.import_module(path), name) else f"no class {name}"
        case ["source", ".venv/bin/activate"]:
            return None
    return "no test knows this program"


def first_of(word: str) -> str:
    """Of a word that asks for several runs, the one for the first."""
    if word.startswith("-") or "=" not in word:
        return word
    parsed = OverridesParser.create().parse_override(word)
    return f"{parsed.key_or_group}={next(parsed.sweep_string_iterator())}" if parsed.is_sweep_override() else word


def table(text: str, head: str) -> list[list[str]]:
    """Rows of the first table whose head begins so, the head included, the rule below it not."""
    lines = itertools.takewhile(lambda line: line.startswith("|"), text[text.index(f"\n| {head} |") + 1 :].split("\n"))
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [rows[0], *rows[2:]]


# ---- a place where the commands run ----

SHORT = "prompt=abcabcabc wandb=none generation.max_new_tokens=40"
RUNS = (
    f"decode {SHORT} hydra.run.dir=outputs/decode/RUN",
    f"bench {SHORT} hydra.run.dir=outputs/bench/RUN proposers=[ngram] repeats=1 predict=false",
    "export proposer=mlp proposer.path=outputs/train/MEDUSA/draft proposer.copy_bias=[] format=medusa out=their-heads",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with what the pages name: prompts, a model, its draft, parts of one's own, a run of decode and bench."""
    folder = tmp_path_factory.mktemp("place")
    sys.modules.pop("mypkg", None)
    for name in ("question", "questions", "prompts"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for name in ("my-model", "small-model"):
        saved_tiny(folder / name)
    for name, kind in (("RUN", "mlp"), ("MEDUSA", "medusa")):
        saved_heads(folder / "outputs/train" / name / "draft", random_heads(kind, 64), tiny(device="cpu"))
    (folder / "mypkg.py").write_text("\n".join(blocks(EXTENDING, "python")))
    for name, content in re.findall(r"`(myconf/\S+\.yaml)`:\n\n```yaml\n(.*?)```", EXTENDING, re.S):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        for words in RUNS:
            patch.setattr(sys, "argv", ["specpipe", *words.split(), "target=tiny"])
            assert cli.main() == 0
    yield folder
    sys.modules.pop("mypkg", None)


def on_tiny(command: str, words: list[str]) -> list[str] | None:
    """The words with which it runs in a moment on a target of two layers; None for a run that takes longer.

    Where several runs are asked for it is the first.
    """
    given = dict(word.split("=", 1) for word in words if "=" in word)
    another = given.get("proposer", "ngram") in SHIPPED and not {"proposer.path", "proposer.model"} & given.keys()
    elsewhere = given.get("target.model", ".")[0] != "." or "cuda" in given.values() or "--cfg" in words
    if command not in ("decode", "plan", "report", "export") or another or elsewhere:
        return None
    chosen = [first_of(word) for word in words if word != "-m" and not word.startswith("hydra")]
    if command != "decode":
        return chosen
    ours = {"wandb": "none", "generation.max_new_tokens": "3"}
    ours |= {} if "target" in given else {"target": "tiny"}
    ours |= {} if "prompt" in given else {"prompts.limit": "1"}
    return [*(word for word in chosen if word.split("=")[0] not in ours), *(f"{k}={v}" for k, v in ours.items())]


def expanded(words: list[str]) -> Iterator[str]:
    """Words with a star become files, as in a shell."""
    for word in words:
        yield from sorted(map(str, Path().glob(word))) if "*" in word and "=" not in word else [word]


@pytest.mark.parametrize("line", commands())
def test_every_command_runs_on_a_tiny_target_or_composes(
    line: str, place: Path, specpipe: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    words, environment, typed = split(line)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed.encode())))
    command, *given = command_of(words) or []
    if (quick := on_tiny(command, given)) is not None:
        ran = specpipe(command, *expanded(quick))
        assert ran.code == 0, ran.err
    elif "--config-dir" in given:
        ran = specpipe(command, *given, "--cfg", "job")
        assert ran.code == 0, ran.err
    else:
        flags = ("-m", "--cfg", "job")
        compose(command, [first_of(word) for word in given if word not in flags and not word.startswith("hydra")])


@pytest.mark.parametrize("page", PAGES)
def test_every_line_of_code_is_a_command_that_a_test_knows(page: str) -> None:
    lines = [line for line in typed_lines(PAGES[page]) if " -> " not in line]  # a drawing
    others = [words for words in (split(line)[0] for line in lines) if command_of(words) is None]
    assert [(words, said) for words in others if (said := fault(words))] == []


@pytest.mark.parametrize(
    "words", [["make", "cofee"], ["python", "benchmarks/nowhere.py"], ["pip", "install", "specpipe[all]"], ["rm", "x"]]
)
def test_a_command_that_cannot_work_would_be_seen(words: list[str]) -> None:
    assert fault(words)


# ---- what comes back ----

EXCHANGES = [each for text in PAGES.values() for each in exchanges(text)]
QUOTED = [line for text in PAGES.values() for line in quoted(text)]


@pytest.mark.parametrize(("line", "answer"), EXCHANGES)
def test_a_wrong_command_answers_what_the_page_says(
    line: str, answer: str, place: Path, specpipe: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    words, environment, _ = split(line)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ran = specpipe(*(command_of(words) or []))
    assert ran.code == 2
    assert re.fullmatch(re.escape(answer).replace(r"\.\.\.", ".+"), ran.err.splitlines()[-1])


@pytest.mark.parametrize("answer", QUOTED)
def test_a_quoted_message_is_one_of_the_code(answer: str) -> None:
    """Those that take a broken download or a model of another kind to be seen."""
    assert strange(answer) == []


def strange(message: str) -> list[str]:
    """What of a message is not in the code; three dots stand for what depends on the case."""
    pieces = [piece.strip() for piece in message.removeprefix(ANSWER).split("...")]
    return [piece for piece in pieces if piece not in source()]


@functools.cache
def source() -> str:
    """The code, with texts that are written in several pieces as one."""
    files = [file for name in ("specpipe", "train") for file in sorted((ROOT / name).rglob("*.py"))]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join(file.read_text(encoding="utf-8") for file in files))


def test_a_message_that_the_code_does_not_have_would_be_seen() -> None:
    assert strange(f"{ANSWER}... is not what anybody says ...")
    assert len(EXCHANGES) >= 10  # else nothing was seen at all
    assert len(QUOTED) >= 10


# ---- links and pictures ----


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_lead_somewhere(page: str) -> None:
    assert [link for link in links(PAGES[page]) if not leads(link, page)] == []


def links(text: str) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


def leads(link: str, page: str) -> bool:
    """Whether the file is there, and in it the heading behind a #."""
    path, _, anchor = link.partition("#")
    file = (ROOT / page).parent / path if path else ROOT / page
    if not anchor:
        return file.exists()
    headings = re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.M) if file.is_file() else []
    return anchor in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_a_link_that_leads_nowhere_would_be_seen() -> None:
    assert not leads("docs/nowhere.md", "README.md")
    assert not leads("../README.md#no-such-heading", "docs/concepts.md")
    assert leads("concepts.md#a-step", "docs/choosing.md")


def test_every_page_of_docs_is_in_their_index() -> None:
    named = links(PAGES["docs/README.md"])
    assert [page for page in PAGES if page.startswith("docs/") and Path(page).name not in [*named, "README.md"]] == []


@pytest.mark.parametrize("file", sorted((ROOT / "docs").glob("*.svg")), ids=lambda file: file.name)
def test_drawings_are_small_and_read_in_light_and_dark_and_aloud(file: Path) -> None:
    drawing = file.read_text(encoding="utf-8")
    root = ElementTree.fromstring(drawing)
    assert {"title", "desc"} <= {child.tag.rpartition("}")[2] for child in root}
    light, dark = (re.findall(r"(--[\w]+):", part) for part in drawing.split("prefers-color-scheme: dark"))
    assert light == dark
    assert set(re.findall(r"var\((--[\w]+)\)", drawing)) == set(light)
    assert len(drawing) < 8000
    assert "href" not in drawing


# ---- numbers ----

MEASURED = [page for page in PAGES if page.startswith("docs/") and page != "docs/concepts.md"]  # there all is computed


@pytest.mark.parametrize("page", MEASURED)
def test_figures_are_those_of_the_changelog_and_the_readme(page: str) -> None:
    known = figures((ROOT / "CHANGELOG.md").read_text(encoding="utf-8")) | figures(README)
    assert figures(re.sub(r"`[^`\n]*`|^ {4,}.*$", "", FENCE.sub("", PAGES[page]), flags=re.M)) - known == set()


def figures(text: str) -> set[str]:
    """Numbers with a point or a comma in them, a leading zero left out."""
    return {found.lstrip("0") for found in re.findall(r"(?<![\w.,])\d{0,3}(?:\.\d+|(?:,\d{3})+)(?![\w]|[.,]\d)", text)}


def test_a_figure_that_was_not_measured_would_be_seen() -> None:
    assert figures("1.53 times, .79 or 0.79, 459,465 tokens, version 0.1.2") == {"1.53", ".79", "459,465"}


def test_tokens_by_alpha_are_those_of_the_formula() -> None:
    (_, *gammas), *rows = table(CONCEPTS, "alpha | gamma 1")
    assert len(rows) == 5
    for alpha, *cells in rows:
        counts = [int(gamma.removeprefix("gamma ")) for gamma in gammas]
        assert cells == [f"{expected_tokens(float(alpha), count):.2f}" for count in counts]


def test_the_example_of_a_step_adds_up_to_the_targets_law() -> None:
    rows = [[float(cell) for cell in cells] for _, *cells in table(CONCEPTS, "| a")[1:]]
    p, q, stays, corrected, out = (torch.tensor(row[:-1]) for row in rows)
    rest = residual(p, q)
    assert torch.allclose(stays, torch.minimum(p, q))
    assert torch.allclose(corrected, (1 - stays.sum()) * rest / rest.sum())
    assert torch.allclose(out, stays + corrected)
    assert torch.allclose(out, p)
    assert all(sum(row[:-1]) == pytest.approx(row[-1]) for row in rows)


# ---- examples ----

EXAMPLES = [(page, n) for page, text in PAGES.items() for n in range(len(blocks(text, "python")))]


@pytest.mark.parametrize(("page", "n"), EXAMPLES)
def test_every_python_example_runs(page: str, n: int, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import specpipe

    load = specpipe.load
    monkeypatch.setattr(specpipe, "load", lambda *given: load("target=tiny", "target.device=cpu", *given))
    monkeypatch.chdir(place)
    exec(blocks(PAGES[page], "python")[n], {})


@pytest.mark.parametrize("page", PAGES)
def test_every_example_of_yaml_and_json_can_be_read(page: str) -> None:
    for content in blocks(PAGES[page], "yaml"):
        assert "_target_" in yaml.safe_load(content)
    for content in blocks(PAGES[page], "json"):
        json.loads(content)


@pytest.fixture(scope="module")
def own() -> dict[str, Any]:
    """The classes of the page on parts of one's own."""
    found: dict[str, Any] = {}
    for content in blocks(EXTENDING, "python"):
        exec(content, found)
    return found


def test_a_proposer_of_ones_own_takes_at_most_20_lines_and_drafts(
    place: Path, specpipe: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A class and a YAML file, nothing else."""
    written = blocks(EXTENDING, "python")[0] + blocks(EXTENDING, "yaml")[0]
    assert len([line for line in written.splitlines() if line.strip()]) <= 20
    monkeypatch.chdir(place)
    words = "target=tiny wandb=none --config-dir ./myconf proposer=mine proposer.period=2 prompt=hello"
    ran = specpipe("decode", *words.split(), "generation.max_new_tokens=20", "hydra.run.dir=mine")
    assert ran.code == 0
    assert json.loads(Path("mine/result.json").read_text())["summary"]["spec_decode"]["num_draft_tokens"] > 0


@pytest.mark.parametrize("sampler", ["rejection", "block"])
def test_the_proposer_that_draws_keeps_the_law_and_one_with_another_q_would_be_seen(
    own: dict[str, Any], sampler: str
) -> None:
    from specpipe.samplers.block import Block

    class Boastful(own["Echo"]):  # type: ignore[name-defined,misc]
        def drawn(self, sequence: Any, k: int) -> Any:
            tokens, q = super().drawn(sequence, k)
            return tokens, torch.full_like(q, 1 / self.size)

    rule = {"rejection": Rejection, "block": Block}[sampler]()
    assert law_error(rule, own["Echo"](), 2, {"temperature": 1.0}) <= BOUND
    assert law_error(rule, Boastful(), 2, {"temperature": 1.0}) > 1e-3


@pytest.mark.parametrize("proposals", ["soft q", "one-hot q"])
def test_the_lenient_sampler_is_biased_as_it_says_and_exact_at_leniency_1(own: dict[str, Any], proposals: str) -> None:
    assert not own["Lenient"].lossless
    assert law_error(own["Lenient"](leniency=0.5), PROPOSALS[proposals], 2, {"temperature": 1.0}) > 1e-3
    assert law_error(own["Lenient"](leniency=1.0), PROPOSALS[proposals], 2, {"temperature": 1.0}) <= BOUND


# ---- the README ----


def test_the_readme_shows_every_command() -> None:
    shown = [command_of(split(line)[0]) for line in typed_lines(README)]
    assert {words[0] for words in shown if words} == set(cli.COMMANDS)


def test_the_readme_names_every_option_of_every_group() -> None:
    for group in sorted(path for path in Path(CONF).iterdir() if path.is_dir() and path.name != "experiment"):
        listed = re.search(rf"`{group.name}`\s+\(([^)]*)\)", README)
        assert listed, group.name
        assert set(listed[1].replace(",", " ").split()) == {file.stem for file in group.glob("*.yaml")}
