# SPDX-License-Identifier: Apache-2.0
"""The recorder: a toy sequence of calls becomes the record of it, with the reason of every saved tensor."""

from __future__ import annotations

import gc
import os
import warnings
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch

from offload_engine._observe.modules import ModuleHooks
from offload_engine._observe.reasons import ADVICE, Reason, reason_to_stay
from offload_engine._observe.record import Awaited, StageRecord
from offload_engine._observe.recorder import Recorder
from offload_engine._saved.storage import Residency
from offload_engine.planning.clocks import Link
from offload_engine.planning.moves import BACKWARD, COMMIT, DROP, FORWARD, IN, ITERATION_END, OUT
from offload_engine.schedule import ChunkKey
from tests.engine_on_clocks import KIB, ClockDevice

CHUNK = ChunkKey(0, 3)
MS_OF_COPY = 10 * 1.048576  # 10 "MiB" at 1 GB/s


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

    group: Group
    nbytes: int = 10 * KIB
    stream: str = "compute"
    tensor: torch.Tensor = field(default_factory=lambda: torch.zeros(10, 256, dtype=torch.float32))


class Step:
    """Makes an engine's calls on a device of clocks."""

    def __init__(self, **options: Any) -> None:
        self.device = ClockDevice(Link(out_gbps=1.0, in_gbps=1.0))
        self.streams = {op: self.device.new_stream(name) for op, name in ((OUT, "copy_out"), (IN, "copy_in"))}
        self.recorder = Recorder(
            self.device,
            clock=lambda: round(self.device.clocks.now.host * 1e6),
            **options,
        )

    def save(self, group: Group) -> Storage:
        storage = Storage(group)
        self.recorder.note_saved(storage.tensor, group, storage=storage)
        return storage

    def copy(self, op: Any, group: Group, *storages: Storage) -> Any:
        stream = self.streams[op]
        self.device.wait_event(stream, self.device.record_event("compute"))
        begin = self.recorder.mark(stream)
        self.device.copy(stream, sum(s.nbytes for s in storages))
        nbytes = sum(s.nbytes for s in storages)
        self.recorder.note_copy(op, group, nbytes, begin, self.recorder.mark(stream))
        for storage in storages:
            self.recorder.note_residency(storage, Residency.COPYING_OUT if op is OUT else Residency.COPYING_IN)
        self.recorder.note_move(op, group, nbytes)
        return self.device.record_event(stream)

    def wait(self, awaited: Awaited, group: Group, event: Any) -> None:
        begin = self.recorder.mark("compute")
        self.device.wait_event("compute", event)
        self.recorder.note_wait(awaited, group, begin, self.recorder.mark("compute"))


@pytest.fixture
def step() -> Iterator[Step]:
    made = Step()
    yield made
    made.recorder.close()


def out_and_back(step: Step, group: Group) -> None:
    """Saved, 5 ms of compute, out, released at its end, 7 ms on host, in, used for 3 ms."""
    recorder, device = step.recorder, step.device
    recorder.note_boundary(FORWARD, CHUNK)
    storages = [step.save(group), step.save(group)]
    device.compute(5.0)
    recorder.note_boundary(COMMIT, CHUNK, group)
    copied_out = step.copy(OUT, group, *storages)
    step.wait(Awaited.COPY_OUT, group, copied_out)
    for storage in storages:
        recorder.note_residency(storage, Residency.ON_HOST)
    recorder.note_move(DROP, group, 20 * KIB)
    device.compute(7.0)
    recorder.note_boundary(BACKWARD, CHUNK, group)
    copied_in = step.copy(IN, group, *storages)
    step.wait(Awaited.COPY_IN, group, copied_in)
    for storage in storages:
        recorder.note_residency(storage, Residency.RESIDENT)
    device.compute(3.0)
    for storage in storages:
        recorder.note_residency(storage, Residency.RETIRED)
        device.compute(1.0)
    recorder.note_boundary(ITERATION_END, None)


