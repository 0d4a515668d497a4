"""The command line in this process: words in, exit code and output out. The fixture is in conftest.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra._internal.hydra import Hydra

from specpipe import cli


class Ran(SimpleNamespace):
    code: int
    out: str
    err: str


Run = Callable[..., Ran]


def runner(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs `specpipe` with the words it is given."""
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "path", list(sys.path))
    # Hydra composes once more, only to look for `hydra.mode`; half of such a test's time.
    monkeypatch.setattr(Hydra, "get_mode", lambda self, config_name, overrides: None)

    def run(*words: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["specpipe", *words])
        capfd.readouterr()
        try:
            code = cli.main()
        except SystemExit as stop:  # what Hydra's own flags do
            code = stop.code
        return Ran(code=code, **capfd.readouterr()._asdict())

    return run


def result_of(folder: Path) -> dict[str, Any]:
    """The result.json of a run; a NaN or an infinity in it fails the test."""
    return json.loads((folder / "result.json").read_text("utf-8"), parse_constant=lambda word: pytest.fail(word))
