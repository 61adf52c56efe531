# SPDX-License-Identifier: Apache-2.0
"""The all-to-all overlap on the adversarial device: megatron-core's two streams are two of its compute streams."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import megatron.core.pipeline_parallel.utils as overlap_utils

from megatron_patches._rows.registry import Patch, apply_patches
from megatron_patches._rows.without_gpu import CudaWithoutGpu, TorchWithoutGpu
from offload_engine import OffloadEngine
from tests.adversarial import AdversarialDevice, AdversarialEvent, AdversarialStream

MODULES = (
    "pipeline_parallel.utils",
    "pipeline_parallel.combined_1f1b",
    "models.common.model_chunk_schedule_plan",
    "models.common.utils",  # from 0.19 on
    "models.gpt.fine_grained_callables",
)


@contextmanager
def adversarial_device(seed: int | None) -> Iterator[AdversarialDevice]:
    """Make new engines use the device, which sees all that runs; the schedule's streams and events are the device's."""
    device = AdversarialDevice(seed)
    with used_by_megatron(device, Cuda(device)):
        yield device


@contextmanager
def used_by_megatron(device: AdversarialDevice, cuda: Cuda, more: Sequence[str] = ()) -> Iterator[None]:
    """Make new engines use `device`, and megatron-core `cuda` in place of `torch.cuda`, also in the modules `more`."""
    modules = [name for name in (*MODULES, *more) if _exists(f"megatron.core.{name}")]
    wrappers: dict[str, Callable[..., Any]] = {
        **{f"megatron.core.{name}:torch": functools.partial(_with_cuda, cuda) for name in modules},
        "megatron_patches._runtime:OffloadEngine": lambda _: functools.partial(OffloadEngine, device=device),
        # A wait for a send or a receive orders behind the work of its issuer.
        "megatron.core.pipeline_parallel.p2p_communication:_p2p_ops": functools.partial(_ordering_requests, device),
    }
    rows = [Patch(target=target, wrapper=wrapper, why="the device under test") for target, wrapper in wrappers.items()]
    with apply_patches(rows), device.observe_compute():
        _forget_streams()
        yield
        _forget_streams()


def _forget_streams() -> None:
    overlap_utils._COMM_STREAM = overlap_utils._COMP_STREAM = None


def _exists(module: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), "torch")
    except ImportError:
        return False


def _with_cuda(cuda: Cuda, torch: Any) -> Any:
    stand_in = TorchWithoutGpu(getattr(torch, "_real", torch))
    stand_in.cuda = cuda
    return stand_in


def _ordering_requests(device: AdversarialDevice, original: Callable[..., Any]) -> Callable[..., Any]:
    def issue(**kwargs: Any) -> dict[str, _Request]:
        issued = device.record_event(device.current_stream())
        return {name: _Request(device, work, issued) for name, work in original(**kwargs).items()}

    return issue


class _Request:
    def __init__(self, device: AdversarialDevice, work: Any, issued: AdversarialEvent) -> None:
        self._device, self._work, self._issued = device, work, issued

    def wait(self) -> None:
        self._work.wait()
        self._device.wait_event(self._device.current_stream(), self._issued)


class Cuda(CudaWithoutGpu):
    """`torch.cuda` on a device, as far as megatron-core's schedules use it."""

    def __init__(self, device: AdversarialDevice) -> None:
        super().__init__()
        self._device = device
        self.Event = functools.partial(_Event, device)

    def Stream(self, *args: Any, **kwargs: Any) -> AdversarialStream:  # noqa: N802  # as torch.cuda has it
        with self._device.compute_stream("communication") as stream:
            return stream

    def current_stream(self, device: object = None) -> AdversarialStream:
        return self._device.current_stream()

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before = self._device.current_stream()
        self._device.set_current(stream)
        try:
            yield
        finally:
            self._device.set_current(before)


class _Event:
    def __init__(self, device: AdversarialDevice) -> None:
        self._device = device
        self._recorded: AdversarialEvent | None = None

    def record(self, stream: AdversarialStream) -> None:
        self._recorded = self._device.record_event(stream)

    def wait(self, stream: AdversarialStream) -> None:
        if self._recorded is not None:
            self._device.wait_event(stream, self._recorded)
