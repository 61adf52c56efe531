# SPDX-License-Identifier: Apache-2.0
"""Runs each contender in a process of its own, and writes each figure as soon as it is there."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil

from benchmarks.apart import Ended, run_apart
from benchmarks.flags import set_defaults
from benchmarks.records import Records, provenance
from benchmarks.tables import Record, show

from .longest import Search, predict
from .settings import CHECKPOINTED, ENVIRONMENT, OURS, engine_host_bytes, parse

_PACKAGES = ("torch", "transformers", "transformer-engine", "trl", "torchtune", "verl")
_START_S = 30.0  # for the model of a process
_SHORT_S = 60.0 + _START_S  # for the short steps that a prediction is made from


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    settings = parse(arguments)
    set_defaults(ENVIRONMENT)
    # The others pin through torch's allocator, by default with cudaHostAlloc at 2 GB/s: a turn of theirs would be over
    # before its first timed step. Registered by threads it takes a few seconds. Steps are not affected.
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        options = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
        if settings.longest:  # else fragmentation decides: tensors of a few GiB leave holes of that size
            options += ",expandable_segments:True"
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", options)
    from offload_engine._devices.host_memory import available_host_bytes

    from . import jobs

    all_host_bytes = min(psutil.virtual_memory().total, available_host_bytes())  # of the machine, or its container
    settings.host_bytes = int(0.8 * all_host_bytes)  # of a contender
    device = run_apart(jobs.describe_device, settings.device, seconds=120.0, host_bytes=all_host_bytes)
    if device.failure:
        print(f"no GPU: {device.failure}; --device cpu --tiny tries the program without one", file=sys.stderr)
        return 2
    return Run(settings, device.value).execute()


class Run:
    """One run: turns, or a search of the longest sequences, or the cost of recordings."""

    def __init__(self, settings: argparse.Namespace, device: Record) -> None:
        from tqdm import tqdm

        self._settings = settings
        self._begin = time.perf_counter()
        self._records = Records(settings.json)
        self._failed: set[str] = set()
        self._device = device
        self._bar = tqdm(unit="process")

    def execute(self) -> int:
        """Run the benchmark; return the exit status."""
        from . import jobs
        from .report import plot_trade, tables

        settings = self._settings
        plain = {k: v for k, v in vars(settings).items() if isinstance(v, (int, float, str, tuple, dict))}
        run = {"kind": "run", **provenance(_PACKAGES), **plain, "shape": vars(settings.shape), **self._device}
        self._records.write([run])
        if settings.longest:
            self._search_longest()
        elif settings.recording:
            found = self._apart("recording", 600.0, jobs.measure_recording, settings)
            self._records.write(found.value or [])
        else:
            self._measure()
        self._bar.close()
        self._records.write([{"kind": "end", "seconds": time.perf_counter() - self._begin}])
        if settings.plot:
            plot_trade(self._records, settings.plot)
        show(*tables(self._title(), self._records, settings.markdown))
        return 1 if self._failed & OURS else 0

    def _apart(self, name: str, seconds: float, *work: Any) -> Ended:
        """Run in a process of its own."""
        self._bar.set_description(name)
        ended = run_apart(*work, seconds=seconds, host_bytes=self._settings.host_bytes)
        self._bar.update()
        if ended.failure:
            self._bar.write(f"{name}: {ended.failure}", file=sys.stderr)
            self._failed.add(name)
        return ended

    # ---- step time and memory ----

    def _measure(self) -> None:
        from .report import summarize

        reference = None
        for number in range(self._settings.rounds):
            for name in self._settings.contenders:
                if name not in self._failed:
                    reference = self._turn(name, number, reference)
        self._records.write(summarize(self._records))

    def _turn(self, name: str, number: int, reference: Any) -> Any:
        """Run one turn; return what others are compared with, of the first turn without offload."""
        from benchmarks.gradients import compare

        from . import jobs

        seconds = self._settings.contender_seconds / self._settings.rounds + _START_S
        ended = self._apart(name, seconds, jobs.take_turn, self._settings, name)
        found = ended.value or {"step_ms": []}
        own = found.pop("fingerprint", None)
        is_reference = reference is None and name == "none"
        reference = own if is_reference else reference
        parity = {}
        if own is not None and reference is not None:
            parity = {**compare(reference, own).as_record(), "is_reference": is_reference}
        about = {"kind": "turn", "label": name, "round": number, "failure": ended.failure, "seconds": ended.seconds}
        self._records.write([{**about, "parity": parity, **found}])
        return reference

    # ---- the longest sequence ----

    def _search_longest(self) -> None:
        # What matters most comes first: those at the end have what time is left.
        end = self._begin + self._settings.total_seconds
        for name in sorted(
            self._settings.contenders, key=lambda name: (name != "none", name not in CHECKPOINTED, name not in OURS)
        ):
            self._longest(name, min(end, time.perf_counter() + self._settings.contender_seconds))

    def _longest(self, name: str, deadline: float) -> None:
        """Search the longest of one contender; a trial ends at the deadline, and says nothing then."""
        from . import jobs

        settings, begin, unit = self._settings, time.perf_counter(), self._settings.longest_unit
        record: Record = {"kind": "longest", "label": name, "trained": 0, "failed": None, "is_final": False}
        record |= {"guess": None, "num_trials": 0, "peak_reserved_bytes": 0, "host_bytes": 0, "reason": None}
        ended = self._apart(name, _SHORT_S, jobs.try_lengths, settings, name, (unit, unit, 2 * unit))
        if ended.failure:
            self._records.write([{**record, "reason": ended.failure, "seconds": ended.seconds}])
            return
        _, one, other = ended.value  # kernels are selected in the first
        host_bytes = engine_host_bytes(settings) if name in OURS else settings.host_bytes
        search = Search(predict(one, other, self._device["free_bytes"], host_bytes, name in OURS), unit)
        record["guess"] = search.next_seq
        best, reason = one, None
        while not search.is_final:
            seq, seconds = search.next_seq, deadline - time.perf_counter()
            if seconds < 0:
                reason = "there was no time left for it"
                break
            ended = self._apart(f"{name}, {seq:,} tokens", seconds, jobs.try_lengths, settings, name, (seq,))
            record["num_trials"] += 1
            reason = ended.failure or reason
            if ended.is_over_time:
                break
            best = ended.value[0] if ended.value else best
            search.note(ended.failure is None)
        record |= {"trained": search.trained, "failed": search.failed, "is_final": search.is_final, "reason": reason}
        record |= {"peak_reserved_bytes": best.peak_reserved_bytes, "host_bytes": best.host_bytes}
        self._records.write([{**record, "seconds": time.perf_counter() - begin}])

    def _title(self) -> str:
        shape = self._settings.shape
        length = "" if self._settings.longest or self._settings.recording else f", {shape.seq:,} tokens"
        if self._settings.documents:
            length += f", attention within documents of {self._settings.documents:,}"
        return f"{shape.layers} layers of hidden {shape.hidden}{length}, {self._device['device_name']}"
