# SPDX-License-Identifier: Apache-2.0
"""Stands in for a GPU in megatron-core: the device "cuda" is the CPU, and streams do nothing."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches._rows.registry import Patch, apply_patches

CPU = torch.device("cpu")


class NoStream:
    """Stands in for a stream or an event, because everything runs in program order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass

    def wait_event(self, event: object) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def wait(self, stream: object = None) -> None:
        pass

    def record_event(self, event: NoStream | None = None) -> NoStream:
        return NoStream() if event is None else event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class CudaWithoutGpu:
    """Stands in for `torch.cuda`: the device is the CPU, its generator the CPU's, and no wait is needed."""

    Stream: Callable[..., Any] = NoStream
    Event: Callable[..., Any] = NoStream

    def __init__(self) -> None:
        self.nvtx = types.SimpleNamespace(range=contextlib.nullcontext, range_push=nothing, range_pop=nothing)
        self.random = self
        self._stream = NoStream()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device(self) -> torch.device:
        return CPU

    def current_stream(self, device: object = None) -> Any:
        return self._stream

    default_stream = current_stream

    def stream(self, stream: object) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def synchronize(self, device: object = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)


class TorchWithoutGpu:
    """Stands in for `torch` in one module of megatron-core: tensors asked for on "cuda" are created on the CPU."""

    def __init__(self, real: types.ModuleType) -> None:
        self._real = real
        self.cuda = CudaWithoutGpu()
        for name in ("arange", "empty", "full", "ones", "tensor", "zeros"):
            setattr(self, name, _on_cpu(getattr(real, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") == "cuda":
            kwargs["device"] = CPU
        return factory(*args, **kwargs)

    return create


def nothing(*args: object, **kwargs: object) -> None:
    pass


def instead(replacement: Any, original: Any) -> Any:
    return replacement


def wrap_with_row(row: Patch, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `original` to apply `row` during each call."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with apply_patches([row]):
            return original(*args, **kwargs)

    return call


def _type_named_as_on_gpu(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def type_or_cast(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = original(tensor, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return type_or_cast


# A method of Tensor can only be replaced globally, so these rows are in force during single calls only.
STAY = Patch(
    target="torch:Tensor.cuda",
    wrapper=lambda original: lambda tensor: tensor,
    why="without a GPU a tensor is on the right device already",
)
NO_RECORD = Patch(
    target="torch:Tensor.record_stream",
    wrapper=lambda original: nothing,
    why="without streams no other stream uses the memory of a tensor",
)
GPU_TYPE_NAMES = Patch(
    target="torch:Tensor.type",
    wrapper=_type_named_as_on_gpu,
    why="the types of floats on the CPU are not among those that the optimizer knows",
)
