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
from offload_engine._devices import CpuDevice
from offload_engine._devices.copy_worker import CopyThread
from offload_engine._host.leases import GroupLease
from offload_engine._host.try_lock import run_if_free
from offload_engine._saved import store
from offload_engine.frontends._common.session import Session
from tests.engine_state import is_free
from tests.interrupts.jobs import DEVICES, JOBS, WIDTH, Job, Model

CONFIG = OffloadConfig(min_tensor_bytes=0, directory="none")

pytestmark = pytest.mark.usefixtures("interrupts_raise")


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    engine = OffloadEngine(CONFIG)
    yield engine
    engine.close()


def forward_of_groups(engine: OffloadEngine) -> tuple[Any, torch.Tensor]:
    chunk, y = engine.start_chunk(), torch.randn(64, 64, requires_grad=True)
    for _ in range(4):
        y = group_start(y, chunk, "group")
        with chunk.saved_tensors_hooks():
            y = y.sin()
        y = group_commit(y, chunk)
    return chunk, y


def step(engine: OffloadEngine) -> None:
    with engine.iteration():
        forward_of_groups(engine)[1].sum().backward()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


needs_source = pytest.mark.skipif(IS_COMPILED, reason="nothing in compiled code can be replaced or interrupted")


class Lock:
    """A lock that gets a Ctrl-C while it is acquired."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def acquire(self, *args: Any, **kwargs: Any) -> bool:
        taken = self.lock.acquire(*args, **kwargs)
        signal.raise_signal(signal.SIGINT)
        return taken

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lock, name)


def test_an_interrupt_leaves_the_lock_free() -> None:
    """While it is taken, and in the work that is done under it."""
    lock: Any = Lock()
    with pytest.raises(KeyboardInterrupt):
        run_if_free(lock, lambda: None)
    assert is_free(lock.lock)
    with pytest.raises(KeyboardInterrupt):
        run_if_free(lock.lock, lambda: signal.raise_signal(signal.SIGINT))
    assert is_free(lock.lock)


def test_a_lock_that_is_held_is_not_waited_for() -> None:
    lock, done = threading.RLock(), list[str]()
    with lock:
        assert not run_if_free(lock, lambda: done.append("by this thread"))
        thread = threading.Thread(target=lambda: run_if_free(lock, lambda: done.append("by another")))
        thread.start()
        thread.join()
    assert not done and run_if_free(lock, lambda: done.append("free")) and done == ["free"] and is_free(lock)


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


@needs_source
@pytest.mark.parametrize("number", [1, 3, 4])
def test_an_interrupt_in_a_destructor_ends_the_step(engine: OffloadEngine, number: int, ignored: list[Any]) -> None:
    step(engine)
    interrupt_destructor(number)
    with pytest.raises(KeyboardInterrupt):
        step(engine)
    assert ignored == [KeyboardInterrupt]
    assert not engine.has_saved and engine.pool.num_leases == 0
    engine.begin_iteration()
    chunk, y = forward_of_groups(engine)
    interrupt_destructor(1)
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward()
    assert chunk.boundaries.current_group == 2, "the backward of the next group has raised it"
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
    assert engine.failures.is_torn and (engine.has_saved, engine.pool.num_leases) == (True, 1)
    engine.begin_iteration()
    assert not engine.has_saved and engine.pool.num_leases == 0 and not engine.failures.has_failed
    engine.end_iteration()
    with pytest.raises(OffloadError, match="abandoned by reset_iteration"):
        chunk.tensor_pop(handle)


@needs_source
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
    assert isinstance(engine.device, CpuDevice)
    streams = engine.device._streams
    assert any(stream._thread is not None for stream in streams)
    engine.close()
    assert not any(stream._thread is not None for stream in streams)


def test_a_handle_that_is_gone_without_a_word_is_an_interrupt(engine: OffloadEngine) -> None:
    """What an interrupted destructor leaves: this also holds in the compiled core."""
    with engine.iteration():
        chunk = engine.start_chunk()
        chunk.open_group("group")
        handle, kept = chunk.tensor_push(torch.ones(64)), chunk.tensor_push(torch.ones(64))
        assert bool(engine.has_saved)
        handle.storage.handles[0] = handle.place
        del handle
        with pytest.raises(KeyboardInterrupt):
            engine.has_saved  # noqa: B018
        assert (chunk.tensor_pop(kept) == 1).all()
        del kept
        engine.reset_iteration()
        assert not engine.has_saved and engine.pool.num_leases == 0
        engine.begin_iteration()


@needs_source
def test_an_interrupt_between_a_lease_and_its_storages_loses_no_host_bytes(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(GroupLease, "__init__", interrupted)
        step(engine)
    step(engine)
    assert engine.pool.num_leases == engine.pool.lent_bytes == 0


@pytest.fixture
def no_hooks() -> Iterator[None]:
    """Leave no hooks to later tests."""
    yield
    while torch_private.innermost_hooks(True) is not None:
        torch_private.pop_hooks()


@pytest.mark.usefixtures("no_hooks")
@pytest.mark.parametrize("number", [1, 3])
@pytest.mark.parametrize("name", JOBS)
def test_hooks_that_an_interrupt_leaves_are_taken_off(name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes right behind a push of hooks, in front of the `with` that pops them."""
    expected = JOBS[name](None).step()
    job = JOBS[name](DEVICES["cpu"]())
    job.step()
    enter, num_left = OwnHooks.__enter__, number

    def interrupted_enter(hooks: OwnHooks) -> None:
        nonlocal num_left
        enter(hooks)
        num_left -= 1
        if num_left == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(OwnHooks, "__enter__", interrupted_enter)
    with pytest.raises(KeyboardInterrupt):
        while num_left > 0:
            job.step()
    recovers(job, expected)


