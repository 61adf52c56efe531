# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C between any two lines: no lock stays held, no storage stays for ever, and the interrupt is not lost."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from offload_engine import (
    IS_COMPILED,
    OffloadConfig,
    OffloadEngine,
    OffloadError,
    enable_activation_offloading,
    group_commit,
    group_start,
    manage_activations,
)
from offload_engine._compat import torch_private
from offload_engine._compat.own_hooks import OwnHooks
from offload_engine._devices.copy_worker import CopyThread
from offload_engine._host.leases import GroupLease
from offload_engine._host.try_lock import run_if_free
from offload_engine._saved import store
from offload_engine.frontends._common.session import Session
from tests.engine_state import is_free
from tests.interrupts.jobs import DEVICES, JOBS

CONFIG = OffloadConfig(min_tensor_bytes=0, directory="none")

pytestmark = pytest.mark.usefixtures("interrupts_raise")


class Lock:
    """A lock that gets a Ctrl-C while the acquisition that `num_left` counts down to is under way."""

    def __init__(self) -> None:
        self.lock: Any = threading.RLock()
        self.num_left = -1

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        taken: bool = self.lock.acquire(*args, **kwargs)
        self.num_left -= taken
        if taken and self.num_left == 0:
            signal.raise_signal(signal.SIGINT)
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lock, name)

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self.lock.release()


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    engine = OffloadEngine(CONFIG)
    yield engine
    engine.close()


def step(engine: OffloadEngine) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with engine.iteration():
        chunk, y = engine.start_chunk(), x
        for _ in range(4):
            y = group_start(y, chunk, "group")
            with chunk.saved_tensors_hooks():
                y = y.sin()
            y = group_commit(y, chunk)
        y.sum().backward()


def test_an_interrupt_while_the_lock_is_taken_leaves_it_free() -> None:
    lock = Lock()
    lock.num_left = 1
    with pytest.raises(KeyboardInterrupt):
        run_if_free(lock, lambda: None)
    assert is_free(lock.lock)


def test_an_interrupt_in_the_work_leaves_the_lock_free() -> None:
    lock = threading.RLock()
    with pytest.raises(KeyboardInterrupt):
        run_if_free(lock, lambda: signal.raise_signal(signal.SIGINT))
    assert is_free(lock)


def test_a_lock_that_is_held_is_not_waited_for() -> None:
    lock, done = threading.RLock(), list[str]()
    with lock:
        assert not run_if_free(lock, lambda: done.append("by this thread"))
        thread = threading.Thread(target=lambda: run_if_free(lock, lambda: done.append("by another")))
        thread.start()
        thread.join()
    assert not done and run_if_free(lock, lambda: done.append("free")) and done == ["free"] and is_free(lock)


@pytest.mark.skipif(IS_COMPILED, reason="compiled attributes cannot be replaced")
def test_the_step_after_an_interrupt_runs(engine: OffloadEngine) -> None:
    step(engine)
    lock = engine._store._lock = engine._store.retired.lock = Lock()
    lock.num_left = 2
    with pytest.raises(KeyboardInterrupt):
        step(engine)
    assert lock.num_left <= 0 and is_free(lock.lock)
    step(engine)
    assert not engine.has_saved


def interrupt_destructor(number: int) -> None:
    """Let a Ctrl-C come in front of the first line of a handle's destructor, where nothing can catch it."""
    left = number

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        if event == "call" and frame.f_code.co_qualname == "PackedTensor.__del__":
            left -= 1
            if left == 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    sys.setprofile(profile)


