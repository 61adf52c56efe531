# SPDX-License-Identifier: Apache-2.0
"""What a run says of its offload: one line, metrics, times of waits, and a warning for each goal that is missed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from offload_engine import IterationStats, OffloadConfig, OffloadEngine, enable_activation_offloading
from offload_engine._observe.goals import Goals
from offload_engine.config import MIB
from offload_engine.functions import group_commit, group_start
from offload_engine.policies import ResidentBudget
from offload_engine.stats import StepTimes

GIB = 1 << 30
STATS = IterationStats(
    copied_out_bytes=3 * GIB,
    num_groups=8,
    num_offloaded_groups=6,
    managed_bytes=4 * GIB,
    peak_resident_bytes=GIB // 2,
    peak_host_bytes=3 * GIB,
    prefetch_misses=2,
)


def test_a_line_for_people() -> None:
    line = STATS.line(StepTimes(step_ms=800.0, waited_ms=20.0))
    assert line == (
        "moved 3.00 GiB, 75% of the 4.00 GiB saved; at most 512 MiB of it on the device at once and 3.00 GiB on the "
        "host; compute waited 20.0 of 800 ms for copies (2.5%); 2 storages came back late (0 is best)"
    )
    assert "waited" not in str(STATS) and str(IterationStats()) == "no step yet"
    assert str(IterationStats(num_groups=2, managed_bytes=MIB)).startswith(
        "moved nothing of the 1 MiB saved in 2 groups"
    )


def test_metrics_have_units() -> None:
    found = STATS.metrics(StepTimes(step_ms=800.0, waited_ms=20.0))
    assert found["moved_gib"] == 3 and found["moved_percent"] == 75 and found["peak_resident_gib"] == 0.5
    assert found["waited_ms"] == 20 and found["waited_percent"] == 2.5 and found["late"] == 2
    assert "waited_ms" not in STATS.metrics() and StepTimes(0.0, 0.0).waited_percent == 0


def model_with(num_layers: int) -> tuple[nn.Module, list[nn.Module]]:
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(num_layers)]
    return nn.Sequential(*layers), list(layers)


def train(model: nn.Module, num_steps: int = 1) -> None:
    for _ in range(num_steps):
        model(torch.randn(512, 64)).square().mean().backward()


def test_a_handle_tells_of_waits_of_the_step_that_was_timed() -> None:
    model, layers = model_with(6)
    handle = enable_activation_offloading(model, layers=layers, config=OffloadConfig(min_tensor_bytes=1))
    assert str(handle) == "offload of 6 layers, 0 to 5: no step yet"
    train(model)
    assert handle.engine.timer.times is None and "waited" not in str(handle)
    handle.engine.timer.ask()
    train(model)
    times = handle.engine.timer.times
    assert times is not None and 0 <= times.waited_ms <= times.step_ms and "compute waited" in str(handle)
    train(model)
    assert handle.engine.timer.times == times  # until another one is timed
    handle.record()
    train(model)
    record = handle.engine.last_record
    assert (
        record is not None
        and handle.engine.timer.times != times
        and handle.engine.timer.times.step_ms == record.duration_ms
    )
    handle.remove()


def test_a_dry_run_tells_its_account(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    model, layers = model_with(6)
    config = OffloadConfig(min_tensor_bytes=1, dry_run=True)
    handle = enable_activation_offloading(model, layers=layers, config=config)
    train(model)
    text = "dry run: 6 groups saved 7 MiB in a step, of which 6 MiB would leave the device and come back"
    assert text in str(handle) and text in caplog.text and warnings_of(caplog) == []
    handle.remove()


def slow_copies(engine: OffloadEngine) -> None:
    """Have compute wait for a copy-in that is issued too late to be hidden."""
    with engine.iteration():
        chunk = engine.start_chunk()
        x = torch.randn(1 << 21, requires_grad=True)
        for _ in range(3):
            x = group_start(x, chunk, name="layer")
            with chunk.saved_tensors_hooks():
                x = x.sigmoid()
            x = group_commit(x, chunk)
        x.sum().backward()


def test_waits_are_timed() -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1, directory="none"))
    engine.timer.ask()
    slow_copies(engine)
    times = engine.timer.times
    engine.record()
    slow_copies(engine)
    record = engine.last_record
    assert times is not None and record is not None and times.waited_ms > 0
    assert engine.timer.times is not None and engine.timer.times.waited_ms == sum(
        wait.exposed_ms for wait in record.waits
    )
    engine.close()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_groups_that_a_host_limit_kept(caplog: pytest.LogCaptureFixture) -> None:
    model, layers = model_with(6)
    config = OffloadConfig(min_tensor_bytes=1, host_limit_bytes=1 << 20)
    handle = enable_activation_offloading(model, layers=layers, config=config)
    train(model, 3)
    (text,) = warnings_of(caplog)
    assert "the host tier had no room" in text and "host_limit_bytes=1 MiB" in text
    handle.remove()


def test_a_budget_below_one_group(caplog: pytest.LogCaptureFixture) -> None:
    model, layers = model_with(6)
    config = OffloadConfig(min_tensor_bytes=1, policy=ResidentBudget(1))
    handle = enable_activation_offloading(model, layers=layers, config=config)
    train(model, 2)
    assert (
        sum("a budget of 1 bytes for saved tensors is less than one group" in text for text in warnings_of(caplog)) == 1
    )
    handle.remove()


def test_nothing_to_be_gained(caplog: pytest.LogCaptureFixture) -> None:
    model, layers = model_with(6)
    config = OffloadConfig(min_tensor_bytes=1, policy=ResidentBudget(GIB))
    handle = enable_activation_offloading(model, layers=layers, config=config)
    train(model, 2)
    (text,) = warnings_of(caplog)
    assert text.startswith("nothing moved: the ") and "nothing to be gained" in text
    handle.remove()


def test_two_layers_gain_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Two fit into the default budget, but of the first one half has left before that is known."""
    model, layers = model_with(2)
    handle = enable_activation_offloading(model, layers=layers, config=OffloadConfig(min_tensor_bytes=1))
    train(model, 6)
    (text,) = warnings_of(caplog)
    assert text.startswith(("nothing is gained", "nothing moved"))
    handle.remove()


def test_a_run_that_does_what_it_should_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model, layers = model_with(8)
    handle = enable_activation_offloading(model, layers=layers, config=OffloadConfig(min_tensor_bytes=1))
    train(model, 8)
    assert warnings_of(caplog) == []
    handle.remove()


@pytest.mark.parametrize(("misses", "num_warnings"), [([9] * 5, 1), ([9, 9, 9, 9, 0], 0), ([0, 0, 9, 0, 9, 9], 0)])
def test_copies_that_compute_waits_for(misses: list[int], num_warnings: int, caplog: pytest.LogCaptureFixture) -> None:
    """From the third step on, and three times in a row: the first steps allocate host memory."""
    goals = Goals(OffloadConfig(), is_whole=True)
    for number in misses:
        goals.check(IterationStats(num_groups=8, num_offloaded_groups=8, copied_out_bytes=1, prefetch_misses=number))
    assert len(warnings_of(caplog)) == num_warnings


def test_one_rank_speaks(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    store: Any = torch.distributed.HashStore()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr("offload_engine._compat.torch_private.default_store", lambda: store)
    stats = IterationStats(num_groups=8, num_host_limit_groups=3, copied_out_bytes=1)
    for _ in range(4):  # ranks
        Goals(OffloadConfig(), is_whole=True).check(stats)
    assert len(warnings_of(caplog)) == 1
