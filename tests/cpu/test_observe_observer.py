"""Selects the recorded steps, and writes, logs or keeps their records."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from offload_engine import IterationStats
from offload_engine._observe import observer as observer_module
from offload_engine._observe.chrome_trace import read_records
from offload_engine._observe.observer import Observer
from offload_engine._observe.reasons import Reason
from offload_engine._observe.report import report_table, summary_of_stats
from tests.cpu.test_observe_recorder import Group, Storage
from tests.engine_on_clocks import ClockDevice

STATS = IterationStats(num_groups=2, num_offloaded_groups=1, prefetch_misses=3)


def run(observer: Observer, is_dry_run: bool = False) -> bool:
    """Run one step of one saved tensor; return whether it was recorded."""
    device: Any = ClockDevice()
    recorder = observer.begin(device, is_dry_run)
    if recorder is not None:
        storage, group = Storage(Group()), Group()
        recorder.note_saved(storage.tensor, group, storage=storage)
    observer.end(recorder, STATS)
    return recorder is not None


def test_only_the_step_that_was_asked_for_is_recorded() -> None:
    observer = Observer()
    assert not run(observer) and observer.record is None
    observer.ask()
    assert run(observer) and not run(observer)
    assert observer.record is not None
    assert (observer.record.step, observer.record.counts["prefetch_misses"]) == (1, 3)


def test_the_file_has_the_numbers_in_its_name(tmp_path: Path) -> None:
    observer = Observer()
    observer.ask(tmp_path / "of_{rank}_{step}.json.gz")
    run(observer)
    assert read_records(tmp_path / "of_0_0.json.gz") == [observer.record]


def test_a_dry_run_is_the_reason(tmp_path: Path) -> None:
    for is_dry_run, reason in ((True, Reason.DRY_RUN), (False, Reason.FITS)):
        observer = Observer()
        observer.ask()
        run(observer, is_dry_run)
        assert observer.record is not None and observer.record.saved[0].reason is reason


def test_the_report_is_of_the_record_or_else_of_the_counters() -> None:
    observer = Observer()
    assert observer.report(STATS) == summary_of_stats(STATS)
    observer.ask()
    run(observer)
    assert observer.record is not None and observer.report(STATS) == report_table([observer.record])


def test_the_first_report_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    observer = Observer()
    with caplog.at_level(logging.INFO):
        observer.end(None, IterationStats())  # evaluation: no groups
        assert not caplog.records
        run(observer)
        run(observer)
    assert len(caplog.records) == 1 and "1 of 2 groups offloaded" in caplog.text


def test_ranks_do_not_write_one_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observer_module, "_num_ranks", lambda: 2)
    monkeypatch.setattr(observer_module, "_rank", lambda: 1)
    for name in ("step.json.gz", "own_{rank}.json"):
        observer = Observer()
        observer.ask(tmp_path / name)
        run(observer)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own_1.json", "step_rank1.json.gz"]
