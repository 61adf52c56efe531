# SPDX-License-Identifier: Apache-2.0
"""What a forecast takes from recorded steps: link, memory, and the speed of kernels if they are of the same job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from offload_engine._observe.chrome_trace import RECORDS, read_records, write_trace
from offload_engine._observe.record import StepRecord
from offload_engine.planning.clocks import Link
from offload_engine.planning.hardware import Hardware, find_hardware
from offload_engine.planning.shapes import ChunkShape, GroupShape
from offload_engine.rehearsal.forecast import Forecast, RankForecast, StepForecast
from offload_engine.rehearsal.options import hardware_of
from offload_engine.rehearsal.recorded import forecast_at_recorded_speed
from offload_engine.schedule import one_forward_one_backward
from tests.cpu.test_observe_report import MIB, NUM_LAYERS, a_step

H100 = find_hardware("h100x8")
KERNEL_MS, OPTIMIZER_MS = 20.0, 3.0


def recording(folder: Path, *steps: StepRecord) -> list[str]:
    return [str(write_trace(step, folder / f"{len(list(folder.iterdir()))}.json")) for step in steps]


def test_copies_say_how_fast_the_link_is_and_the_gpu_how_much_memory_it_has(tmp_path: Path) -> None:
    """What was measured replaces the link; of both ways at once the slower counts."""
    files = recording(tmp_path, a_step(0), a_step(1))
    link = Link(6.0, 2.0)  # out 12 MB in two milliseconds, in 4 MB in as long
    hardware = hardware_of("h100x8", None, files)
    assert hardware.link(8, is_both_ways=False) == link
    assert hardware.link(8, is_both_ways=True) == Link(link.in_gbps, link.in_gbps)
    assert hardware.gpu_bytes == H100.gpu_bytes
    known = recording(tmp_path, replace(a_step(), device_bytes=40 << 30))
    assert hardware_of("h100x8", None, known).gpu_bytes == 40 << 30
    empty = write_trace(replace(a_step(), copies=()), tmp_path / "empty.json")
    with pytest.raises(ValueError, match="empty.json: no copies out are recorded"):
        hardware_of("h100x8", None, [str(empty)])


def test_a_recording_of_before_does_not_name_the_memory(tmp_path: Path) -> None:
    [file] = recording(tmp_path, a_step())
    trace = json.loads(Path(file).read_text())
    for record in trace[RECORDS]:
        del record["device_bytes"]
    Path(file).write_text(json.dumps(trace))
    assert read_records(file) == [a_step()]


def make(hardware: Hardware, num_ranks: int = 1, nbytes: int = MIB) -> Forecast:
    """Forecast a step of four groups on each rank, in kernels of 20 ms by the rates."""
    shape = ChunkShape(tuple(GroupShape("attn", layer, nbytes) for layer in range(NUM_LAYERS)), NUM_LAYERS)
    actions = tuple(one_forward_one_backward(num_ranks, 0, 1)) if num_ranks > 1 else ()
    rank = RankForecast(0, 0, actions, (shape,), ())
    step = StepForecast("no offload", KERNEL_MS / hardware.speed + OPTIMIZER_MS, 0, 0, True)
    link = hardware.link(1, False)
    return Forecast(hardware, num_ranks, num_ranks, 0, link, 1, OPTIMIZER_MS, (rank,) * num_ranks, (), (step,))


def of_pipeline(waits: bool) -> Sequence[StepRecord]:
    step = a_step() if waits else replace(a_step(), waits=())
    return [replace(step, rank=rank, pipeline_rank=rank, num_pipeline_ranks=2) for rank in range(2)]


def test_kernels_are_as_fast_as_in_a_recorded_step_of_the_same_job(tmp_path: Path) -> None:
    """Which took 10 ms, of which compute waited 1.5 for copies."""
    files = recording(tmp_path, a_step())
    forecast, [note] = forecast_at_recorded_speed(make, H100, files)
    assert forecast.steps[0].milliseconds == pytest.approx(8.5 + OPTIMIZER_MS)
    assert note == "Kernels are 2.35 times as fast as the rates of h100x8: the recorded step computed for 8.5 ms."
    assert forecast_at_recorded_speed(make, H100, []) == (make(H100), [])


def test_of_another_job_or_a_pipeline_that_waits_rates_are_those_of_the_table(tmp_path: Path) -> None:
    other = "The recording is of another model, schedule or settings: rates are those of h100x8."
    waits = "compute waited 15% of the recorded step for copies, and other stages for that"
    alone, longer = recording(tmp_path, a_step(), a_step(1)), replace(a_step(), groups=a_step().groups[:3])
    for files, num_ranks, nbytes, note in (
        (alone, 1, 2 * MIB, other),
        (alone, 2, MIB, other),
        (recording(tmp_path, longer), 1, MIB, other),
        (recording(tmp_path, *of_pipeline(waits=True)), 2, MIB, f"Rates are those of h100x8: {waits}."),
    ):
        found = forecast_at_recorded_speed(partial(make, num_ranks=num_ranks, nbytes=nbytes), H100, files)
        assert found == (make(H100, num_ranks, nbytes), [note])
    forecast, _ = forecast_at_recorded_speed(
        partial(make, num_ranks=2), H100, recording(tmp_path, *of_pipeline(waits=False))
    )
    assert forecast.steps[0].milliseconds == pytest.approx(10.0 + OPTIMIZER_MS)
