# SPDX-License-Identifier: Apache-2.0
"""What a budget says of memory that weights fill, and of memory that runs out, in loops of any kind."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from offload_engine import OffloadConfig, enable_activation_offloading, manage_activations
from offload_engine._budget.gauge import ResidentGauge
from offload_engine._compat import torch_private
from offload_engine._devices.cpu import CpuDevice
from offload_engine._devices.cuda_memory import CudaMemory
from offload_engine.errors import BudgetError
from offload_engine.frontends._common.session import Session
from tests.cpu.test_budget import Allocator, ByBytes, ByHand, ByLayers, config

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_budget_that_weights_fill_is_refused_before_the_first_step_and_not_before() -> None:
    """A model may come to the GPU, or be sharded, after its engine is made. What the allocator has cached is no matter.

    On the CPU device weights do not count.
    """
    model = [weight.clone() for weight in ByHand(config()).model.parameters()]
    message = "^gpu_budget is 4 MiB, but 5 MiB are taken before the first step, by weights, .*: raise it, or spread"
    for make in (ByHand, ByLayers, ByBytes):
        job = make(config(gpu_budget=4 << 20))
        gauge = Allocator(job)
        gauge.outside, gauge._reserved = 4 << 20, 1 << 30
        for _ in range(2):
            with pytest.raises(BudgetError, match=message):
                job.step(num_microbatches=1)
        assert all(map(torch.equal, model, job.model.parameters()))
        gauge.outside = (3 << 20) - 1
        job.step(num_microbatches=1)
        gauge.outside += 1
        job.step(num_microbatches=1)  # by then it is measured
    ByHand(config(gpu_budget=1)).step()


def test_what_is_taken_on_a_gpu_is_allocated_or_outside_the_allocator() -> None:
    held = {"allocated_bytes": {"all": {"current": 3}}, "reserved_bytes": {"all": {"current": 10}}}
    calls = {"memory_stats_as_nested_dict": held, "mem_get_info": (85, 100)}
    with mock.patch.multiple(torch.cuda, **{name: mock.Mock(return_value=value) for name, value in calls.items()}):
        assert CudaMemory(torch.device("cuda", 0)).taken_bytes() == 3 + (100 - 85 - 10)


# -- out of memory where no frame is the engine's ---------------------------------------------------------------------


class FullGpu:
    """A GPU's gauge that measures groups, and whose memory runs out when it is told to."""

    groups: ResidentGauge

    def __init__(self) -> None:
        self.listeners: list[Any] = []

    def watch(self, on_shortage: Callable[[], None]) -> None:
        self.listeners.append(weakref.WeakMethod(on_shortage))

    def run_out(self) -> None:
        """Do as torch's allocator: call the observers, then raise."""
        for listener in self.listeners:
            if (method := listener()) is not None:
                method()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def total_bytes(self) -> int:
        return 1 << 40

    def __getattr__(self, name: str) -> Any:
        return getattr(self.groups, name)


class GpuOnCpu(CpuDevice):
    def __init__(self, directory: Any = None) -> None:
        super().__init__(directory)
        self.memory: Any = FullGpu()


class Kernel(torch.autograd.Function):
    """Makes a call in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, call: Callable[[str], None]) -> torch.Tensor:
        ctx.call = call
        call("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        ctx.call("backward")
        return grad, None


class Layer(nn.Module):
    def __init__(self, call: Callable[[str], None]) -> None:
        super().__init__()
        self.linear, self._call = nn.Linear(8, 8), call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(Kernel.apply(self.linear(x), self._call))


class PlainLoop:
    """Trains in a loop of the user's own, in one place of which memory runs out: forward, loss, backward, between."""

    def __init__(self, offload: Callable[[nn.Module, OffloadConfig], Any], budget: int | None = 1 << 30) -> None:
        self._full = ""
        self.model = nn.Sequential(*(Layer(self._check) for _ in range(3)))
        self._optimizer = torch.optim.SGD(self.model.parameters())
        with mock.patch("offload_engine._devices.CpuDevice", GpuOnCpu):
            self.handle = offload(self.model, config(gpu_budget=budget))
            self.engine = self.handle.engine
        self.gpu: Any = self.engine.device.memory
        self.gpu.groups = ResidentGauge(self.engine._store.counters)

    def _check(self, place: str) -> None:
        if place == self._full:
            self.gpu.run_out()

    def step(self, full: str = "") -> None:
        self._full = full
        with self.handle if hasattr(self.handle, "__enter__") else nullcontext():
            y = self.model(torch.randn(4, 8))
        self._check("loss")
        y.square().mean().backward()
        self._optimizer.step()
        self._check("between")
        self._optimizer.zero_grad()

    def run_out(self, place: str) -> str:
        """Return the notes on the error."""
        with pytest.raises(torch.OutOfMemoryError) as caught:
            self.step(place)
        return "".join(getattr(caught.value, "__notes__", ()))