def recovers(job: Job, expected: list[torch.Tensor]) -> None:
    """Check that offload goes on, and end the job."""
    job.recover()
    assert all(map(torch.equal, job.step(), expected))
    assert torch_private.innermost_hooks(True) is None
    assert job.engine is not None and job.engine.stats.copied_out_bytes > 0
    job.close()


@needs_source
@pytest.mark.parametrize("name", ["enable_activation_offloading", "enable_ckpt"])
def test_offload_goes_on_after_an_interrupt_in_front_of_a_forward(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted_start(session: Session) -> None:
        start_forward(session)
        raise KeyboardInterrupt

    job = JOBS[name](DEVICES["cpu"]())
    expected, start_forward = job.step(), Session.start_forward
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Session, "start_forward", interrupted_start)
        job.step()
    recovers(job, expected)


@pytest.mark.usefixtures("no_hooks")
@pytest.mark.parametrize("ends_by", ["the next forward", "remove"])
@pytest.mark.parametrize("enable_ckpt", [False, True])
def test_behind_an_interrupt_in_a_layer_other_models_are_right(enable_ckpt: bool, ends_by: str) -> None:
    """torch runs no hook behind an interrupted forward: those of the layer are in force until the next one begins."""

    def gradients(model: Model) -> list[torch.Tensor]:
        loss = model(torch.linspace(0, 1, 8 * WIDTH).view(8, WIDTH)).sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    model, other = Model(), Model()
    expected, expected_of_other = gradients(model), gradients(other)
    handle = enable_activation_offloading(model, enable_ckpt=enable_ckpt, config=CONFIG)
    with model.get_submodule("blocks.2.linear").register_forward_hook(interrupted), pytest.raises(KeyboardInterrupt):
        gradients(model)
    assert all(map(torch.equal, gradients(other), expected_of_other))
    if ends_by == "remove":
        handle.remove()
    assert all(map(torch.equal, gradients(model), expected))
    assert torch_private.innermost_hooks(True) is None
    handle.remove()
