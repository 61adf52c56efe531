# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from tests.gpu.parity import CUBLAS_WORKSPACE, deterministic_algorithms
from tests.gpu.ranks import GpuRanks, require_libraries

# Read once, at the first product of matrices in the process; processes that tests start inherit it.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", CUBLAS_WORKSPACE)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Make kernels deterministic, for every test that compares bits."""
    with deterministic_algorithms():
        yield


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], GpuRanks]]:
    """`ranks_of(n)`: n ranks, the same ones for all tests; skips the test where a library of theirs is missing."""
    started: dict[int, GpuRanks] = {}

    def get(num_ranks: int) -> GpuRanks:
        require_libraries()
        return started.setdefault(num_ranks, GpuRanks(num_ranks))

    yield get
    for ranks in started.values():
        ranks.close()
