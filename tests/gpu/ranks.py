# SPDX-License-Identifier: Apache-2.0
"""Ranks on GPUs, joined over NCCL. They stay for many tests, because they import TransformerEngine for long."""

from __future__ import annotations

import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from tests.dist.launch import Outcome, Pipeline, collect, set_up_parallel_state
from tests.gpu.parity import CUBLAS_WORKSPACE

TIMEOUT_S = 150.0
_ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": CUBLAS_WORKSPACE,
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "MAMBA_DETERMINISTIC": "1",  # read at import: else its kernels' block sizes are those that were fastest this time
    "NCCL_ALGO": "Ring",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # the all-to-all overlap refuses one
    # Each shape leaves twenty communicators behind, and eight ranks of one GPU would fill it with their buffers.
    "NCCL_BUFFSIZE": str(1 << 18),
    "NCCL_MAX_NCHANNELS": "2",
    "GLOO_SOCKET_IFNAME": "lo",
}


class GpuRanks:
    """Owns the processes; `run` starts them when it needs them, and again after one has failed."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks: int = num_ranks
        self._ranks: list[tuple[Any, Connection]] = []
        self._directory: tempfile.TemporaryDirectory[str] | None = None  # where they meet

    def run(self, fn: Callable[..., Any], *args: Any, shape: Pipeline = Pipeline()) -> list[Any]:  # noqa: B008
        """Run `fn(*args)` on every rank; return the results in their order.

        Args:
            fn: a function at module level (it is pickled).
            args: for `fn`; pickled.
            shape: of the parallel state; what it leaves over is data parallel.

        Raises:
            RankFailed: if a rank raises, dies, or does not finish in time.
        """
        if not self._ranks:
            self._start()
        for _, connection in self._ranks:
            connection.send((shape, fn, args))
        try:
            return collect([connection for _, connection in self._ranks], TIMEOUT_S)
        except BaseException:
            self.close()  # those that did not fail may be waiting for the one that did
            raise

    def close(self) -> None:
        """End the processes. Idempotent."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks = []
        if self._directory is not None:
            self._directory.cleanup()

    def _start(self) -> None:
        context = get_context("spawn")
        self._directory = tempfile.TemporaryDirectory()
        store = f"file://{self._directory.name}/store"
        for rank in range(self.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.num_ranks, store), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))


def require_libraries() -> None:
    """Skip the test where one is missing."""
    for package, name in (("megatron", "megatron-core"), ("transformer_engine", "TransformerEngine")):
        if find_spec(package) is None:
            pytest.skip(f"needs {name}, which is not installed")


def _serve(connection: Connection, rank: int, num_ranks: int, store: str) -> None:
    os.environ.update(_ENVIRONMENT, RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank))
    device = gpu_of(rank)
    torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl", store, timedelta(seconds=TIMEOUT_S), num_ranks, rank, device_id=device)
    last: Pipeline | None = None
    while True:
        shape, fn, args = connection.recv()
        connection.send(tuple(_outcome(shape, last, fn, args)))
        last = shape


def _outcome(shape: Pipeline, last: Pipeline | None, fn: Callable[..., Any], args: tuple[Any, ...]) -> Outcome:
    try:
        _set_up(shape, last)
        return Outcome(result=fn(*args))
    except BaseException:
        return Outcome(error=traceback.format_exc())


def _set_up(shape: Pipeline, last: Pipeline | None) -> None:
    """Of the same shape, groups stay: each set leaves 20 communicators behind, and NCCL makes no more than some 470."""
    from megatron.core import parallel_state

    if shape == last:
        return
    if last is not None:
        parallel_state.destroy_model_parallel()
    set_up_parallel_state(shape)


def gpu_of(rank: int) -> torch.device:
    """Return the GPU of a rank of this node; with fewer GPUs than ranks, several ranks share it.

    NCCL refuses two ranks of one host on one GPU ("Duplicate GPU detected"), and lets NCCL_HOSTID say what a host is.
    Ranks of different hosts meet through sockets: what they compute is the same, how long it takes says nothing.

    Call it in the process of that rank, before its first communicator.
    """
    host, index = divmod(rank, torch.cuda.device_count())
    os.environ.update(NCCL_HOSTID=f"host {host}", NCCL_SOCKET_IFNAME="lo")
    return torch.device("cuda", index)
