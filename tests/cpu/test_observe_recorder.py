# SPDX-License-Identifier: Apache-2.0
"""The recorder and who asks for it: a toy sequence of calls becomes the record of it, which is kept or written."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
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


@dataclass(eq=False)
class Group:
    """What the engine's groups have, as far as a recorder looks."""

    index: int = 0
    name: str = "core_attn"
    layer: int = 0
    is_kept: bool = False
    is_ungrouped: bool = False
    own_bytes: int = 10 * KIB
    chunk: ChunkKey = CHUNK


@dataclass(eq=False)
class Storage:
    """One saved storage."""

    group: Group = field(default_factory=Group)
    nbytes: int = 10 * KIB
    stream: str = "compute"
    tensor: torch.Tensor = field(default_factory=lambda: torch.zeros(10, 256, dtype=torch.float32))


class Step:
    """Makes an engine's calls on a device of clocks."""

    def __init__(self, **options: Any) -> None:
        self.device = ClockDevice(Link(out_gbps=1.0, in_gbps=1.0))
        self.streams = {op: self.device.new_stream(name) for op, name in ((OUT, "copy_out"), (IN, "copy_in"))}
        self.recorder = Recorder(self.device, clock=lambda: round(self.device.clocks.now.host * 1e6), **options)

    def save(self, group: Group) -> Storage:
        storage = Storage(group)
        self.recorder.note_saved(storage.tensor, group, storage=storage)
        return storage

    def copy(self, op: Any, group: Group, *storages: Storage) -> Any:
        stream = self.streams[op]
        self.device.wait_event(stream, self.device.record_event("compute"))
        begin = self.recorder.mark(stream)
        nbytes = sum(s.nbytes for s in storages)
        self.device.copy(stream, nbytes)
        self.recorder.note_copy(op, group, nbytes, begin, self.recorder.mark(stream))
        self.note(Residency.COPYING_OUT if op is OUT else Residency.COPYING_IN, *storages)
        self.recorder.note_move(op, group, nbytes)
        return self.device.record_event(stream)

    def wait(self, awaited: Awaited, group: Group, event: Any) -> None:
        begin = self.recorder.mark("compute")
        self.device.wait_event("compute", event)
        self.recorder.note_wait(awaited, group, begin, self.recorder.mark("compute"))

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
    recorder, device, group = step.recorder, step.device, Group()
    recorder.note_boundary(FORWARD, CHUNK)
    storages = [step.save(group), step.save(group)]
    device.compute(5.0)
    recorder.note_boundary(COMMIT, CHUNK, group)
    step.wait(Awaited.COPY_OUT, group, step.copy(OUT, group, *storages))
    step.note(Residency.ON_HOST, *storages)
    recorder.note_move(DROP, group, 20 * KIB)
    device.compute(7.0)
    recorder.note_boundary(BACKWARD, CHUNK, group)
    step.wait(Awaited.COPY_IN, group, step.copy(IN, group, *storages))
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
    storage = step.save(Group())
    tensor, gone = weakref.ref(storage.tensor), weakref.ref(storage)
    step.note(Residency.RETIRED, storage)
    del storage
    gc.collect()
    assert tensor() is None and gone() is None


def test_what_crosses_the_edges_of_the_step(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors saved before the recording are skipped, those that outlive it end with it; a fork has no record of it."""
    step.note(Residency.COPYING_OUT, Storage())
    step.recorder.note_storage_stays(Storage(), Reason.SHARED)
    step.save(Group())
    step.device.compute(4.0)
    pending = step.recorder.finish()
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=r"recorded in process \d+: read its record"):
        patch.setattr(os, "getpid", lambda: 1)
        pending.get()
    record = pending.get()
    assert record.stages == (StageRecord("0.3:0", "packed", 0.0, 4.0),) and len(record.saved) == 1


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
        self.recorder.note_saved(x, Group(is_ungrouped=True), reason=Reason.WEIGHT)
        if not self.parts and error is not None:
            raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])  # behind an interrupt no hook is called
def test_a_tensor_outside_groups_has_the_name_of_the_innermost_module(error: type[BaseException]) -> None:
    recorder = Step(modules=ModuleHooks()).recorder
    model = Saving(recorder, Saving(recorder), Saving(recorder))
    model(torch.zeros(3), error)
    recorder.note_saved(torch.zeros(3), Group(is_ungrouped=True), reason=Reason.WEIGHT)
    names = [saved.module for saved in recorder.finish().get().saved]
    assert names == ["parts.0", "parts.1", "parts.0", "Saving" if error is ValueError else "parts.0", ""]


@pytest.fixture
def observer() -> Observer:
    return Observer()


def run(observer: Observer, device: Any = None) -> bool:
    """Run one step of one saved tensor; return whether it was recorded."""
    recorder = observer.begin(device or ClockDevice(), is_dry_run=False)
    if recorder is not None:
        storage = Storage()
        recorder.note_saved(storage.tensor, storage.group, storage=storage)
    observer.end(recorder, STATS)
    return recorder is not None


def test_only_the_step_that_was_asked_for_is_recorded(observer: Observer, monkeypatch: pytest.MonkeyPatch) -> None:
    """And who asks for its record does not wait for the rests of the thread."""
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
    num_ranks: int, asked: str, written: str, observer: Observer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    observer: Observer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "missing" / "step.json"
    observer.ask(file)
    run(observer)
    observer.close()
    assert f"could not be written to {file}" in caplog.text
    assert observer.record is not None, "there is a report all the same"
    observer.ask()
    assert run(observer)
