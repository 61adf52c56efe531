"""Where the activations of a model are."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload_engine._devices import CpuDevice
from offload_engine._devices.base import Device
from offload_engine.config import OffloadConfig


def device_for(weights: Iterable[torch.Tensor], config: OffloadConfig) -> Device | None:
    """The device that a model with these weights computes on; None: the engine's own choice.

    That choice is the current GPU, which is not right for a model on another one, nor for one on the CPU of a machine
    with a GPU.
    """
    if not torch.cuda.is_available():
        return None
    devices = {_computes_on(weight) for weight in weights}
    if devices == {torch.device("cpu")}:
        return CpuDevice(config.directory)
    gpus = {device for device in devices if device.type == "cuda"}
    if len(gpus) != 1:
        return None
    from offload_engine._devices.cuda import CudaDevice

    return CudaDevice(gpus.pop(), config.directory)


def _computes_on(weight: torch.Tensor) -> torch.device:
    """A sharded weight may wait on the CPU for being gathered on the GPU."""
    mesh = getattr(weight, "device_mesh", None)
    return weight.device if mesh is None or mesh.device_type == "cpu" else torch.device(mesh.device_type)
