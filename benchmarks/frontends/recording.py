# SPDX-License-Identifier: Apache-2.0
"""What it costs to record steps: runs of `enable_activation_offloading` with no step recorded, each one, or one.

Between the steps of a run nothing waits for the device, so that a host that is late shows in the step behind. A step
takes from its first kernel to that of the next one.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from offload_engine import enable_activation_offloading

from .contenders import Ours
from .workload import Attached, Workload

LENGTHS = (4096, 8192, 16384)
_NUM_STEPS = 6
_RECORDED = 2  # of a run where one is: the first step after a pause is not like the others


def measure(workload: Workload, ours: Ours, lengths: tuple[int, ...], rounds: int) -> Iterator[dict[str, Any]]:
    """Run all kinds in turn, `rounds` times for each length; give a record for each length and part."""
    for seq in lengths:
        workload.set_length(seq)
        found: dict[str, list[float]] = {}
        handle = enable_activation_offloading(workload.model, "none", config=ours.config)
        try:
            _run(workload, handle)  # allocates host memory
            for _ in range(rounds):
                _take_turns(workload, handle, found)
        finally:
            handle.remove()
        plain = statistics.median(found["no step recorded"])
        for part, times in found.items():
            median = statistics.median(times)
            figures = {"step_ms": times, "step_ms_median": median, "added_ms": median - plain, "ratio": median / plain}
            yield {"kind": "recording", "seq": seq, "part": part, **figures}


def _take_turns(workload: Workload, handle: Any, found: dict[str, list[float]]) -> None:
    def note(part: str, times: Sequence[float]) -> None:
        found.setdefault(part, []).extend(times)

    note("no step recorded", _run(workload, handle)[1:])
    note("each step recorded", _run(workload, handle, range(_NUM_STEPS))[1:])
    with TemporaryDirectory() as folder:
        times = _run(workload, handle, [_RECORDED], Path(folder) / "step.json.gz")
        for thread in threading.enumerate():  # the next run begins when the file is written
            if thread.name == "offload-trace":
                thread.join()
    note("one step recorded, with a file", times[_RECORDED : _RECORDED + 1])
    note("the step behind it", times[_RECORDED + 1 : _RECORDED + 2])


def _run(workload: Workload, handle: Any, recorded: Sequence[int] = (), file: Path | None = None) -> list[float]:
    """Return the milliseconds of each step."""
    workload.wait()
    stamps = [workload.stamp()]
    for number in range(_NUM_STEPS):
        if number in recorded:
            handle.record(file)
        workload.step(Attached())
        stamps.append(workload.stamp())
    workload.wait()
    return [begin.elapsed_time(end) for begin, end in zip(stamps, stamps[1:], strict=False)]
