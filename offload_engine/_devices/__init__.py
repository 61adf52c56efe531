# SPDX-License-Identifier: Apache-2.0
"""Provides streams, events, copies and host bytes of a device. `make_device` selects the device of this process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from offload_engine._devices.affinity import bind_to_gpu
from offload_engine._devices.base import CopyError, Device, HostRegion, HostSlab
from offload_engine._devices.cpu import CpuDevice, resolve_directory
from offload_engine._devices.file_slab import check_directory

if TYPE_CHECKING:
    from offload_engine.config import OffloadConfig

logger = logging.getLogger(__name__)

__all__ = [
    "CopyError",
    "CpuDevice",
    "Device",
    "HostRegion",
    "HostSlab",
    "check_directory",
    "device_for",
    "make_cpu_device",
    "make_device",
]


def device_for(config: OffloadConfig, given: Device | None) -> Device:
    """Return the device of an engine: the given one, or that of this process. Binds the process to CPUs if configured.

    Raises:
        TypeError: if `given` is a `torch.device`.
        ValueError, OSError: see `make_device`.
    """
    if isinstance(given, (str, int, torch.device)):
        raise TypeError(
            f"device={given!r} is a torch.device. Omit it: the engine uses the current CUDA device "
            "(torch.cuda.set_device), or the CPU if there is no GPU"
        )
    device = make_device(config) if given is None else given
    if config.cpu_affinity:
        binding = bind_to_gpu(device.torch_device)
        logger.log(logging.INFO if binding.cpus else logging.WARNING, "%s", binding.text)
    return device


def make_device(config: OffloadConfig) -> Device:
    """Make the device of this process: the current CUDA device if there is one, otherwise the CPU.

    Raises:
        ValueError: if `config.directory` is set with CUDA, or has less free than `config.host_limit_bytes`.
        OSError: if `config.directory` is missing, not a directory, or not writable.
    """
    if torch.cuda.is_available():
        from offload_engine._devices.cuda import CudaDevice

        return CudaDevice(directory=config.directory)
    return make_cpu_device(config)


def make_cpu_device(config: OffloadConfig) -> CpuDevice:
    """Make the CPU device, also on a machine with a GPU.

    Raises:
        ValueError: if `config.directory` has less free than `config.host_limit_bytes`.
        OSError: if `config.directory` is missing, not a directory, or not writable.
    """
    device = CpuDevice(config.directory)
    directory = resolve_directory(config.directory)
    if directory is not None and config.host_limit_bytes is not None:
        check_directory(directory, config.host_limit_bytes)
    return device
