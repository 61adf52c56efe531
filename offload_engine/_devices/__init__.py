# SPDX-License-Identifier: Apache-2.0
"""Devices: the source of streams, events, copies and host bytes. `make_device` selects that of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from offload_engine._devices.base import CopyError, Device, HostRegion, HostSlab
from offload_engine._devices.cpu import CpuDevice, resolve_directory
from offload_engine._devices.file_slab import check_directory

if TYPE_CHECKING:
    from offload_engine.config import OffloadConfig

__all__ = [
    "CopyError",
    "CpuDevice",
    "Device",
    "HostRegion",
    "HostSlab",
    "check_device",
    "check_directory",
    "make_cpu_device",
    "make_device",
]


def check_device(device: object) -> None:
    """Check that `device` is none of torch's.

    Raises:
        TypeError: if it is.
    """
    if isinstance(device, (str, int, torch.device)):
        raise TypeError(
            f"device={device!r} is a device of torch. Omit it: the engine takes the current CUDA device "
            "(torch.cuda.set_device), or the CPU if there is no GPU"
        )


def make_device(config: OffloadConfig) -> Device:
    """Make the device of this process: the current CUDA device if there is one, else the CPU.

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
