"""What all tests on a GPU share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.gpu.parity import CUBLAS_WORKSPACE, deterministic_algorithms

# Read once, at the first product of matrices in the process; processes that tests start inherit it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """For every test that compares bits."""
    with deterministic_algorithms():
        yield
