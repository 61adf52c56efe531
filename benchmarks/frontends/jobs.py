# SPDX-License-Identifier: Apache-2.0
"""What is measured of one contender, each in a process of its own: it builds the model, and leaves nothing behind."""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch

from benchmarks.gradients import fingerprint
from benchmarks.records import counters_of
from offload_engine import OffloadConfig

from . import recording
from .contenders import Ours, make_contender
from .longest import Trial
from .settings import engine_host_bytes
from .workload import Workload


def take_turn(settings: Namespace, name: str) -> dict[str, Any]:
    """Run warm-up steps, the first of them to be compared bit by bit, and timed steps."""
    workload = _workload(settings)
    with make_contender(name, _ours(settings), settings.rivals)(workload) as attached:
        with deterministic():
            loss = workload.step(attached)
        found = fingerprint(workload.gradients(), [loss])
        for _ in range(settings.warmup):
            workload.step(attached)
        workload.wait()
        _reset_peaks(workload)
        return {
            "fingerprint": found,
            "step_ms": [workload.timed_step(attached) for _ in range(settings.iters)],
            **_memory(workload),
            "engine": {} if attached.stats() is None else counters_of(attached.stats()),
        }


def try_lengths(settings: Namespace, name: str, lengths: tuple[int, ...]) -> list[Trial]:
    """Run one step of each length, with gradients there from the start.

    They, and not what the step before left in the allocator's cache (which it gives up when memory is short), are what
    a second step would find besides.
    """
    workload = _workload(settings)
    workload.make_gradients()
    found = []
    for seq in lengths:
        workload.set_length(seq)
        with make_contender(name, _ours(settings), settings.rivals)(workload) as attached:
            _reset_peaks(workload)
            workload.step(attached)
            workload.wait()
            memory, stats = _memory(workload), attached.stats()
        host_bytes = memory["torch_pinned_bytes"] + (0 if stats is None else int(stats.host_bytes))
        peaks = memory["peak_allocated_bytes"], memory["peak_reserved_bytes"]
        found.append(Trial(seq, *peaks, host_bytes))
    return found


def measure_recording(settings: Namespace) -> list[dict[str, Any]]:
    """Measure what it costs to record steps."""
    lengths = (settings.seq,) if settings.seq else recording.LENGTHS
    return list(recording.measure(_workload(settings), _ours(settings), lengths, settings.rounds))


def describe_device(device: str) -> dict[str, Any]:
    """Return the name of the device, and the bytes that an allocator finds free on it."""
    if device == "cpu":
        return {"device_name": "CPU", "free_bytes": None}
    return {"device_name": torch.cuda.get_device_name(), "free_bytes": torch.cuda.mem_get_info()[0]}


def _workload(settings: Namespace) -> Workload:
    torch.set_num_threads(1 if settings.device == "cpu" else torch.get_num_threads())
    return Workload(settings.shape, settings.device, settings.documents)


def _ours(settings: Namespace) -> Ours:
    config = OffloadConfig(host_limit_bytes=engine_host_bytes(settings))
    if settings.tiny:
        config = config.replace(min_tensor_bytes=0)
    # The least on the device trains the longest sequence.
    return Ours(config, settings.group_bytes, horizon=1 if settings.longest else None)


def _reset_peaks(workload: Workload) -> None:
    if workload.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_peak_host_memory_stats()


def _memory(workload: Workload) -> dict[str, int]:
    memory = {"host_rss_bytes": int(psutil.Process().memory_info().rss)}
    if not workload.is_cuda:  # there is nothing that would tell peaks of the device
        return memory | dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes", "torch_pinned_bytes"), 0)
    return memory | {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        # By what is pinned, in use or not: a block is free again as soon as it is given back.
        "torch_pinned_bytes": int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0)),
    }


@contextmanager
def deterministic() -> Iterator[None]:
    """Use kernels whose result does not depend on the order of atomic additions, to be compared bitwise.

    Raises:
        RuntimeError: in an operator that has none, or without `settings.ENVIRONMENT`.
    """
    # Costs time, and changes nothing that is read.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)  # attention is not deterministic where it only warns
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(False)
