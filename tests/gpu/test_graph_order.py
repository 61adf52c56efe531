# SPDX-License-Identifier: Apache-2.0
"""The offline check of the graph that a GPU has captured: each two uses of the same bytes have a path between them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_engine import FixedBounds, LowestPeak, OffloadConfig, enable_activation_offloading
from offload_engine.policies import PolicySettings, ResidentLayers
from tests.gpu.graph_nodes import describe
from tests.gpu.test_graph_captures import Training
from tests.graph_order import take_out


@pytest.mark.parametrize(
    "policy",
    [LowestPeak(), ResidentLayers(), FixedBounds(max_inflight_bytes=1 << 20)],
    ids=["lowest", "layers", "fixed"],
)
def test_a_captured_step_is_ordered(policy: PolicySettings, tmp_path: Path) -> None:
    dump = tmp_path / "graph.json.gz"
    found = captured(policy, lambda graph: describe(graph.raw_cuda_graph(), str(dump)))
    assert found["memcpy_bytes"]["out"] > 0
    assert found["memcpy_bytes"]["in"] > 0
    assert found["host_pairs"] > 0
    assert found["device_pairs"] > 0
    assert (found["num_unordered"], found["unfilled"], found["unawaited"]) == (0, [], [])
    with gzip.open(dump, "rt") as file:
        raw = json.load(file)
    taken = take_out(raw["nodes"], [(source, target) for source, target in raw["edges"]])
    assert taken.noticed


def captured(policy: PolicySettings, describe: Any) -> dict[str, Any]:
    """Capture a step of a small model; return what `describe` tells of its graph."""
    training = Training()
    torch.cuda.synchronize()
    with torch.cuda.stream(training.stream):
        config = OffloadConfig(min_tensor_bytes=1, policy=policy)
        handle = enable_activation_offloading(training.model, "none", config=config, layers=list(training.model))
        for _ in range(2):
            training.step()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with handle.engine.graphs.capture(torch.cuda.graph(graph, stream=training.stream)) as step:
            training.step()
        found: dict[str, Any] = describe(graph)
        graph.reset()
        step.release()
        handle.remove()
    return found
