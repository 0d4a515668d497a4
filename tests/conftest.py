"""For every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def few_threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Stand-ins finish sooner on one thread; the real target needs them all."""
    torch.set_num_threads(THREADS if request.node.get_closest_marker("real") else 1)
    yield
    torch.set_num_threads(THREADS)
