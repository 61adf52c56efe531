# SPDX-License-Identifier: Apache-2.0
"""What a run says of its offload: one line, metrics, times of waits, and a warning for each goal that is missed."""

from __future__ import annotations

import logging
import re
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from offload_engine import IterationStats, OffloadConfig, OffloadEngine, enable_activation_offloading
from offload_engine._devices import copy_worker
from offload_engine._observe.goals import Goals
from offload_engine.config import MIB
from offload_engine.policies import ResidentBudget
from offload_engine.stats import StepTimes
from tests.engine_state import in_group
from tests.lookups import present

GIB = 1 << 30


def test_a_line_for_people_and_metrics_with_units() -> None:
    stats = IterationStats(num_groups=8, copied_out_bytes=3 * GIB, managed_bytes=4 * GIB, peak_resident_bytes=GIB // 2)
    times = StepTimes(step_ms=800.0, waited_ms=20.0)
    assert "moved 3.00 GiB, 75% of the 4.00 GiB saved" in stats.line(times) and "waited" in stats.line(times)
    expected = {"moved_gib": 3, "moved_percent": 75, "peak_resident_gib": 0.5, "late": 0}
    assert {**expected, "waited_ms": 20, "waited_percent": 2.5}.items() <= stats.metrics(times).items()
    assert expected.items() <= stats.metrics().items() and "waited_ms" not in stats.metrics()


def test_waits_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_slowly(*args: Any) -> Any:
        time.sleep(0.005)
        return read(*args)

    read = copy_worker._read
    monkeypatch.setattr(copy_worker, "_read", read_slowly)
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1, directory="none"))
    for ask in (engine.timer.ask, engine.record):
        ask()
        with engine.iteration():  # compute waits for a copy-in that takes longer than it
            chunk, x = engine.start_chunk(), torch.randn(1 << 21, requires_grad=True)
            for _ in range(3):
                x = in_group(chunk, torch.sigmoid, x)
            x.sum().backward()
        assert present(engine.timer.times).waited_ms > 0
    waits = present(engine.last_record).waits
    assert present(engine.timer.times).waited_ms == sum(wait.exposed_ms for wait in waits)
    engine.close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("num_layers", "settings", "num_steps", "warning"),
    [
        (6, {"host_limit_bytes": MIB}, 3, "the host tier had no room.*host_limit_bytes=1 MiB"),
        (6, {"policy": ResidentBudget(1)}, 2, "a budget of 1 byte for.*is less than one group"),
        (6, {"policy": ResidentBudget(GIB)}, 2, "^nothing moved: the .*offload gains nothing"),
        # Two fit into the default budget, but of the first one half has left before that is known.
        (2, {}, 6, "^nothing (is gained|moved)"),
        (8, {}, 8, None),
        (6, {"dry_run": True}, 1, None),
    ],
)
def test_what_is_warned_of_once(
    num_layers: int, settings: dict[str, Any], num_steps: int, warning: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(num_layers)]
    model, config = nn.Sequential(*layers), OffloadConfig(min_tensor_bytes=1, **settings)
    handle = enable_activation_offloading(model, layers=layers, config=config)
    for _ in range(num_steps):
        model(torch.randn(512, 64)).square().mean().backward()
    found = [text for text in warnings_of(caplog) if warning is None or re.search(warning, text)]
    assert len(found) == (warning is not None), warnings_of(caplog)
    if "dry_run" in settings:
        text = "dry run: 6 groups saved 7 MiB in a step, of which 6 MiB would leave the device and come back"
        assert text in str(handle) and text in caplog.text
    handle.remove()


@pytest.mark.parametrize(("misses", "num_warnings"), [([9] * 5, 1), ([9, 9, 9, 9, 0], 0), ([0, 0, 9, 0, 9, 9], 0)])
def test_copies_that_compute_waits_for(misses: list[int], num_warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    """From the third step on, and three times in a row: the first steps allocate host memory."""
    goals = Goals(OffloadConfig(), is_whole=True)
    for number in misses:
        goals.check(IterationStats(num_groups=8, num_offloaded_groups=8, copied_out_bytes=1, prefetch_misses=number))
    assert len(warnings_of(caplog)) == num_warnings


def test_one_rank_speaks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store = mock.Mock(return_value=torch.distributed.HashStore())
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr("offload_engine._compat.torch_private.default_store", store)
    for _ in range(4):  # ranks
        Goals(OffloadConfig(), is_whole=True).check(IterationStats(num_host_limit_groups=3, copied_out_bytes=1))
    assert len(warnings_of(caplog)) == 1
