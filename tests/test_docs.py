"""What the README and CONTRIBUTING say works as it stands there."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from specpipe import cli
from specpipe.config import CONF, compose

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.S)


def commands() -> list[str]:
    """Command lines of the README, from the command word on."""
    lines = re.findall(r"^    (?:.*\| )?python -m (?:specpipe )?(\w+ .*)$", README, re.M)
    return [line.split("    #")[0].strip() for line in lines if "--config-dir" not in line and "..." not in line]


def first_of(word: str) -> str:
    """Of a word that asks for several runs, the one for the first."""
    parsed = OverridesParser.create().parse_override(word)
    return f"{parsed.key_or_group}={next(parsed.sweep_string_iterator())}" if parsed.is_sweep_override() else word


def test_the_readme_shows_every_command() -> None:
    assert len(commands()) >= 10
    assert {line.split()[0] for line in commands()} == set(cli.COMMANDS)


@pytest.mark.parametrize("line", commands())
def test_every_command_of_the_readme_composes(line: str) -> None:
    command, *words = (word for word in shlex.split(line) if word not in ("-m", "--cfg", "job"))
    given = cli._folders_named(words) if command == "report" else words
    compose(command, [first_of(word) for word in given if not word.startswith("hydra")])


def test_the_readme_names_every_option_of_every_group() -> None:
    for group in sorted(path for path in Path(CONF).iterdir() if path.is_dir() and path.name != "experiment"):
        listed = re.search(rf"`{group.name}`\s+\(([^)]*)\)", README)
        assert listed, group.name
        assert set(listed[1].replace(",", " ").split()) == {file.stem for file in group.glob("*.yaml")}


def test_the_python_example_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import specpipe

    load = specpipe.load
    monkeypatch.setattr(specpipe, "load", lambda *given: load("target=tiny", "target.device=cpu", *given))
    for block in blocks(README, "python"):
        exec(block, {})
    assert capsys.readouterr().out


def test_the_proposer_of_contributing_decodes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """A class and a YAML file of the user's own, nothing else."""
    (tmp_path / "mypkg.py").write_text(blocks(CONTRIBUTING, "python")[0])
    (tmp_path / "myconf" / "proposer").mkdir(parents=True)
    (tmp_path / "myconf" / "proposer" / "mine.yaml").write_text(blocks(CONTRIBUTING, "yaml")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    words = "target=tiny wandb=none --config-dir ./myconf proposer=mine proposer.period=2 prompt=hello"
    monkeypatch.setattr(sys, "argv", ["specpipe", "decode", *words.split(), "generation.max_new_tokens=20"])
    assert cli.main() == 0
    assert "accepted" in capsys.readouterr().err
