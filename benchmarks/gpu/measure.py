# SPDX-License-Identifier: Apache-2.0
"""One turn of one contender: warm-up, one counted step, timed steps, and what they left behind."""

from __future__ import annotations

import contextlib
import gc
import io
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gradients import Fingerprint, compare, fingerprint

from .contenders import Contender
from .copies import CopyCounter
from .machine import empty_caches
from .model import Ranks

_MAX_WARMUP = 40


class CudaGauge:
    """Device memory from torch's allocators, host memory from the system."""

    def __init__(self) -> None:
        self._at_start: dict[str, int] = {}

    def wait(self) -> None:
        torch.cuda.synchronize()

    def start(self, *, keeps_cache: bool = False) -> None:
        """Free unreferenced memory, unless the allocator is to keep its cache, and reset the peaks."""
        self.wait()
        gc.collect()
        if not keeps_cache:
            torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._at_start = self._counters()

    def read(self) -> dict[str, int]:
        import psutil

        free, total = torch.cuda.mem_get_info()
        return {
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
            "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            "torch_pinned_bytes": int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)),
            "outside_bytes": total - free - torch.cuda.memory_reserved(),  # the CUDA context first of all
            "host_rss_bytes": psutil.Process().memory_info().rss,
            **{name: value - self._at_start.get(name, 0) for name, value in self._counters().items()},
        }

    def release(self) -> None:
        """Free all memory that a contender left behind, pinned memory too."""
        self.wait()
        gc.collect()
        empty_caches()

    def _counters(self) -> dict[str, int]:
        stats = torch.cuda.memory_stats()
        return {"alloc_retries": stats.get("num_alloc_retries", 0), "device_allocs": stats.get("num_device_alloc", 0)}


class Bench:
    """Runs turns, and remembers the losses and gradients of each."""

    def __init__(
        self,
        training: Any,
        ranks: Ranks,
        gauge: Any,
        warmup: int,
        iters: int,
        on_step: Callable[[str], None],
        new_event: Callable[[], Any] | None = None,
    ) -> None:
        """`on_step` is told what comes next, for the progress bar; `new_event` makes the events that time copies."""
        self.training = training
        self._ranks = ranks
        self._gauge = gauge
        self._warmup, self._iters = warmup, iters
        self._on_step = on_step
        self._new_event = new_event
        self._fingerprints: list[tuple[str, int, Fingerprint]] = []

    def turn(self, contender: Contender, round_number: int) -> dict[str, Any]:
        """Run one turn; return this rank's record."""
        label = contender.entry.label
        self._gauge.release()
        pinned_before = self._gauge.read()["torch_pinned_bytes"]
        try:
            contender.attach()
            before = self._warm_up(contender)
            self._gauge.start(keeps_cache=contender.entry.kind == "budget")  # it has trimmed what it found
            counter = CopyCounter(self._new_event)
            with contender.counting(counter):
                self._run(f"{label}, counted")
                self._gauge.wait()
            moved = contender.moved(counter)
            step_ms, host_ms, losses = timed_steps(
                self._iters, self.training.step, self._gauge.wait, lambda: self._prepare(label)
            )
            memory = self._gauge.read()
            pinned = contender.pinned_bytes(memory["torch_pinned_bytes"], pinned_before)
            after = fingerprint(self.training.gradients(), losses)
            details = contender.details()
        finally:
            contender.detach()
            self._gauge.release()
        self._fingerprints.append((label, round_number, after))
        entry = contender.entry
        return {
            **{"kind": "turn", "contender": entry.contender, "label": label, "modules": list(entry.modules)},
            **{"round": round_number, "rank": self._ranks.rank, "pinned_bytes": pinned},
            **{"step_ms": step_ms, "host_ms": host_ms},
            **memory,
            **moved,
            "losses": [float.fromhex(loss) for loss in after.losses],
            "gradients": after.digests,
            "between_steps": compare(before, after).as_record(),
            **details,
        }

    def parity(self) -> list[dict[str, Any]]:
        """Compare every turn so far with the first without offload (else the first of all): this rank's records.

        The other turns without offload show the spread of the model itself.
        """
        if not self._fingerprints:
            return []
        label, number, reference = min(self._fingerprints, key=lambda turn: (turn[0] != "none", turn[1]))
        shared = {"kind": "parity", "rank": self._ranks.rank, "reference": f"{label}, round {number}"}
        return [
            {
                **{**shared, "label": label, "round": number, "is_reference": own is reference},
                **compare(reference, own).as_record(),
            }
            for label, number, own in self._fingerprints
        ]

    def _warm_up(self, contender: Contender) -> Fingerprint:
        losses: list[torch.Tensor] = []
        is_ready = False
        with contextlib.redirect_stdout(io.StringIO()):  # the incumbent prints a table after its first step
            for number in range(_MAX_WARMUP):
                if is_ready and number >= self._warmup:
                    break
                losses = self._run(f"{contender.entry.label}, warm-up")
                is_ready = all(self._ranks.gather(contender.is_ready()))  # each step takes all ranks
        return fingerprint(self.training.gradients(), losses)

    def _prepare(self, label: str) -> None:
        self._on_step(label)
        self._ranks.barrier()

    def _run(self, label: str) -> list[torch.Tensor]:
        self._prepare(label)
        return list(self.training.step())


def timed_steps(
    num: int, step: Callable[[], list[Any]], wait: Callable[[], None], before: Callable[[], None] = lambda: None
) -> tuple[list[float], list[float], list[Any]]:
    """Return the milliseconds of steps until the device is done, those until the host has issued them, and losses.

    What is done `before` each step is not timed.
    """
    done_ms, issued_ms, losses = [], [], []
    for _ in range(num):
        before()
        wait()
        begin = time.perf_counter()
        losses = step()
        issued = time.perf_counter()
        wait()
        done_ms.append((time.perf_counter() - begin) * 1e3)
        issued_ms.append((issued - begin) * 1e3)
    return done_ms, issued_ms, losses
