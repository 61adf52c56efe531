# SPDX-License-Identifier: Apache-2.0
"""More ranks than GPUs: those of one GPU pose to NCCL as ranks of several hosts."""

from __future__ import annotations

import os

import torch


def gpu_of(rank: int) -> torch.device:
    """Return the GPU of a rank of this node; with fewer GPUs than ranks, several ranks share it.

    NCCL refuses two ranks of one host on one GPU ("Duplicate GPU detected"), and lets NCCL_HOSTID say what a host is.
    Ranks of different hosts meet through sockets: what they compute is the same, how long it takes says nothing.

    Call it in the process of that rank, before its first communicator.
    """
    host, index = divmod(rank, torch.cuda.device_count())
    os.environ.update(NCCL_HOSTID=f"host {host}", NCCL_SOCKET_IFNAME="lo")
    return torch.device("cuda", index)
