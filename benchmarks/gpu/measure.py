# SPDX-License-Identifier: Apache-2.0
"""One turn of one contender: warm-up, one counted step, timed steps, and what they left behind."""

from __future__ import annotations

import contextlib
import gc
import io
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

from benchmarks.gradients import Fingerprint, compare, fingerprint

from .contenders import Contender
from .copies import CopyCounter
from .machine import empty_caches
from .model import Ranks

_MAX_WARMUP = 40


class Bench:
    """Runs turns, and remembers the losses and gradients of each."""

    def __init__(self, training: Any, ranks: Ranks, warmup: int, iters: int, on_step: Callable[[str], None]) -> None:
        """`on_step` is told what comes next, for the progress bar."""
        self.training = training
        self._ranks = ranks
        self._warmup, self._iters = warmup, iters
        self._on_step = on_step
        self._fingerprints: list[tuple[str, int, Fingerprint]] = []

    def turn(self, contender: Contender, round_number: int) -> dict[str, Any]:
        """Run one turn; return this rank's record."""
        entry = contender.entry
        self._release()
        pinned_before = _pinned_bytes()
        try:
            contender.attach()
            self._warm_up(contender)
            gc.collect()
            if entry.kind != "budget":  # that has trimmed the cache that it found
                torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            counter = CopyCounter()
            with contender.counting(counter):
                self._run(f"{entry.label}, counted")
                torch.cuda.synchronize()
            moved = contender.moved(counter)
            step_ms, host_ms, losses = timed_steps(self._iters, self.training.step, lambda: self._prepare(entry.label))
            memory = _memory()
            pinned = contender.pinned_bytes(memory["torch_pinned_bytes"], pinned_before)
            found = fingerprint(self.training.gradients(), losses)
            details = contender.details()
        finally:
            contender.detach()
            self._release()
        self._fingerprints.append((entry.label, round_number, found))
        return {
            **{"kind": "turn", "contender": entry.contender, "label": entry.label, "modules": list(entry.modules)},
            **{"round": round_number, "rank": self._ranks.rank, "pinned_bytes": pinned},
            **{"step_ms": step_ms, "host_ms": host_ms},
            **memory,
            **moved,
            "losses": [float.fromhex(loss) for loss in found.losses],
            **details,
        }

    def parity(self) -> list[dict[str, Any]]:
        """Compare each turn with the first without offload, else the first of all; others of these show the spread."""
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

    def _warm_up(self, contender: Contender) -> None:
        is_ready = False
        with contextlib.redirect_stdout(io.StringIO()):  # the incumbent prints a table after its first step
            for number in range(_MAX_WARMUP):
                if is_ready and number >= self._warmup:
                    break
                self._run(f"{contender.entry.label}, warm-up")
                is_ready = all(self._ranks.gather(contender.is_ready()))  # each step takes all ranks
        torch.cuda.synchronize()

    def _release(self) -> None:
        """Free all memory that a contender left behind, pinned memory too."""
        torch.cuda.synchronize()
        self.training.release()
        gc.collect()
        empty_caches()

    def _prepare(self, label: str) -> None:
        self._on_step(label)
        self._ranks.barrier()

    def _run(self, label: str) -> None:
        self._prepare(label)
        self.training.step()


def timed_steps(
    num: int, step: Callable[[], list[Any]], before: Callable[[], None] = lambda: None
) -> tuple[list[float], list[float], list[Any]]:
    """Return the milliseconds of steps until the device is done, those until the host has issued them, and losses.

    What is done `before` each step is not timed.
    """
    done_ms, issued_ms, losses = [], [], []
    for _ in range(num):
        before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        losses = step()
        issued = time.perf_counter()
        torch.cuda.synchronize()
        done_ms.append((time.perf_counter() - begin) * 1e3)
        issued_ms.append((issued - begin) * 1e3)
    return done_ms, issued_ms, losses


def _memory() -> dict[str, int]:
    """Return device memory by torch's allocator, of the timed steps and the counted one, and host memory now."""
    free, total = torch.cuda.mem_get_info()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "torch_pinned_bytes": _pinned_bytes(),
        "outside_bytes": total - free - torch.cuda.memory_reserved(),  # the CUDA context first of all
        "host_rss_bytes": psutil.Process().memory_info().rss,
    }


def _pinned_bytes() -> int:
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
