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


def copy(kind: str, host: int, device: int, nbytes: int = 8) -> dict[str, Any]:
    return {"type": "memcpy", "kind": kind, "host": [host, host + nbytes], "device": [device, device + nbytes]}


def kernel(*addresses: int) -> dict[str, Any]:
    return {"type": "kernel", "addresses": list(addresses)}


STEP = [kernel(100), copy("out", 0, 100), kernel(100), copy("in", 0, 200), kernel(200)]
CHAIN = [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_what_is_wrong_is_named() -> None:
    found = order.check(STEP, CHAIN)
    assert found.is_right and (found.host_pairs, found.device_pairs) == (1, 3)
    for missing, fault in {
        (0, 1): ("device", 1, 0),  # what is copied may not be written yet
        (1, 2): ("device", 1, 2),  # its bytes are used again before they are copied
        (2, 3): ("host", 1, 3),  # it comes back before it has left
        (3, 4): ("device", 3, 4),  # it is read before it is back
    }.items():
        assert fault in order.check(STEP, [edge for edge in CHAIN if edge != missing]).unordered
    # What comes back has left: another group has a part of its host bytes in between.
    nodes = [*STEP[:3], copy("out", 4, 300, 8), *STEP[3:]]
    assert order.check(nodes, [(i, i + 1) for i in range(5)]).unfilled == [4]
    assert order.check(STEP[2:], [(0, 1), (1, 2)]).unfilled == [1]
    assert order.check(STEP[:2], [(0, 1)]).unawaited == [1]
