# SPDX-License-Identifier: Apache-2.0
"""Around the replays of captured layers, uses of the same bytes are ordered, and each wait is needed for that."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from offload_engine import OffloadConfig, OffloadEngine
from tests.cpu.test_captured_layers import ORDERS, Graphs, captured
from tests.graph_device import GraphDevice
from tests.program_order import edges_of, unordered

# The wait for a copy-in is not, where an earlier graph waits for one that was issued later; nor is the wait for a slot
# that is free long since.
ALWAYS_NEEDED = {"produced", "left"}


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1), GraphDevice())
    yield engine
    for layers in engine.graphs.layers:
        layers.release()
    engine.close()


@pytest.mark.parametrize("beside", [0, 1, 2])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_uses_of_the_same_bytes_are_ordered(order: str, beside: int, engine: OffloadEngine) -> None:
    layers = captured(Graphs(order), engine, graphs_beside=beside)
    assert not unordered(layers, edges_of(layers))


def test_each_wait_is_needed_for_that(engine: OffloadEngine) -> None:
    layers = captured(Graphs("F0 B0"), engine)
    edges = edges_of(layers)
    waits = [edge for edge in edges if edge.what != "stream"]
    needed = [wait for wait in waits if unordered(layers, [edge for edge in edges if edge is not wait])]
    assert {wait for wait in waits if wait.what in ALWAYS_NEEDED} <= set(needed)
    assert {"free", "reads"} <= {wait.what for wait in needed}
