# SPDX-License-Identifier: Apache-2.0
"""Takes from recorded steps of an earlier run what they show of a machine: its link, its memory and its speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from offload_engine._observe.chrome_trace import read_records
from offload_engine._observe.record import StepRecord
from offload_engine.planning.clocks import Link
from offload_engine.planning.hardware import Hardware, with_link, with_memory, with_speed
from offload_engine.planning.moves import OUT
from offload_engine.planning.predict import summed
from offload_engine.rehearsal.forecast import Forecast, RankForecast

_ALIKE: Final = 0.05
"""Share by which the bytes of a group may differ from those of the same job."""
_SHORT: Final = 0.05
"""Share of a step in a pipeline that compute may have waited for copies: other ranks may have waited for that, too."""


def recorded_machine(hardware: Hardware, files: Sequence[str]) -> Hardware:
    """Return the machine with the link of recorded steps, and with the memory of their GPU, if they name it.

    Raises:
        ValueError: if one direction has no copies, or a file is no recording.
        OSError: if a file cannot be read.
    """
    records = [record for file in files for record in read_records(file)]
    found = with_link(hardware, _link_of(records, ", ".join(files)))
    device_bytes = max(record.device_bytes for record in records)
    return with_memory(found, device_bytes) if device_bytes else found


def _link_of(records: Sequence[StepRecord], source: str) -> Link:
    """Return how fast the copies of all records were, all together."""
    copies = [copy for record in records for copy in record.copies]
    rates = []
    for is_out in (True, False):
        chosen = [copy for copy in copies if (copy.op is OUT) == is_out and copy.end_ms > copy.begin_ms]
        milliseconds = sum(copy.end_ms - copy.begin_ms for copy in chosen)
        if not chosen:
            raise ValueError(f"{source}: no copies {'out' if is_out else 'in'} are recorded")
        rates.append(sum(copy.nbytes for copy in chosen) / milliseconds / 1e6)
    return Link(*rates)


def forecast_at_recorded_speed(
    make: Callable[[Hardware], Forecast], hardware: Hardware, files: Sequence[str]
) -> tuple[Forecast, list[str]]:
    """Make a forecast with kernels as fast as in recorded steps, if these are of the same job.

    Args:
        make: makes the forecast for a machine; called twice if there are recordings of the same job.
        hardware: the machine, with the rates of its table.
        files: recordings.

    Returns:
        The forecast, and with recordings a note on where its rates are from.
    """
    found = make(hardware)
    if not files:
        return found, []
    records = [record for file in files for record in read_records(file)]
    if not all(_is_of(record, found) for record in records):
        return found, [f"The recording is of another model, schedule or settings: rates are those of {hardware.name}."]
    waited = max(_waited_ms(record) / record.duration_ms for record in records)
    if len(found.ranks) > 1 and waited > _SHORT:
        why = f"compute waited {waited:.0%} of the recorded step for copies, and other stages for that"
        return found, [f"Rates are those of {hardware.name}: {why}."]
    busy_ms = max(record.duration_ms - _waited_ms(record) for record in records)
    speed = (found.steps[0].milliseconds - found.optimizer_ms) / busy_ms
    kernels = f"Kernels are {speed:.3g} times as fast as the rates of {hardware.name}"
    note = f"{kernels}: the recorded step computed for {busy_ms:,.1f} ms."
    return make(with_speed(hardware, speed)), [note]


def _is_of(record: StepRecord, forecast: Forecast) -> bool:
    """Return whether a recorded step saves as many bytes by name as that of the forecast, which has all names."""
    if not record.groups or record.num_pipeline_ranks != len(forecast.ranks):
        return False
    expected = _bytes_of(forecast.ranks[record.pipeline_rank])
    found = summed((group.name, group.own_bytes) for group in record.groups)
    return all(abs(nbytes - expected.get(name, -1)) <= _ALIKE * nbytes for name, nbytes in found.items())


def _bytes_of(rank: RankForecast) -> dict[str, int]:
    """Return the bytes that the groups of each name save in a step."""
    stages = [chunk.stage for kind, chunk in rank.actions if kind == "F"] or [0]
    return summed((group.name, group.nbytes) for stage in stages for group in rank.shapes[stage].groups)


def _waited_ms(record: StepRecord) -> float:
    return sum(wait.exposed_ms for wait in record.waits)
