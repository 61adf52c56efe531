# SPDX-License-Identifier: Apache-2.0
"""The recorder and who asks for it: a toy sequence of calls becomes the record of it, which is kept or written."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from offload_engine import IterationStats
from offload_engine._observe import observer as observer_module
from offload_engine._observe import pace
from offload_engine._observe.chrome_trace import read_records
from offload_engine._observe.modules import ModuleHooks
from offload_engine._observe.observer import Observer
from offload_engine._observe.reasons import Reason
from offload_engine._observe.record import Awaited, StageRecord
from offload_engine._observe.recorder import Recorder
from offload_engine._observe.report import report_table, summary_of_stats
from offload_engine._saved.storage import Residency
from offload_engine.planning.clocks import Link
from offload_engine.planning.moves import BACKWARD, COMMIT, DROP, FORWARD, IN, ITERATION_END, OUT
from offload_engine.schedule import ChunkKey
from tests.engine_on_clocks import KIB, ClockDevice

CHUNK = ChunkKey(0, 3)
MS_OF_COPY = 10 * 1.048576  # 10 "MiB" at 1 GB/s
STATS = IterationStats(num_groups=2, num_offloaded_groups=1, prefetch_misses=3)


class Group:
    """What the engine's groups have, as far as a recorder looks."""

    index, name, layer, own_bytes, chunk = 0, "core_attn", 0, 10 * KIB, CHUNK
    is_kept = is_ungrouped = False


GROUP, OUTSIDE = Group(), Group()
OUTSIDE.is_ungrouped = True


class Storage:
    group, nbytes, stream = GROUP, 10 * KIB, "compute"

    def __init__(self) -> None:
        self.tensor = torch.zeros(10, 256)


class Step:
    """Makes an engine's calls on a device of clocks."""

    def __init__(self, **options: Any) -> None:
        self.device = ClockDevice(Link(out_gbps=1.0, in_gbps=1.0))
        self.streams = {op: self.device.new_stream(name) for op, name in ((OUT, "copy_out"), (IN, "copy_in"))}
        self.recorder = Recorder(self.device, clock=lambda: round(self.device.clocks.now.host * 1e6), **options)

    def save(self) -> Storage:
        storage = Storage()
        self.recorder.note_saved(storage.tensor, GROUP, storage=storage)
        return storage

    def copy(self, op: Any, awaited: Awaited, *storages: Storage) -> None:
        """Copy storages, and have compute wait for that."""
        stream, nbytes = self.streams[op], sum(s.nbytes for s in storages)
        self.device.wait_event(stream, self.device.record_event("compute"))
        begin = self.recorder.mark(stream)
        self.device.copy(stream, nbytes)
        self.recorder.note_copy(op, GROUP, nbytes, begin, self.recorder.mark(stream))
        self.note(Residency.COPYING_OUT if op is OUT else Residency.COPYING_IN, *storages)
        self.recorder.note_move(op, GROUP, nbytes)
        begin = self.recorder.mark("compute")
        self.device.wait_event("compute", self.device.record_event(stream))
        self.recorder.note_wait(awaited, GROUP, begin, self.recorder.mark("compute"))

    def note(self, residency: Residency, *storages: Storage) -> None:
        for storage in storages:
            self.recorder.note_residency(storage, residency)


@pytest.fixture
def step() -> Iterator[Step]:
    made = Step()
    yield made
    made.recorder.close()


def test_a_group_lives_through_its_stages_at_the_times_of_the_device(step: Step) -> None:
    """Saved, 5 ms of compute, out, released at its end, 7 ms on host, in, used for 3 ms."""
    recorder, device = step.recorder, step.device
    recorder.note_boundary(FORWARD, CHUNK)
    storages = [step.save(), step.save()]
    device.compute(5.0)
    recorder.note_boundary(COMMIT, CHUNK, GROUP)
    step.copy(OUT, Awaited.COPY_OUT, *storages)
    step.note(Residency.ON_HOST, *storages)
    recorder.note_move(DROP, GROUP, 20 * KIB)
    device.compute(7.0)
    recorder.note_boundary(BACKWARD, CHUNK, GROUP)
    step.copy(IN, Awaited.COPY_IN, *storages)
    step.note(Residency.RESIDENT, *storages)
    device.compute(3.0)
    for storage in storages:
        step.note(Residency.RETIRED, storage)
        device.compute(1.0)
    recorder.note_boundary(ITERATION_END, None)
    record, copy = recorder.finish().get(), 2 * MS_OF_COPY
    moments = (0.0, 5.0, 5 + copy, 12 + copy, 12 + 2 * copy, 16 + 2 * copy)  # used until the second of two retires
    residencies = ("packed", "copying out", "on host", "copying in", "used")
    assert [(s.group, s.residency) for s in record.stages] == [("0.3:0", residency) for residency in residencies]
    for stage, begin, end in zip(record.stages, moments, moments[1:], strict=False):
        assert (stage.begin_ms, stage.end_ms) == pytest.approx((begin, end))
    assert record.duration_ms == pytest.approx(17 + 2 * copy)


def test_it_keeps_no_tensor_and_no_storage_that_retired(step: Step) -> None:
    storage = step.save()
    tensor, gone = weakref.ref(storage.tensor), weakref.ref(storage)
    step.note(Residency.RETIRED, storage)
    del storage
    gc.collect()
    assert tensor() is None and gone() is None


