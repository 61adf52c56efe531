# SPDX-License-Identifier: Apache-2.0
"""Captures of whole steps: copies are a part of the graph, nothing crosses its edge, what cannot work is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext

import pytest
import torch

from offload_engine import (
    LowestPeak,
    ManagedActivations,
    OffloadConfig,
    OffloadEngine,
    OffloadError,
    Planned,
    manage_activations,
)
from tests.graph_device import GraphDevice

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
    assert training.is_right(training.step())
    assert training.engine.stats.num_offloaded_groups > 1
    return training


def test_a_captured_step_is_right_and_joined(training: Training, device: GraphDevice) -> None:
    copies = device.num_copies.total()
    with training.engine.graphs.capture(device.graph()):
        grads = training.step()
    assert training.is_right(grads) and device.num_copies.total() > copies
    assert training.is_right(training.step())


def test_the_graph_has_its_host_memory_to_itself(training: Training, device: GraphDevice) -> None:
    engine = training.engine
    with engine.graphs.capture(device.graph()) as first:
        training.step()
    assert first.host_bytes > 0 and engine.graphs.steps == (first,)
    assert first.slabs is not None
    own = set(map(id, first.slabs.by_index.values()))
    assert engine.pool.slab_bytes_total == 0
    assert training.is_right(training.step())  # pins memory of its own
    assert own.isdisjoint(map(id, engine.pool.hand_over().by_index.values()))


def test_release_returns_the_memory_for_the_next_capture(training: Training, device: GraphDevice) -> None:
    engine = training.engine
    with engine.graphs.capture(device.graph()) as first:
        training.step()
    nbytes = first.host_bytes
    first.release()
    first.release()
    assert first.host_bytes == 0 and engine.pool.slab_bytes_total == nbytes and not engine.graphs.steps
    with engine.graphs.capture(device.graph()) as second:
        assert training.is_right(training.step())
    assert second.host_bytes == nbytes
    second.release()
    engine.close()


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


def test_what_found_no_host_memory_before_finds_none_in_the_capture(device: GraphDevice) -> None:
    limit = 3 * 16 * WIDTH * 4  # bytes of three of the inputs of layers
    training = Training(device, OffloadConfig(min_tensor_bytes=1, host_limit_bytes=limit, policy=LowestPeak()))
    training.step()
    assert training.engine.stats.num_host_limit_groups > 0
    with training.engine.graphs.capture(device.graph()):
        assert training.is_right(training.step())
    assert training.engine.stats.num_host_limit_groups > 0


def test_a_captured_step_is_not_recorded(training: Training, device: GraphDevice) -> None:
    training.engine.record()
    with training.engine.graphs.capture(device.graph()):
        training.step()
    assert training.engine.last_record is None
    training.step()
    assert training.engine.last_record is not None


def test_an_engine_with_a_captured_step_does_not_close(training: Training, device: GraphDevice) -> None:
    with training.engine.graphs.capture(device.graph()) as captured:
        training.step()
    with pytest.raises(OffloadError, match="1 captured steps still use"):
        training.engine.close()
    assert training.is_right(training.step())
    captured.release()
    training.engine.close()
    with pytest.raises(OffloadError, match="after close"), training.engine.graphs.capture():
        pass


def test_more_host_memory_is_refused_in_the_capture(training: Training, device: GraphDevice) -> None:
    assert training.engine.trim_host_memory() > 0
    with pytest.raises(OffloadError, match="none can be pinned"), training.engine.graphs.capture(device.graph()):
        training.step()
    assert not training.engine.graphs.steps
    assert training.is_right(training.step())
    with training.engine.graphs.capture(device.graph()):
        assert training.is_right(training.step())


def test_a_step_that_raises_leaves_the_engine_right(training: Training, device: GraphDevice) -> None:
    with pytest.raises(ZeroDivisionError), training.engine.graphs.capture(device.graph()):
        with training.activations:
            loss = training.model(training.inputs[0])
            del loss
            raise ZeroDivisionError
    assert not training.engine.graphs.steps and not training.engine.is_in_iteration
    assert training.is_right(training.step())


def test_an_error_in_front_of_the_step_ends_the_capture_in_order(training: Training, device: GraphDevice) -> None:
    with pytest.raises(ZeroDivisionError), training.engine.graphs.capture(device.graph()):
        raise ZeroDivisionError
    assert not device.hazards and training.is_right(training.step())


def test_slabs_that_waste_memory_are_replaced_before_the_capture(training: Training, device: GraphDevice) -> None:
    assert training.engine.pool._slabs._add(1 << 20)
    with training.engine.graphs.capture(device.graph()) as captured:
        training.step()
    assert captured.slabs is not None and len(captured.slabs.by_index) == 1


def test_a_step_that_is_reset_in_the_capture_joins_its_streams(training: Training, device: GraphDevice) -> None:
    engine = training.engine
    with pytest.raises(ZeroDivisionError), engine.graphs.capture(), device.graph(), engine.iteration():
        with training.activations:
            training.model(training.inputs[0])
        raise ZeroDivisionError
    assert not device.hazards and training.is_right(training.step())


def test_half_a_step_is_refused(training: Training, device: GraphDevice) -> None:
    losses = []
    with pytest.raises(OffloadError, match="capture the whole step"), training.engine.graphs.capture():
        with device.graph():
            with training.activations:
                losses.append(training.model(training.inputs[0]).sum())
            training.engine._executor.end_iteration()  # joins, as if the step had ended
    with pytest.raises(OffloadError, match="dropped by reset_iteration"):
        losses[0].backward()
    assert training.is_right(training.step())


def test_an_eager_step_is_refused_where_a_capture_was_announced(training: Training) -> None:
    with pytest.raises(OffloadError, match="a capture was announced"), training.engine.graphs.capture():
        training.step()
    assert training.is_right(training.step())


class FullIteration:
    """Does what the wrapper of megatron-core does with steps: eager ones, a capture on its own stream, replays."""

    def __init__(self, training: Training, num_eager: int) -> None:
        self._training = training
        self._num_eager = num_eager
        self._num_steps = 0
        self.num_captures = 0

    @property
    def captures_next(self) -> bool:
        return self._num_steps == self._num_eager

    def __call__(self) -> bool:
        """Run a step, and return whether it is right; a replay runs nothing of the engine."""
        self._num_steps += 1
        if self._num_steps > self._num_eager + 1:
            return True
        if self._num_steps <= self._num_eager:
            return self._training.is_right(self._training.step())
        device = self._training.device
        device.synchronize_all()
        with device.compute_stream("capture"), device.graph():
            is_right = self._training.is_right(self._training.step())
        device.synchronize_all()
        self.num_captures += 1
        return is_right

    def reset(self) -> None:
        self._num_steps = 0


def test_a_wrapper_captures_on_a_stream_of_its_own(training: Training, device: GraphDevice) -> None:
    """Announced around the call that captures, in which the first replay runs as well; twice, with a reset between."""
    engine, steps = training.engine, FullIteration(training, num_eager=2)
    for number in (1, 2):
        for _ in range(5):
            with engine.graphs.capture() if steps.captures_next else nullcontext():
                assert steps()
        (captured,) = engine.graphs.steps
        assert steps.num_captures == number and captured.host_bytes > 0
        with pytest.raises(OffloadError, match="captured steps still use"):
            engine.close()
        steps.reset()
        captured.release()
    engine.close()


def _before_the_first_step(device: GraphDevice) -> Training:
    return Training(device)


def _before_a_plan(device: GraphDevice) -> Training:
    training = Training(device, OffloadConfig(min_tensor_bytes=1, policy=Planned()))
    training.step()
    return training


def _inside_a_step(device: GraphDevice) -> Training:
    training = Training(device)
    training.step()
    training.engine.begin_iteration()
    return training


def _with_a_budget(device: GraphDevice) -> Training:
    training = Training(device, OffloadConfig(min_tensor_bytes=1, gpu_budget=1 << 30))
    training.step()
    return training


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (_before_the_first_step, "before the first step"),
        (_before_a_plan, "before a step was planned"),
        (_inside_a_step, "inside a step"),
        (_with_a_budget, "with a gpu_budget"),
    ],
)
def test_what_cannot_be_captured_is_refused_before(
    prepare: Callable[[GraphDevice], Training], message: str, device: GraphDevice
) -> None:
    training = prepare(device)
    with pytest.raises(OffloadError, match=message), training.engine.graphs.capture():
        pass
    assert not device.is_recording


def test_a_capture_is_announced_before_it_begins_and_once(training: Training, device: GraphDevice) -> None:
    with device.graph(), pytest.raises(OffloadError, match="inside a capture"), training.engine.graphs.capture():
        pass
    with training.engine.graphs.capture():
        with pytest.raises(OffloadError, match="inside a capture"), training.engine.graphs.capture():
            pass
        with device.graph():
            assert training.is_right(training.step())


def test_the_cpu_has_no_graphs() -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1, directory="none"))
    activations = manage_activations(group_bytes=1, engine=engine)
    weight = torch.ones(8, requires_grad=True)
    with activations:
        loss = (weight * 2).square().sum()
    loss.backward()
    with pytest.raises(NotImplementedError, match="capture on a GPU"), engine.graphs.capture():
        pass
    with activations:
        loss = (weight * 2).square().sum()
    loss.backward()
    engine.close()
