# SPDX-License-Identifier: Apache-2.0
"""Captures of whole steps: copies are a part of the graph, nothing crosses its edge, what cannot work is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from offload_engine import (
    LowestPeak,
    ManagedActivations,
    OffloadConfig,
    OffloadEngine,
    OffloadError,
    Planned,
    group_start,
    manage_activations,
)
from offload_engine._devices.base import HostRegion
from tests.graph_device import GraphDevice
from tests.interrupts.jobs import JOBS
from tests.lookups import present

WIDTH = 32


@pytest.fixture
def device() -> Iterator[GraphDevice]:
    device = GraphDevice()
    yield device
    assert not device.hazards


class Training:
    """A model, a step with two microbatches, and an engine that offloads all that it saves."""

    def __init__(self, device: GraphDevice, config: OffloadConfig | None = None) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        self.inputs = [torch.randn(16, WIDTH) for _ in range(2)]
        self.device = device
        self.engine = OffloadEngine(config or OffloadConfig(min_tensor_bytes=1, policy=LowestPeak()), device)
        self.activations: ManagedActivations = manage_activations(self.model, group_bytes=1, engine=self.engine)
        self.expected = self.step(is_offloaded=False)

    def step(self, is_offloaded: bool = True) -> list[torch.Tensor]:
        self.model.zero_grad()
        for hidden in self.inputs:
            if is_offloaded:
                with self.device.observe_compute():
                    with self.activations:
                        loss = self.model(hidden.clone()).square().sum()
                    loss.backward()
            else:
                self.model(hidden.clone()).square().sum().backward()
        return [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]

    def is_right(self, grads: list[torch.Tensor]) -> bool:
        return len(grads) == len(self.expected) and all(map(torch.equal, grads, self.expected))


@pytest.fixture
def training(device: GraphDevice) -> Training:
    training = Training(device)
    assert training.is_right(training.step()) and training.engine.stats.num_offloaded_groups > 1
    return training


def test_the_graph_has_its_host_memory_to_itself(training: Training, device: GraphDevice) -> None:
    """Until it is released: then the next capture has it, and the engine can close."""
    engine, copies = training.engine, device.num_copies.total()
    with engine.graphs.capture(device.graph()) as first:
        assert training.is_right(training.step())
    assert device.num_copies.total() > copies
    assert first.host_bytes > 0 and [*engine.graphs.steps] == [first] and first.slabs is not None
    own = set(map(id, first.slabs.by_index.values()))
    assert engine.pool.slab_bytes_total == 0
    with pytest.raises(OffloadError, match="1 captured steps still use"):
        engine.close()
    assert training.is_right(training.step())  # pins memory of its own
    assert own.isdisjoint(map(id, engine.pool.hand_over().by_index.values()))
    nbytes = first.host_bytes
    with mock.patch.object(device, "synchronize", wraps=device.synchronize) as synchronize:
        first.release()
    assert synchronize.call_args_list[0].args[0].stream is device.current_stream(), "waits for the last replay"
    first.release()
    assert first.host_bytes == 0 and engine.pool.slab_bytes_total == nbytes and not engine.graphs.steps
    with engine.graphs.capture(device.graph()) as second:
        assert training.is_right(training.step())
    assert second.host_bytes == nbytes
    second.release()
    engine.close()
    with pytest.raises(OffloadError, match="after close"), engine.graphs.capture():
        pass


def test_the_limit_counts_what_graphs_have(device: GraphDevice) -> None:
    limit = 1 << 28  # room for four of the smallest slabs
    training = Training(device, OffloadConfig(min_tensor_bytes=1, host_limit_bytes=limit, policy=LowestPeak()))
    training.step()
    with training.engine.graphs.capture(device.graph()) as captured:
        training.step()
    held = captured.host_bytes
    assert 0 < held and training.engine.pool.room_bytes <= limit - held
    assert training.is_right(training.step())
    assert held + training.engine.pool.slab_bytes_total <= limit
    held += training.engine.pool.slab_bytes_total
    captured.release()
    slabs = training.engine.pool.hand_over()
    assert slabs.nbytes == held and slabs.room() == limit - held


def test_host_memory_is_missing_as_before_or_that_is_refused(training: Training, device: GraphDevice) -> None:
    assert training.engine.trim_host_memory() > 0
    with pytest.raises(OffloadError, match="none can be pinned"), training.engine.graphs.capture(device.graph()):
        training.step()
    assert not training.engine.graphs.steps and training.is_right(training.step())
    limit = 3 * 16 * WIDTH * 4  # bytes of three of the inputs of layers
    limited = Training(device, OffloadConfig(min_tensor_bytes=1, host_limit_bytes=limit, policy=LowestPeak()))
    limited.step()
    for each in (training, limited):
        with each.engine.graphs.capture(device.graph()):
            assert each.is_right(each.step())
        assert (each.engine.stats.num_host_limit_groups > 0) == (each is limited)


@pytest.mark.parametrize("where", ["in front of the step", "in the step", "behind a forward"])
def test_after_an_error_the_streams_are_joined(where: str, training: Training, device: GraphDevice) -> None:
    engine = training.engine
    with pytest.raises(ZeroDivisionError), engine.graphs.capture(device.graph()), contextlib.ExitStack() as stack:
        if where == "behind a forward":
            stack.enter_context(engine.iteration())
        if where != "in front of the step":
            with training.activations:
                loss = training.model(training.inputs[0])
                del loss
                if where == "in the step":
                    raise ZeroDivisionError
        raise ZeroDivisionError
    assert not engine.graphs.steps and not engine.is_in_iteration
    assert not device.hazards and training.is_right(training.step())


def test_half_a_step_and_an_eager_one_are_refused(training: Training, device: GraphDevice) -> None:
    losses = []
    with pytest.raises(OffloadError, match="capture the whole step"), training.engine.graphs.capture():
        with device.graph():
            with training.activations:
                losses.append(training.model(training.inputs[0]).sum())
            training.engine._executor.end_iteration()  # joins, as if the step had ended
    with pytest.raises(OffloadError, match="abandoned by reset_iteration"):
        losses[0].backward()
    with pytest.raises(OffloadError, match="a capture, but one was announced"), training.engine.graphs.capture():
        training.step()
    assert training.is_right(training.step())


@pytest.mark.parametrize(
    ("settings", "num_steps", "message"),
    [
        ({}, 0, "before the first step"),
        ({"policy": Planned()}, 1, "before a step was planned"),
        ({"gpu_budget": 1 << 30}, 1, "with a gpu_budget"),
        ({}, 1, "inside a step"),
        ({}, 1, "inside a capture"),
    ],
)
def test_what_cannot_be_captured_is_refused_before(
    settings: dict[str, Any], num_steps: int, message: str, device: GraphDevice
) -> None:
    training = Training(device, OffloadConfig(min_tensor_bytes=1, **settings))
    for _ in range(num_steps):
        training.step()
    if message == "inside a step":
        training.engine.begin_iteration()
    with contextlib.ExitStack() as stack:
        if message == "inside a capture":
            stack.enter_context(device.graph())
        with pytest.raises(OffloadError, match=message), training.engine.graphs.capture():
            pass
    assert not device.is_recording
    if message == "inside a capture":
        with training.engine.graphs.capture():
            with pytest.raises(OffloadError, match=message), training.engine.graphs.capture():
                pass
            with device.graph():
                assert training.is_right(training.step())


def test_the_cpu_has_no_graphs() -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1, directory="none"))
    with engine.iteration():
        pass
    with pytest.raises(NotImplementedError, match="capture on a GPU"), engine.graphs.capture():
        pass


@pytest.mark.parametrize("name", JOBS)
def test_a_step_of_each_front_end_is_captured(name: str, device: GraphDevice) -> None:
    expected = JOBS[name](None).step()
    with device.observe_compute():
        job = JOBS[name](device)
        engine = present(job.engine)
        for _ in range(2):
            assert all(map(torch.equal, expected, job.step()))
        copies = device.num_copies.total()
        with engine.graphs.capture(device.graph()) as captured:
            assert all(map(torch.equal, expected, job.step()))
        assert engine.stats.copied_in_bytes > 0 and device.num_copies.total() > copies and captured.host_bytes > 0
        assert all(map(torch.equal, expected, job.step()))
        captured.release()
        job.close()


@pytest.mark.parametrize("name", ["copy_out", "copy_in"])
def test_a_capture_waits_for_copies_of_before(name: str, training: Training, device: GraphDevice) -> None:
    (stream,) = (stream for stream in device._streams if stream.name == name)
    host, buffer = HostRegion(device.new_slab(64), 0, 64), device.allocate(64, device.current_stream())
    device.wait_stream(stream, device.current_stream())
    device.copy_out(stream, [(buffer.fill_(1), host)])
    with training.engine.graphs.capture(device.graph()) as captured:
        assert not stream.queue
        training.step()
    captured.release()


def test_without_a_word_nothing_begins_in_a_capture(training: Training, device: GraphDevice) -> None:
    """By a sentence, and before a tensor is packed."""
    engine = training.engine
    with device.graph(), pytest.raises(OffloadError, match="an iteration begins inside the capture of a CUDA graph"):
        engine.begin_iteration()
    assert not engine.is_in_iteration
    engine.begin_iteration()
    chunk, x = engine.start_chunk(), torch.ones(4, requires_grad=True)
    for begin, what in (
        (engine.start_chunk, "a forward begins"),
        (lambda: chunk.open_group("mlp"), "group 'mlp' begins"),
        (lambda: group_start(x, chunk, name="mlp"), "group 'mlp' begins"),
    ):
        with device.graph(), pytest.raises(OffloadError, match=what):
            begin()
    assert not list(chunk.groups) and engine.snapshot().num_live == 0
    engine.end_iteration()