@pytest.fixture
def ignored(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What Python dropped because a destructor raised it."""
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: found.append(args.exc_type))
    yield found
    sys.setprofile(None)


@pytest.mark.skipif(IS_COMPILED, reason="Python does not deliver interrupts inside compiled code")
@pytest.mark.parametrize("number", [1, 3, 4])
def test_an_interrupt_in_a_destructor_ends_the_step(engine: OffloadEngine, number: int, ignored: list[Any]) -> None:
    step(engine)
    interrupt_destructor(number)
    with pytest.raises(KeyboardInterrupt):
        step(engine)
    assert ignored == [KeyboardInterrupt]
    assert not engine.has_saved and engine.pool.num_leases == 0
    step(engine)


@pytest.mark.skipif(IS_COMPILED, reason="Python does not deliver interrupts inside compiled code")
def test_an_interrupt_in_a_destructor_is_raised_by_the_backward_of_the_next_group(
    engine: OffloadEngine, ignored: list[Any]
) -> None:
    engine.begin_iteration()
    chunk, y = engine.start_chunk(), torch.randn(64, 64, requires_grad=True)
    for _ in range(4):
        y = group_start(y, chunk, "group")
        with chunk.saved_tensors_hooks():
            y = y.sin()
        y = group_commit(y, chunk)
    interrupt_destructor(1)
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward()
    assert ignored == [KeyboardInterrupt] and chunk.current_group == 2
    engine.begin_iteration()  # resets
    assert not engine.has_saved
    engine.end_iteration()


def test_after_a_torn_operation_the_next_iteration_begins_anew(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.begin_iteration()
    chunk = engine.start_chunk()
    chunk.open_group("group")
    handle = chunk.tensor_push(torch.ones(64))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.device, "copy_out", mock.Mock(side_effect=KeyboardInterrupt))
        chunk.close_group()
    assert engine.failures.is_torn and engine.has_saved and engine.pool.num_leases == 1
    engine.begin_iteration()
    assert not engine.has_saved and engine.pool.num_leases == 0 and not engine.failures.has_failed
    engine.end_iteration()
    with pytest.raises(OffloadError, match="dropped by reset_iteration"):
        chunk.tensor_pop(handle)


@pytest.mark.skipif(IS_COMPILED, reason="compiled functions cannot be replaced")
def test_a_save_that_failed_is_no_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves a storage without a handle, as an interrupt does."""
    engine = OffloadEngine(CONFIG)
    activations, x = manage_activations(engine=engine, group_bytes=1), torch.randn(64, requires_grad=True)
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="of the test"), activations:
        patch.setattr(store, "PackedTensor", mock.Mock(side_effect=ValueError("of the test")))
        (x * 1).sin()
    with activations:
        y = (x * 1).sin()
    y.sum().backward()
    assert not engine.has_saved and x.grad is not None
    activations.close()


def test_a_device_that_was_interrupted_while_it_closed_is_closed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OffloadEngine(CONFIG)
    step(engine)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(CopyThread, "join", mock.Mock(side_effect=KeyboardInterrupt))
        engine.close()
    streams = engine.device._streams
    assert any(stream._thread is not None for stream in streams)
    engine.close()
    assert not any(stream._thread is not None for stream in streams)


@pytest.mark.skipif(IS_COMPILED, reason="Python does not deliver interrupts inside compiled code")
@pytest.mark.parametrize("number", [1, 4])
def test_an_interrupt_in_a_destructor_ends_the_backward_of_a_front_end(number: int, ignored: list[Any]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Sigmoid()) for _ in range(6)))
    handle = enable_activation_offloading(model, "none", layers=list(model), config=CONFIG)
    x = torch.randn(64, 64)
    model(x).sum().backward()
    interrupt_destructor(number)
    loss = model(x).sum()
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    del loss
    assert ignored == [KeyboardInterrupt]
    num_groups = handle.stats.num_groups
    for _ in range(2):
        model(x).sum().backward()
        assert handle.stats.num_groups == num_groups and handle.engine.pool.num_leases == 0
    handle.remove()


@pytest.mark.skipif(IS_COMPILED, reason="Python does not deliver interrupts inside compiled code")
def test_an_interrupt_while_a_storage_is_retired_ends_the_step(engine: OffloadEngine, ignored: list[Any]) -> None:
    retire = engine._store.retired._retire

    def interrupted(saved: Any) -> None:
        engine._store.retired._retire = retire
        raise KeyboardInterrupt

    engine._store.retired._retire = interrupted
    with pytest.raises(KeyboardInterrupt):
        step(engine)
    assert not ignored and not engine.has_saved and engine.pool.num_leases == 0
    step(engine)


def test_a_handle_that_is_gone_without_a_word_is_an_interrupt(engine: OffloadEngine) -> None:
    """What an interrupted destructor leaves: this also holds in the compiled core."""
    with engine.iteration():
        chunk = engine.start_chunk()
        chunk.open_group("group")
        handle, kept = chunk.tensor_push(torch.ones(64)), chunk.tensor_push(torch.ones(64))
        assert engine.has_saved
        handle.storage.handles[0] = handle.place
        del handle
        with pytest.raises(KeyboardInterrupt):
            engine.has_saved  # noqa: B018
        assert (chunk.tensor_pop(kept) == 1).all()
        del kept
        engine.reset_iteration()
        assert not engine.has_saved and engine.pool.num_leases == 0
        engine.begin_iteration()


