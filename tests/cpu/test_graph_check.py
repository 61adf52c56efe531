# SPDX-License-Identifier: Apache-2.0
"""The offline check of captured graphs: a graph from a GPU is right, and no edge that matters can be taken out."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests import graph_order as order

DUMP = Path(__file__).parents[1] / "artifacts" / "graph_qkv.json.gz"
"""Of a captured step: 3 layers, 3 microbatches, QKV linear layers offloaded; H200, CUDA 13, torch 2.11."""


@pytest.fixture
def graph() -> tuple[list[dict[str, Any]], list[tuple[int, int]]]:
    with gzip.open(DUMP, "rt") as file:
        dump = json.load(file)
    return dump["nodes"], [(source, target) for source, target in dump["edges"]]


def test_the_captured_step_is_ordered(graph: Any) -> None:
    found = order.check(*graph)
    assert found.is_right
    assert (found.host_pairs, found.device_pairs) == (25, 289)
    assert found.unread_kernels == 108  # matrix products: their tensor maps hide the addresses


def test_each_edge_that_matters_is_missed(graph: Any) -> None:
    taken = order.take_out(*graph)
    assert len(taken.noticed) == 19
    assert taken.unnoticed == []
    nodes, edges = graph
    for edge in taken.superfluous:  # alone; they may stand in for each other
        assert order.reachable(len(nodes), edges) == order.reachable(len(nodes), [e for e in edges if e != edge])
