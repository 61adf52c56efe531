# SPDX-License-Identifier: Apache-2.0
"""A captured step, replayed: equal to the last bit, with all that it may not read poisoned between the replays."""

from __future__ import annotations

import pytest
import torch

from offload_engine import LowestPeak, OffloadConfig, OffloadError, enable_activation_offloading
from offload_engine._devices.regions import storage_at, whole
from offload_engine.graph_captures import CapturedStep
from offload_engine.policies import PolicySettings, ResidentLayers

NUM_LAYERS, WIDTH, NUM_MICROBATCHES = 6, 256, 3


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


def are_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


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


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("policy", [LowestPeak(), ResidentLayers()], ids=repr)
def test_replays_are_equal_to_the_last_bit(policy: PolicySettings) -> None:
    training = Training()
    torch.cuda.synchronize()
    with torch.cuda.stream(training.stream):
        training.step()
        expected = training.result()
        config = OffloadConfig(min_tensor_bytes=1, policy=policy)
        handle = enable_activation_offloading(training.model, "none", config=config, layers=list(training.model))
        for _ in range(3):
            training.step()
        assert are_equal(training.result(), expected)
        graph = torch.cuda.CUDAGraph()
        with handle.engine.graphs.capture(torch.cuda.graph(graph, stream=training.stream)) as captured:
            training.step()
        assert handle.stats.num_offloaded_groups > 0
        for _ in range(3):
            training.forget()
            poison(captured, graph)
            graph.replay()
            assert are_equal(training.result(), expected)
        training.step()  # eagerly, in between
        assert are_equal(training.result(), expected)
        training.forget()
        graph.replay()
        assert are_equal(training.result(), expected)
        with pytest.raises(OffloadError, match="captured steps still use"):
            handle.remove()
        graph.reset()
        captured.release()
        handle.remove()


def test_what_is_not_pinned_is_refused_in_the_capture_and_the_next_one_is_right() -> None:
    training = Training()
    torch.cuda.synchronize()
    with torch.cuda.stream(training.stream):
        config = OffloadConfig(min_tensor_bytes=1, policy=LowestPeak())
        handle = enable_activation_offloading(training.model, "none", config=config, layers=list(training.model))
        for _ in range(2):
            training.step()
        torch.cuda.synchronize()  # slabs that copies still read are not returned
        assert handle.engine.trim_host_memory() > 0
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(OffloadError, match="none can be pinned"):
            with handle.engine.graphs.capture(torch.cuda.graph(graph, stream=training.stream)):
                training.step()
        for _ in range(2):
            training.step()
        expected = training.result()
        graph = torch.cuda.CUDAGraph()
        with handle.engine.graphs.capture(torch.cuda.graph(graph, stream=training.stream)) as captured:
            training.step()
        training.forget()
        graph.replay()
        assert are_equal(training.result(), expected)
        graph.reset()
        captured.release()
        handle.remove()


@pytest.mark.usefixtures("deterministic")
def test_a_capture_by_other_code_on_its_own_stream_is_announced_around_it() -> None:
    """As megatron-core captures full iterations: eager steps on the default stream, a replay in the same call."""
    training = Training()
    training.step()
    expected = training.result()
    config = OffloadConfig(min_tensor_bytes=1, policy=LowestPeak())
    handle = enable_activation_offloading(training.model, "none", config=config, layers=list(training.model))
    for _ in range(2):
        training.step()
    assert are_equal(training.result(), expected)
    graph = torch.cuda.CUDAGraph()
    with handle.engine.graphs.capture() as captured:
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=training.stream, capture_error_mode="thread_local"):
            training.step()
        torch.cuda.synchronize()
        training.forget()
        graph.replay()
    assert handle.stats.num_offloaded_groups > 0
    assert are_equal(training.result(), expected)
    for _ in range(3):
        training.forget()
        poison(captured, graph)
        graph.replay()
        assert are_equal(training.result(), expected)
    training.step()  # eagerly, on the default stream
    assert are_equal(training.result(), expected)
    graph.reset()
    captured.release()
    handle.remove()
