# SPDX-License-Identifier: Apache-2.0
"""Selects the recorded steps, and writes, logs or keeps their records."""

from __future__ import annotations

import threading
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from offload_engine import IterationStats
from offload_engine._observe import observer as observer_module
from offload_engine._observe import pace
from offload_engine._observe.chrome_trace import read_records
from offload_engine._observe.observer import Observer
from offload_engine._observe.report import report_table, summary_of_stats
from tests.cpu.test_observe_recorder import Group, Storage
from tests.engine_on_clocks import ClockDevice

STATS = IterationStats(num_groups=2, num_offloaded_groups=1, prefetch_misses=3)


@pytest.fixture
def observer() -> Observer:
    return Observer()


def run(observer: Observer, device: Any = None) -> bool:
    """Run one step of one saved tensor; return whether it was recorded."""
    device = device or ClockDevice()
    recorder = observer.begin(device, is_dry_run=False)
    if recorder is not None:
        storage, group = Storage(Group()), Group()
        recorder.note_saved(storage.tensor, group, storage=storage)
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
        self.threads: set[str] = set()

    def milliseconds_between(self, first: Any, last: Any) -> float:
        self.threads.add(threading.current_thread().name)
        assert self.is_there.wait(10.0)
        return super().milliseconds_between(first, last)


def test_a_file_is_written_beside_the_training(tmp_path: Path) -> None:
    """The step ends before the device does, and the thread does not keep an observer that is dropped."""
    observer, device, file = Observer(), Late(), tmp_path / "step.json"
    observer.ask(file)
    assert run(observer, device=device) and not file.exists()
    device.is_there.set()
    observer.close()
    assert len(read_records(file)) == 1 and device.threads == {"offload-trace"}
    observer.ask(file)
    run(observer)
    gone = weakref.ref(observer)
    del observer
    assert gone() is None


def test_a_step_asked_for_in_a_recorded_step_has_its_own_file(observer: Observer, tmp_path: Path) -> None:
    observer.ask(tmp_path / "first.json")
    recorder = observer.begin(ClockDevice())
    observer.ask()
    observer.end(recorder, STATS)
    observer.close()
    assert (tmp_path / "first.json").exists()


def test_a_file_that_cannot_be_written_is_logged_with_its_path(
    observer: Observer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "missing" / "step.json"
    observer.ask(file)
    run(observer)
    observer.close()
    assert f"could not be written to {file}" in caplog.text and "No such file" in caplog.text
    assert observer.record is not None, "there is a report all the same"
    observer.ask()
    assert run(observer)


def test_a_file_is_written_where_no_thread_can_start(
    observer: Observer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", mock.Mock(side_effect=RuntimeError("can't start new thread")))
    observer.ask(tmp_path / "step.json")
    run(observer)
    assert len(read_records(tmp_path / "step.json")) == 1
    observer.close()
