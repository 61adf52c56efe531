# SPDX-License-Identifier: Apache-2.0
"""Computes how much memory a process may still take if all processes of its node get equal shares.

They share the free memory plus the memory that they hold. This sum does not change when one of them takes memory, so
each computes the same share at any time, and the shares never exceed the memory of the node. No state is stored: the
memory of a process that has died is free.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from offload_engine._devices.host_memory import available_host_bytes

# Number of processes on this node, as set by torchrun, DeepSpeed, Open MPI and MPICH's hydra.
_LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_SLURM_SIZES = "SLURM_STEP_TASKS_PER_NODE"  # of all nodes, such as "8(x2),4"


def num_processes_of_node(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many processes the launcher has started on this node; 1 if no variable says so."""
    for name in _LOCAL_SIZES:
        if environ.get(name, "").isdigit():
            return max(1, int(environ[name]))
    sizes = re.findall(r"(\d+)(?:\(x\d+\))?", environ.get(_SLURM_SIZES, ""))
    return max(1, *map(int, sizes)) if sizes else 1


def share_left(free: int, held: int, held_by_all: int, num_processes: int) -> int:
    """Return how many of the free bytes one of `num_processes` may take.

    Args:
        free: bytes that any process may take.
        held: bytes that this process holds.
        held_by_all: bytes that all of the processes hold, this one included.
        num_processes: number of processes with equal shares.
    """
    return max(0, min(free, (free + held_by_all) // num_processes - held))


def share_of_memory(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> int:
    """Return the bytes of memory that this process may still take of its equal share of the node.

    All anonymous memory of a process counts, not only its host tier. The processes are those with the same parent, the
    agent of a launcher; if they cannot be seen, the share is smaller, never larger.

    Args:
        root: directory of `/proc` and `/sys`; differs only in tests.
        environ: variables of the launcher.
    """
    free, num_processes = available_host_bytes(root), num_processes_of_node(environ)
    if num_processes == 1:
        return free
    held = _anonymous_bytes(root / "proc/self")
    return share_left(free, held, held + sum(map(_anonymous_bytes, _siblings(root))), num_processes)


def _siblings(root: Path) -> list[Path]:
    """Return the folders of the other processes with the same parent."""
    own, parent = _field(root / "proc/self", "Pid"), _field(root / "proc/self", "PPid")
    lists = (root / "proc" / str(parent) / "task").glob("*/children")  # each thread has its own
    children = {child for file in lists for child in _read(file).split()}
    return [root / "proc" / child for child in children - {str(own)}]


def _anonymous_bytes(process: Path) -> int:
    return _field(process, "RssAnon") * 1024


def _field(process: Path, name: str) -> int:
    """Return a number from the status of a process; 0 if it has ended."""
    found = re.search(rf"^{name}:\s*(\d+)", _read(process / "status"), re.MULTILINE)
    return int(found[1]) if found else 0


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # the process has ended, or the kernel was built without these lists
        return ""