@pytest.mark.skipif(IS_COMPILED, reason="compiled functions cannot be replaced")
def test_an_interrupt_between_a_lease_and_its_storages_loses_no_host_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = OffloadEngine(CONFIG)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(GroupLease, "__init__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(engine)
    step(engine)
    assert engine.pool.num_leases == engine.pool.lent_bytes == 0
    engine.close()


def test_a_retained_graph_is_no_interrupt(engine: OffloadEngine) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with engine.iteration():
        chunk = engine.start_chunk()
        with chunk.saved_tensors_hooks():
            y = x.sin()
        assert engine.has_saved
    y.sum().backward()
    assert not engine.has_saved


@pytest.fixture
def no_hooks() -> Iterator[None]:
    """Leave no hooks to later tests."""
    yield
    while torch_private.innermost_hooks(True) is not None:
        torch_private.pop_hooks()


class InterruptedHooks:
    """Lets an interrupt come right behind the push of hooks, in front of the `with` that would pop them.

    Args:
        monkeypatch: of the test.
        number: of the push; 1 is the first.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.num_left = number
        enter = OwnHooks.__enter__

        def interrupted(hooks: OwnHooks) -> None:
            enter(hooks)
            self.num_left -= 1
            if self.num_left == 0:
                raise KeyboardInterrupt

        monkeypatch.setattr(OwnHooks, "__enter__", interrupted)


@pytest.mark.usefixtures("no_hooks")
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("name", JOBS)
def test_hooks_that_an_interrupt_leaves_are_taken_off(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = JOBS[name](None).step()
    job = JOBS[name](DEVICES["cpu"]())
    job.step()
    hooks = InterruptedHooks(monkeypatch, number)
    with pytest.raises(KeyboardInterrupt):
        while hooks.num_left > 0:
            job.step()
    job.recover()
    assert all(map(torch.equal, job.step(), expected))
    assert torch_private.innermost_hooks(True) is None
    assert job.engine is not None and job.engine.stats.copied_out_bytes > 0
    job.close()


@pytest.mark.usefixtures("no_hooks")
def test_hooks_that_are_not_the_engines_stay(engine: OffloadEngine) -> None:
    engine.begin_iteration()
    chunk = engine.start_chunk()
    with chunk.saved_tensors_hooks(), torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        top = torch_private.innermost_hooks(True)
        engine.reset_iteration()
        assert torch_private.innermost_hooks(True) == top
    assert torch_private.innermost_hooks(True) is None


@pytest.mark.usefixtures("no_hooks")
def test_a_with_whose_hooks_a_reset_has_taken_off_leaves_others_alone(engine: OffloadEngine) -> None:
    engine.begin_iteration()
    chunk = engine.start_chunk()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        top = torch_private.innermost_hooks(True)
        with chunk.saved_tensors_hooks():
            engine.reset_iteration()
            assert torch_private.innermost_hooks(True) == top
        assert torch_private.innermost_hooks(True) == top
    assert torch_private.innermost_hooks(True) is None


@pytest.mark.usefixtures("no_hooks")
def test_hooks_of_a_managed_forward_that_an_interrupt_leaves_are_taken_off_by_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    activations = manage_activations(engine=OffloadEngine(CONFIG))
    InterruptedHooks(monkeypatch, 1)
    with pytest.raises(KeyboardInterrupt), activations:
        pass
    assert torch_private.innermost_hooks(True) is not None
    activations.close()
    assert torch_private.innermost_hooks(True) is None


@pytest.mark.skipif(IS_COMPILED, reason="compiled functions cannot be replaced")
@pytest.mark.parametrize("name", ["enable_activation_offloading", "enable_ckpt"])
def test_offload_goes_on_after_an_interrupt_in_front_of_a_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = JOBS[name](DEVICES["cpu"]())
    expected = job.step()
    start_forward = Session.start_forward

    def interrupted(session: Session) -> None:
        start_forward(session)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Session, "start_forward", interrupted)
        job.step()
    job.recover()
    assert all(map(torch.equal, job.step(), expected))
    assert job.engine is not None and job.engine.stats.copied_out_bytes > 0
    job.close()


class Layer(nn.Module):
    """Raises in its forward if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.is_interrupted = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).sin()
        if self.is_interrupted:
            raise KeyboardInterrupt
        return x.cos()


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def gradients(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    model(torch.linspace(0, 1, 1024).view(32, 32)).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.usefixtures("no_hooks")
@pytest.mark.parametrize("ends_by", ["the next forward", "remove"])
@pytest.mark.parametrize("enable_ckpt", [False, True])
def test_behind_an_interrupt_in_a_layer_other_models_are_right(enable_ckpt: bool, ends_by: str) -> None:
    """torch runs no hook behind an interrupted forward: those of the layer are in force until the next one begins."""
    model, other = Stack(), Stack()
    expected, expected_of_other = gradients(model), gradients(other)
    handle = enable_activation_offloading(model, enable_ckpt=enable_ckpt, config=CONFIG)
    model.layers[2].is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        gradients(model)
    model.layers[2].is_interrupted = False
    assert all(map(torch.equal, gradients(other), expected_of_other))
    if ends_by == "remove":
        handle.remove()
    assert all(map(torch.equal, gradients(model), expected))
    assert torch_private.innermost_hooks(True) is None
    handle.remove()
