"""For every test."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.command_line import Run, runner

# A shell that starts jobs in the background has them ignore Ctrl-C; these tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Workers share the machine: more threads than there are processors would spend their time waiting for each other.
THREADS = max(1, torch.get_num_threads() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


@pytest.fixture(autouse=True)
def few_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stand-ins finish sooner on one thread; the real target needs them all."""
    torch.set_num_threads(THREADS if request.node.get_closest_marker("real") else 1)
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture
def specpipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """The command line in a folder of its own, in this process."""
    monkeypatch.chdir(tmp_path)
    return runner(monkeypatch, capfd)