def by_layers(model: nn.Module, settings: OffloadConfig) -> Any:
    return enable_activation_offloading(model, "none", config=settings, layers=list(model.children()))


def by_bytes(model: nn.Module, settings: OffloadConfig) -> Any:
    return manage_activations(model, settings)


each_front_end = pytest.mark.parametrize("offload", [by_layers, by_bytes])


@each_front_end
@pytest.mark.parametrize("place", ["loss", "backward"])
def test_memory_that_runs_out_where_no_frame_is_the_engines_is_explained_in_the_log(
    offload: Any, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Once: whoever catches the error may go on. In a forward the error itself has the note."""
    job = PlainLoop(offload)
    job.step()
    job.run_out("between")
    note = job.run_out("forward")
    assert note.startswith("gpu_budget is 1.00 GiB, and nothing was planned yet")
    assert not caplog.records
    for _ in range(2):
        assert job.run_out(place) == ""
        [record] = caplog.records
        assert record.message.startswith("out of GPU memory: gpu_budget is 1.00 GiB, and nothing was planned yet")


@each_front_end
def test_the_log_says_what_the_plan_expected(offload: Any, caplog: pytest.LogCaptureFixture) -> None:
    job = PlainLoop(offload)
    for _ in range(8):
        job.step()
    assert job.run_out("backward") == ""
    [text] = [each.message for each in caplog.records]
    assert "and the plan expected" in text and "When memory ran out there were" in text


def test_an_engine_that_is_closed_or_has_no_budget_explains_nothing(caplog: pytest.LogCaptureFixture) -> None:
    closed, without = PlainLoop(by_layers), PlainLoop(by_layers, budget=None)
    for job in (closed, without):
        job.step()
    closed.handle.remove()
    for job in (closed, without):
        assert job.run_out("backward") == ""
    assert not caplog.records and not without.gpu.listeners


def test_a_caller_of_iterations_adds_the_note_itself() -> None:
    job = PlainLoop(by_layers)
    del job.gpu.listeners[:]
    Session(job.engine, owns_iterations=False)
    assert not job.gpu.listeners


# -- the observer of torch's allocator ---------------------------------------------------------------------------------


class Told:
    """Counts how often it is told."""

    num = 0

    def tell(self) -> None:
        self.num += 1

    def fail(self) -> None:
        raise ZeroDivisionError("no time to explain")


@pytest.fixture
def observers(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., None]]:
    """Observers of an allocator in which each allocation of a tensor runs out of memory on GPU 1."""
    found = list[Callable[..., None]]()

    def empty(*_: Any, **__: Any) -> None:
        for observer in found:
            observer(1, 2 << 30, 80 << 30, 1 << 30)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(torch_private, "cuda_observe_shortages", found.append)
    monkeypatch.setattr(torch, "empty", empty)
    return found


def test_a_gpu_has_one_observer_which_keeps_nothing_alive(observers: list[Callable[..., None]]) -> None:
    memory, other, first, second, third = CudaMemory(gpu(1)), CudaMemory(gpu(0)), Told(), Told(), Told()
    assert not observers  # without a budget there is none
    other.watch(third.tell)
    memory.watch(first.tell)
    memory.watch(second.tell)
    assert len(observers) == 2
    allocate_too_much()
    assert (first.num, second.num, third.num) == (1, 1, 0)
    del second
    allocate_too_much()
    assert first.num == 2
    known = weakref.ref(memory)
    del memory
    assert known() is None
    allocate_too_much()
    assert first.num == 2


def test_an_arena_that_does_not_fit_is_no_news(observers: list[Callable[..., None]]) -> None:
    memory, told = CudaMemory(gpu(1)), Told()
    memory.watch(told.tell)
    memory.reserve(1 << 30)
    assert told.num == 0
    allocate_too_much()
    assert told.num == 1


def test_what_fails_in_an_observer_never_takes_the_place_of_the_error(
    observers: list[Callable[..., None]], caplog: pytest.LogCaptureFixture
) -> None:
    memory, told = CudaMemory(gpu(1)), Told()
    memory.watch(told.fail)
    memory.watch(told.tell)
    allocate_too_much()
    assert told.num == 1
    assert [each.message for each in caplog.records] == [
        "a shortage of GPU memory could not be explained: no time to explain"
    ]


@pytest.mark.parametrize("error", [ImportError, RuntimeError])
def test_an_allocator_without_observers_trains(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """As cudaMallocAsync, or a build of torch without the name."""
    monkeypatch.setattr(torch_private, "cuda_observe_shortages", mock.Mock(side_effect=error("has no observers")))
    CudaMemory(gpu(1)).watch(Told().tell)


def gpu(index: int) -> torch.device:
    return torch.device("cuda", index)


def allocate_too_much() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50)
