# SPDX-License-Identifier: Apache-2.0
"""Binds a process to the CPUs of its GPU's memory node, as `nvmlDeviceSetCpuAffinity` does, read from `/sys`.

The GPU itself makes the copies, into pinned memory near it (`pinned.py`). The CPUs matter for the host's access to the
GPU: launches, reads of results, and pages that threads touch first, which come from their own node.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from offload_engine._devices.pinned import pci_folder

logger = logging.getLogger(__name__)


class Binding(NamedTuple):
    """Outcome of a request to bind this process."""

    cpus: frozenset[int]
    """Near the GPU and allowed; empty: nothing was changed."""

    text: str
    """A sentence that says which, or why nothing was changed."""


def bind_to_gpu(device: torch.device, root: Path = Path("/")) -> Binding:
    """Bind every thread of this process, and those that they start from now on, to the CPUs near a GPU.

    A thread gets no CPU that it could not use before, and keeps its CPUs if none of them is near. Idempotent.

    Args:
        device: a CUDA device with an index; for any other, nothing is changed.
        root: directory of `/sys`; differs only in tests.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    near = _cpus_near(device, root)
    if not near:
        why = "it is no GPU" if device.type != "cuda" else "this machine does not report which CPUs are near it"
        return Binding(frozenset(), f"cpu_affinity: this process is not bound to the CPUs near {device}: {why}")
    if not near & allowed:
        text = f"may use CPUs {_as_text(allowed)} only, and near {device} are {_as_text(near)}: it is not bound"
        return Binding(frozenset(), f"cpu_affinity: this process {text}")
    for thread in _threads():
        _bind(thread, near)
    return Binding(near & allowed, f"cpu_affinity: bound to CPUs {_as_text(near & allowed)}, which are near {device}")


def _bind(thread: int, near: frozenset[int]) -> None:
    with suppress(ProcessLookupError):  # the thread has ended
        if both := near.intersection(os.sched_getaffinity(thread)):
            os.sched_setaffinity(thread, both)


def _threads() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/task")]


def _cpus_near(device: torch.device, root: Path) -> frozenset[int]:
    folder = pci_folder(device, root) if device.type == "cuda" else None
    try:
        return frozenset() if folder is None else _parse((folder / "local_cpulist").read_text())
    except (OSError, ValueError) as error:  # a container without this part of /sys
        logger.debug("CPUs near %s unknown: %s", device, error)
        return frozenset()


def _parse(text: str) -> frozenset[int]:
    """Return the CPUs of a list such as "0-47,96-143"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _as_text(cpus: frozenset[int]) -> str:
    """Return the text that `_parse` reads as `cpus`."""
    firsts = sorted(cpu for cpu in cpus if cpu - 1 not in cpus)
    lasts = sorted(cpu for cpu in cpus if cpu + 1 not in cpus)
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(firsts, lasts, strict=True))
