# SPDX-License-Identifier: Apache-2.0
"""What goes wrong around the engine: Ctrl-C between any two lines, no memory, skipped steps."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
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
from tests.adversarial import AdversarialDevice
from tests.engine_state import in_group, is_free
from tests.interrupts.inject import PACKAGE
from tests.interrupts.jobs import DEVICES, JOBS, WIDTH, Model

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
        y = in_group(chunk, torch.sin, y)
    return chunk, y


def step(engine: OffloadEngine) -> None:
    with engine.iteration():
        forward_of_groups(engine)[1].sum().backward()


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


needs_source = pytest.mark.skipif(IS_COMPILED, reason="nothing in compiled code can be replaced or interrupted")


def test_a_lock_that_is_held_is_not_waited_for() -> None:
    """By another thread, which releases it; nor by this one."""
    lock: Any = threading.RLock()
    with lock:
        assert not run_if_free(lock, pytest.fail) and not is_free(lock)
    assert is_free(lock)


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


@needs_source
def test_only_handles_have_destructors_that_a_step_runs(engine: OffloadEngine) -> None:
    """In any other an interrupt would be lost: the engine misses handles alone."""
    found: set[str] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "__del__" and frame.f_code.co_filename.startswith(PACKAGE):
            found.add(frame.f_code.co_qualname)

    step(engine)
    sys.setprofile(profile)
    try:
        step(engine)
    finally:
        sys.setprofile(None)
    assert found == {"PackedTensor.__del__"}


def test_after_a_torn_operation_new_books_begin(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_an_interrupt_behind_a_lease_loses_no_bytes(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(GroupLease, "__init__", interrupted)
        step(engine)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(store, "abandon", interrupted)
        engine.reset_iteration()
    assert engine.failures.is_torn, "the reset is not over"
    step(engine)
    assert engine.pool.num_leases == engine.pool.lent_bytes == 0


@pytest.mark.usefixtures("no_hooks")
@pytest.mark.parametrize(
    ("name", "owner", "method", "number"),
    [
        *((name, OwnHooks, "__enter__", number) for name in JOBS for number in (1, 3)),
        *(
            pytest.param(name, Session, "start_forward", 1, marks=needs_source)
            for name in ("enable_activation_offloading", "enable_ckpt")
        ),
    ],
)
def test_hooks_that_an_interrupt_leaves_are_taken_off(
    name: str, owner: Any, method: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes right behind a push of hooks, in front of the `with` that pops them; and in front of a forward."""
    expected = JOBS[name](None).step()
    job = JOBS[name](DEVICES["cpu"]())
    job.step()
    call, num_left = getattr(owner, method), number

    def interrupted_call(self: Any) -> Any:
        nonlocal num_left
        result = call(self)
        num_left -= 1
        if num_left == 0:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, method, interrupted_call)
    with pytest.raises(KeyboardInterrupt):
        while num_left > 0:
            job.step()
    job.recover()
    assert all(map(torch.equal, job.step(), expected))
    assert torch_private.innermost_hooks(True) is None
    assert job.engine is not None and job.engine.stats.copied_out_bytes > 0
    job.close()


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


# -- no memory for buffers of the engine, and steps that a gradient scaler skips --------------------------------------


@pytest.mark.skipif(IS_COMPILED, reason="the store has bound the method that this replaces")
@pytest.mark.parametrize("name", JOBS)
def test_the_step_after_no_memory_for_a_buffer_is_equal(name: str, device: AdversarialDevice) -> None:
    num_left, expected = 0, JOBS[name](None).step()

    def fail_or_allocate(*args: Any, **options: Any) -> torch.Tensor:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            raise torch.OutOfMemoryError("no memory, says the test")
        return allocate(*args, **options)

    job = JOBS[name](device)
    job.step()
    allocate, num_failed = device.allocate, 0
    for number in range(1, 200):
        num_left = number
        with mock.patch.object(device, "allocate", fail_or_allocate), suppress(torch.OutOfMemoryError):
            job.step()
            assert num_left > 0, "the step went on without its buffer"
            break
        num_failed += 1
        job.recover()
        assert all(map(torch.equal, job.step(), expected))
        assert job.engine is not None and not job.engine.has_saved and job.engine.pool.num_leases == 0
    assert num_failed > 0, "nothing is copied in"
    job.close()


def train_with_scaler(model: nn.Module) -> tuple[list[float], int]:
    """Train in fp16 fashion; return the scales, and how many steps were skipped."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scales, num_skipped = [], 0
    for number in range(8):
        optimizer.zero_grad()
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number)) * 1e3
        scaler.scale(model(x).pow(2).sum() * 1e3).backward()
        before = [p.detach().clone() for p in model.parameters()]
        scaler.step(optimizer)
        num_skipped += all(map(torch.equal, before, model.parameters()))
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, num_skipped


def test_a_gradient_scaler_skips_the_same_steps_and_comes_to_the_same_weights() -> None:
    plain = Model()
    offloaded = copy.deepcopy(plain)
    expected = train_with_scaler(plain)
    handle = enable_activation_offloading(offloaded, "none", config=CONFIG)
    assert train_with_scaler(offloaded) == expected and 0 < expected[1] < 8, expected
    assert all(map(torch.equal, plain.parameters(), offloaded.parameters()))
    assert handle.stats.copied_out_bytes > 0
    handle.remove()