def test_what_crosses_the_edges_of_the_step(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors saved before the recording are skipped, those that outlive it end with it; a fork has no record of it."""
    step.note(Residency.COPYING_OUT, Storage())
    step.recorder.note_storage_stays(Storage(), Reason.SHARED)
    step.save()
    step.device.compute(4.0)
    pending = step.recorder.finish()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=r"recorded in process \d+: read its record"):
        patch.setattr(os, "getpid", lambda: 1)
        pending.get()
    record = pending.get()
    assert record.stages == (StageRecord("0.3:0", "packed", 0.0, 4.0),) and len(record.saved) == 1


def test_a_record_names_the_memory_of_its_gpu(step: Step) -> None:
    step.device.memory = SimpleNamespace(total_bytes=lambda: 40 << 30)
    assert step.recorder.finish().get().device_bytes == 40 << 30


class Saving(torch.nn.Module):
    """Runs its parts, and saves what comes out outside of all groups."""

    def __init__(self, recorder: Recorder, *parts: torch.nn.Module) -> None:
        super().__init__()
        self.recorder, self.parts = recorder, torch.nn.ModuleList(parts)

    def forward(self, x: torch.Tensor, error: type[BaseException] | None = None) -> None:
        for part in self.parts:
            part(x)
        if self.parts and error is not None:
            with suppress(error):
                self.parts[0](x, error)
        self.recorder.note_saved(x, OUTSIDE, reason=Reason.WEIGHT)
        if not self.parts and error is not None:
            raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])  # behind an interrupt no hook is called
def test_a_tensor_outside_groups_has_the_name_of_the_innermost_module(error: type[BaseException]) -> None:
    recorder = Step(modules=ModuleHooks()).recorder
    model = Saving(recorder, Saving(recorder), Saving(recorder))
    model(torch.zeros(3), error)
    recorder.note_saved(torch.zeros(3), OUTSIDE, reason=Reason.WEIGHT)
    names = [saved.module for saved in recorder.finish().get().saved]
    assert names == ["parts.0", "parts.1", "parts.0", "Saving" if error is ValueError else "parts.0", ""]


def run(observer: Observer, device: Any = None) -> bool:
    """Run one step of one saved tensor; return whether it was recorded."""
    recorder = observer.begin(device or ClockDevice(), is_dry_run=False)
    if recorder is not None:
        storage = Storage()
        recorder.note_saved(storage.tensor, storage.group, storage=storage)
    observer.end(recorder, STATS)
    return recorder is not None


def test_only_the_step_that_was_asked_for_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And who asks for its record does not wait for the rests of the thread."""
    observer = Observer()
    monkeypatch.setattr(pace, "_REST_S", 1000.0)
    assert (run(observer), observer.record) == (False, None) and observer.report(STATS) == summary_of_stats(STATS)
    observer.ask()
    assert run(observer) and not run(observer)
    assert observer.record is not None and observer.report(STATS) == report_table([observer.record])
    assert (observer.record.step, observer.record.counts["prefetch_misses"]) == (1, 3)


@pytest.mark.parametrize(
    ("num_ranks", "asked", "written"),
    [
        (1, "of_{rank}_{step}.json.gz", "of_1_0.json.gz"),
        (2, "own_{rank}.json", "own_1.json"),
        (2, "step.json.gz", "step_rank1.json.gz"),  # ranks do not write one file
    ],
)
def test_the_file_has_the_numbers_in_its_name(
    num_ranks: int, asked: str, written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    observer = Observer()
    monkeypatch.setattr(observer_module, "_num_ranks", lambda: num_ranks)
    monkeypatch.setattr(observer_module, "_rank", lambda: 1)
    observer.ask(tmp_path / asked)
    run(observer)
    observer.close()
    assert read_records(tmp_path / written) == [observer.record]


class Late(ClockDevice):
    """Comes to the end of a step when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.is_there = threading.Event()

    def milliseconds_between(self, first: Any, last: Any) -> float:
        assert self.is_there.wait(10.0)
        return super().milliseconds_between(first, last)


def test_a_file_is_written_beside_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread does not keep an observer that is dropped; without one the step writes the file itself."""
    observer, device, file = Observer(), Late(), tmp_path / "step.json"
    observer.ask(file)
    recorder = observer.begin(device)
    observer.ask(tmp_path / "next.json")  # is for the step behind
    observer.end(recorder, STATS)
    assert not file.exists()
    device.is_there.set()
    observer.close()
    assert len(read_records(file)) == 1
    run(observer)
    gone = weakref.ref(observer)
    del observer
    assert gone() is None
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
    (observer := Observer()).ask(tmp_path / "without.json")
    run(observer)
    assert len(read_records(tmp_path / "without.json")) == 1
    observer.close()


def test_a_file_that_cannot_be_written_is_logged_with_its_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    observer, file = Observer(), tmp_path / "missing" / "step.json"
    observer.ask(file)
    run(observer)
    observer.close()
    assert f"could not be written to {file}" in caplog.text
    assert observer.record is not None, "there is a report all the same"
    observer.ask()
    assert run(observer)
