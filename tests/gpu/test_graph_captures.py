# SPDX-License-Identifier: Apache-2.0
"""A captured step, replayed: equal to the last bit, with all that it may not read poisoned between the replays.

Its graph is checked offline; layers in graphs of their own take less memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from offload_engine import (
    FixedBounds,
    LowestPeak,
    OffloadConfig,
    OffloadEngine,
    OffloadError,
    enable_activation_offloading,
)
from offload_engine._devices.regions import storage_at, whole
from offload_engine.captured_layers import CapturedLayers
from offload_engine.graph_captures import CapturedStep
from offload_engine.policies import PolicySettings, ResidentLayers
from tests.checkpointed import all_equal
from tests.gpu.graph_nodes import nodes_and_edges
from tests.graph_order import check, take_out
from tests.program_order import edges_of, unordered

NUM_LAYERS, WIDTH, NUM_MICROBATCHES = 6, 256, 3

pytestmark = pytest.mark.usefixtures("deterministic")


class Training:
    """A model with static inputs and gradients, on a stream of its own."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            *(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(NUM_LAYERS))
        ).cuda()
        self.inputs = [torch.randn(512, WIDTH, device="cuda") for _ in range(NUM_MICROBATCHES)]
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.grads = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.stream = torch.cuda.Stream()
        torch.cuda.synchronize()

    def step(self) -> None:
        torch._foreach_zero_(self.grads)
        for hidden in self.inputs:
            self.model(hidden).square().sum().backward()

    def result(self) -> list[torch.Tensor]:
        torch.cuda.synchronize()
        return [grad.clone() for grad in self.grads]

    def forget(self) -> None:
        for grad in self.grads:
            grad.fill_(float("nan"))

    @contextmanager
    def offload(self, policy: PolicySettings) -> Iterator[Any]:
        """Offload its layers; it has to be released from captures by the end."""
        config = OffloadConfig(min_tensor_bytes=1, policy=policy)
        handle = enable_activation_offloading(self.model, "none", config=config, layers=list(self.model))
        yield handle
        handle.remove()

    def capture(self, handle: Any, graph: torch.cuda.CUDAGraph) -> CapturedStep:
        with handle.engine.graphs.capture(torch.cuda.graph(graph, stream=self.stream)) as captured:
            self.step()
        return captured

    def check_replays(self, captured: CapturedStep, graph: torch.cuda.CUDAGraph, expected: list[torch.Tensor]) -> None:
        for _ in range(3):
            self.forget()
            poison(captured, graph)
            graph.replay()
            assert all_equal(self.result(), expected)


def poison(captured: CapturedStep, graph: torch.cuda.CUDAGraph) -> None:
    """Overwrite what a replay has to write before it reads it: host bytes, and all device memory of its own."""
    pool, device = tuple(graph.pool()), torch.device("cuda", torch.cuda.current_device())
    segments = [segment for segment in torch.cuda.memory_snapshot() if tuple(segment["segment_pool_id"]) == pool]
    assert segments
    for segment in segments:
        whole(storage_at(segment["address"], segment["total_size"], device)).fill_(0xFF)
    assert captured.slabs is not None
    for slab in captured.slabs.by_index.values():
        view = slab.view(0, slab.nbytes)  # type: ignore[attr-defined]
        view.fill_(0xFF)


@pytest.mark.parametrize("policy", [LowestPeak(), ResidentLayers()], ids=repr)
def test_replays_are_equal_to_the_last_bit(policy: PolicySettings) -> None:
    training, graph = Training(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(training.stream):
        training.step()
        expected = training.result()
        with training.offload(policy) as handle:
            for _ in range(3):
                training.step()
            assert all_equal(training.result(), expected)
            captured = training.capture(handle, graph)
            assert handle.stats.num_offloaded_groups > 0
            training.check_replays(captured, graph, expected)
            training.step()  # eagerly, in between
            assert all_equal(training.result(), expected)
            training.check_replays(captured, graph, expected)
            with pytest.raises(OffloadError, match="captured steps still use"):
                handle.remove()
            graph.reset()
            captured.release()


def test_a_graph_of_a_forward_is_refused_and_the_next_step_is_right() -> None:
    training = Training()
    training.step()
    expected = training.result()
    with training.offload(LowestPeak()) as handle:
        training.step()
        with pytest.raises(OffloadError, match="capture of a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            training.model(training.inputs[0])
        training.step()
        assert all_equal(training.result(), expected) and handle.stats.num_offloaded_groups > 0


# -- the offline check of the captured graph: each two uses of the same bytes have a path between them -----------------


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


# -- layers in CUDA graphs of their own, in less memory ----------------------------------------------------------------

NUM_GRAPHED, ROWS, WIDE, NUM_STEPS = 6, 4096, 1024, 4


def make_layers() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    layers = [
        torch.nn.Sequential(torch.nn.Linear(WIDE, WIDE), torch.nn.GELU(), torch.nn.Linear(WIDE, WIDE), torch.nn.Tanh())
        for _ in range(NUM_GRAPHED)
    ]
    return [layer.cuda() for layer in layers]


def graphed(layers: Sequence[torch.nn.Module]) -> Sequence[torch.nn.Module]:
    samples = tuple((torch.randn(ROWS, WIDE, device="cuda", requires_grad=True),) for _ in layers)
    return torch.cuda.make_graphed_callables(tuple(layers), samples)  # type: ignore[return-value]


def steps_of(layers: Sequence[torch.nn.Module], captured: CapturedLayers | None = None) -> list[list[torch.Tensor]]:
    results = []
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    for step in range(NUM_STEPS):
        torch.manual_seed(step)
        hidden = torch.randn(ROWS, WIDE, device="cuda", requires_grad=True)
        for layer in layers:
            hidden = layer(hidden)
        hidden.square().sum().backward()
        results.append([parameter.grad.clone() for parameter in parameters if parameter.grad is not None])
        for parameter in parameters:
            parameter.grad = None
        torch.cuda.synchronize()
        if captured is not None:
            poison_copies(captured)
    return results


def poison_copies(captured: CapturedLayers) -> None:
    """Overwrite what replays have to write before they read it: host bytes, and what backwards read on the device."""
    for slab in captured.slabs.by_index.values():
        slab.view(0, slab.nbytes).fill_(0xFF)  # type: ignore[attr-defined]
    for step in captured.steps:
        for copies in step.copy_ins:
            for _, target in copies.copies:
                target.fill_(0xFF)
    torch.cuda.synchronize()


def reserved_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def test_replays_are_equal_to_the_last_bit_in_less_memory() -> None:
    before = reserved_bytes()
    layers = graphed(make_layers())
    without = reserved_bytes() - before
    expected = steps_of(layers)
    del layers
    before = reserved_bytes()
    engine = OffloadEngine(OffloadConfig())
    with engine.graphs.capture_layers(min_bytes=1) as captured:
        layers = graphed(make_layers())
    fallen = without - (reserved_bytes() - before)
    assert captured.num_graphs == 2 * NUM_GRAPHED and captured.copied_out_bytes > 0
    assert not unordered(captured, edges_of(captured))
    got = steps_of(layers, captured)
    assert all(all(map(torch.equal, a, b)) for a, b in zip(expected, got, strict=True))
    assert fallen >= 0.5 * captured.copied_out_bytes, (fallen, captured.copied_out_bytes, captured.slot_bytes)
    del layers
    captured.release()
    engine.close()
