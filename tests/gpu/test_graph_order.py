# SPDX-License-Identifier: Apache-2.0
"""The offline check of the graph that a GPU has captured: each two uses of the same bytes have a path between them."""

from __future__ import annotations

import pytest
import torch

from offload_engine import FixedBounds, LowestPeak
from offload_engine.policies import PolicySettings, ResidentLayers
from tests.gpu.graph_nodes import nodes_and_edges
from tests.gpu.test_graph_captures import Training
from tests.graph_order import check, take_out


@pytest.mark.parametrize(
    "policy",
    [LowestPeak(), ResidentLayers(), FixedBounds(max_inflight_bytes=1 << 20)],
    ids=["lowest", "layers", "fixed"],
)
def test_a_captured_step_is_ordered(policy: PolicySettings) -> None:
    training = Training()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(training.stream), training.offload(policy) as handle:
        for _ in range(2):
            training.step()
        captured = training.capture(handle, graph)
        nodes, edges = nodes_and_edges(graph.raw_cuda_graph())
        graph.reset()
        captured.release()
    assert {"out", "in"} <= {node.get("kind") for node in nodes if node.get("nbytes")}
    found = check(nodes, edges)
    assert found.host_pairs > 0 and found.device_pairs > 0
    assert (found.unordered, found.unfilled, found.unawaited) == ([], [], [])
    assert take_out(nodes, edges).noticed