def test_a_group_lives_through_its_stages_at_the_times_of_the_device(
    step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark_time = mock.Mock(wraps=step.device.mark_time)
    monkeypatch.setattr(step.device, "mark_time", mark_time)
    out_and_back(step, Group())
    assert mark_time.call_count == 10, "two around each of two copies and waits, one where it is saved, one at its end"
    record = step.recorder.finish().get()
    copy = 2 * MS_OF_COPY
    moments = (0.0, 5.0, 5 + copy, 12 + copy, 12 + 2 * copy, 16 + 2 * copy)  # used until the second of two retires
    residencies = ("packed", "copying out", "on host", "copying in", "used")
    assert [(s.group, s.residency) for s in record.stages] == [("0.3:0", residency) for residency in residencies]
    for stage, begin, end in zip(record.stages, moments, moments[1:], strict=False):
        assert (stage.begin_ms, stage.end_ms) == pytest.approx((begin, end))
    assert record.duration_ms == pytest.approx(17 + 2 * copy)


def test_a_group_is_on_its_way_from_the_first_byte_on(step: Step) -> None:
    """Not from the issue of its copy, which stands behind others."""
    group = Group()
    storage = step.save(group)
    step.device.copy(step.streams[OUT], 10 * KIB)
    step.copy(OUT, group, storage)
    packed, leaving = step.recorder.finish().get().stages
    assert packed.end_ms == leaving.begin_ms == pytest.approx(MS_OF_COPY)


# ---- what it leaves alone ----


def test_it_keeps_no_tensor_and_no_storage_that_retired(step: Step) -> None:
    storage = step.save(Group())
    tensor, gone = weakref.ref(storage.tensor), weakref.ref(storage)
    step.recorder.note_residency(storage, Residency.RETIRED)
    del storage
    gc.collect()
    assert tensor() is None and gone() is None


def test_what_crosses_the_edges_of_the_step(step: Step) -> None:
    """Tensors saved before the recording are skipped, and those that outlive it end with it."""
    step.recorder.note_residency(Storage(Group()), Residency.COPYING_OUT)
    step.recorder.note_storage_stays(Storage(Group()), Reason.SHARED)
    step.save(Group())
    step.device.compute(4.0)
    record = step.recorder.finish().get()
    assert record.stages == (StageRecord("0.3:0", "packed", 0.0, 4.0),) and len(record.saved) == 1


# ---- modules ----


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


# ---- reasons to stay ----


class Subclass(torch.Tensor):
    pass


def candidates() -> dict[str, tuple[torch.Tensor, Reason | None]]:
    weight, marked = torch.nn.Parameter(torch.zeros(512)), torch.zeros(512)
    marked._TE_do_not_offload = True  # type: ignore[attr-defined]
    with warnings.catch_warnings(action="ignore"):  # deprecated, and still there to be met
        quantized = torch.quantize_per_tensor(torch.zeros(2048), 0.1, 0, torch.quint8)
    return {
        "plain": (torch.zeros(512), None),
        "view": (torch.zeros(512)[3:], None),
        "small": (torch.zeros(3), Reason.TOO_SMALL),
        "parameter": (weight, Reason.WEIGHT),
        "view of a parameter": (weight.view(8, 64).t(), Reason.WEIGHT),
        "marked": (marked, Reason.EXCLUDED),
        "meta": (torch.zeros(512, device="meta"), Reason.OTHER_DEVICE),
        "subclass": (torch.zeros(512).as_subclass(Subclass), Reason.TYPE),
        "sparse": (torch.zeros(512).to_sparse(), Reason.NOT_STRIDED),
        "quantized": (quantized, Reason.FORM),
        "zero": (torch._efficientzerotensor(512), Reason.FORM),
    }


def test_reasons_without_an_engine() -> None:
    weight = torch.nn.Parameter(torch.zeros(512))
    assert reason_to_stay(weight, weight.device, 1024, frozenset(), {}) is Reason.WEIGHT
    assert set(ADVICE) == set(Reason)


class Counting(ClockDevice):
    """Counts the calls that may block the host."""

    num_blocking = 0

    def synchronize(self, event: Any) -> None:
        self.num_blocking += 1
        super().synchronize(event)

    def milliseconds_between(self, first: Any, last: Any) -> float:
        self.num_blocking += 1
        return super().milliseconds_between(first, last)


def test_a_record_is_made_once_and_gives_its_marks_back() -> None:
    device: Any = Counting()
    device.compute(50.0)
    recorder = Recorder(device, compares_clocks=True)
    pending, gone = recorder.finish(), weakref.ref(recorder)
    assert device.num_blocking == 0, "neither its begin nor its end waits for the device"
    del recorder
    found = pending.get()
    assert found.duration_ms == 0.0 and gone() is None, "it holds the notes, and they the marks"
    num_blocking = device.num_blocking
    assert num_blocking > 0 and pending.get() is found and device.num_blocking == num_blocking


def test_a_forked_process_is_told_where_the_record_is(step: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    pending, made = step.recorder.finish(), step.recorder.finish()
    record = made.get()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert made.get() is record
    with pytest.raises(RuntimeError, match=r"recorded in process \d+: read its record there"):
        pending.get()
