# SPDX-License-Identifier: Apache-2.0
"""Rows that let Megatron-FSDP run on a machine without a GPU, over gloo; none where it cannot be imported."""

from __future__ import annotations

import functools
import importlib
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_patches._rows.registry import Patch
from megatron_patches._rows.without_gpu import CPU, STAY, NoStream, TorchWithoutGpu, instead, wrap_with_row

_ADAPTER = "megatron.core.distributed.fsdp.mcore_fsdp_adapter"
_SOURCE = "megatron.core.distributed.fsdp.src.megatron_fsdp"
_ASKS_FOR_CUDA = {
    _ADAPTER: "the model is moved to the GPU, whose generator is kept in step on tensor-parallel ranks",
    f"{_SOURCE}.megatron_fsdp": "the model is moved to the GPU, and weights are gathered on a GPU stream",
    f"{_SOURCE}.param_and_grad_buffer": "weights are gathered and gradients reduced on GPU streams",
    f"{_SOURCE}.utils": "the buffers that double buffering takes turns with are created on the GPU",
}


def fsdp_cpu_rows() -> list[Patch]:
    """Return the rows."""
    try:
        importlib.import_module(f"{_SOURCE}.megatron_fsdp")
    except ImportError:
        return []
    return [
        *(Patch(target=f"{module}:torch", wrapper=_TorchOfFsdp, why=why) for module, why in _ASKS_FOR_CUDA.items()),
        Patch(
            target=f"{_ADAPTER}:DeviceMesh",
            wrapper=functools.partial(instead, types.SimpleNamespace(from_group=_mesh_on_cpu)),
            why="the mesh of ranks is one of GPUs",
        ),
        Patch(
            target=f"{_SOURCE}.param_and_grad_buffer:validate_uneven_dtensor",
            wrapper=functools.partial(wrap_with_row, STAY),
            why="the sizes of shards are compared on the GPU",
        ),
        Patch(
            target=f"{_SOURCE}.param_and_grad_buffer:_coalescing_manager",
            wrapper=functools.partial(instead, _one_by_one),
            why="gloo's coalesced collectives write to memory that was freed: a process dies now and then",
        ),
    ]


class _TorchOfFsdp(TorchWithoutGpu):
    """Names the CPU where modules of Megatron-FSDP build the name of a device from the index of the current one."""

    def __init__(self, real: types.ModuleType) -> None:
        super().__init__(real)
        self.distributed = _DistributedInOrder()

    def device(self, name: Any, *index: int) -> torch.device:
        return CPU if str(name).startswith("cuda") else torch.device(name, *index)


class _DistributedInOrder:
    """Stands in for `torch.distributed`: weights are gathered when the call returns."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.distributed, name)

    def all_gather_into_tensor(self, *args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        gather: Any = torch.distributed.all_gather_into_tensor
        work = gather(*args, async_op=True, **kwargs)
        work.wait()
        return work


@contextmanager
def _one_by_one(*args: object, **kwargs: object) -> Iterator[NoStream]:
    yield NoStream()  # has a `wait`


def _mesh_on_cpu(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(group, CPU.type, *args, **kwargs)
