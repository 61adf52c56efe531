# SPDX-License-Identifier: Apache-2.0
"""Finds the device of a model's activations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from offload_engine._devices import make_cpu_device
from offload_engine._devices.base import Device
from offload_engine.config import OffloadConfig
from offload_engine.frontends._common.weights import weights_of


def device_for(parts: Iterable[nn.Module | torch.Tensor], config: OffloadConfig) -> Device | None:
    """Return the device on which a model computes; None: the engine's default.

    The default is the current GPU, which is wrong for a model on another GPU, or on the CPU of a machine with a GPU.

    Args:
        parts: modules or weights of the model.
        config: has the directory of the host tier.
    """
    if not torch.cuda.is_available():
        return None
    devices = {device for part in parts for device in _compute_devices(part)}
    if devices == {torch.device("cpu")}:
        return make_cpu_device(config)
    gpus = {device for device in devices if device.type == "cuda"}
    if len(gpus) != 1:
        return None
    from offload_engine._devices.cuda import CudaDevice

    return CudaDevice(gpus.pop(), config.directory)


def _compute_devices(part: nn.Module | torch.Tensor) -> Iterator[torch.device]:
    """Yield the devices that compute with `part`: a sharded weight may be on the CPU and gathered on the GPU."""
    if isinstance(part, torch.Tensor):
        mesh = getattr(part, "device_mesh", None)  # FSDP2
        yield part.device if mesh is None or mesh.device_type == "cpu" else torch.device(mesh.device_type)
        return
    wrapped = next((module for module in part.modules() if hasattr(module, "compute_device")), None)  # FSDP1
    if wrapped is not None:
        yield torch.device(wrapped.compute_device)  # type: ignore[call-overload]
        return
    for weight in weights_of((part,)):
        yield from _compute_devices(weight)
