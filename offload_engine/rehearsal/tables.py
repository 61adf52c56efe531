# SPDX-License-Identifier: Apache-2.0
"""Formats the tables of a forecast as text, and draws its plot."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, RenderableType
from rich.table import Table

from offload_engine._budget.picture import Mark, Point, draw_budgets
from offload_engine._budget.tables import group_table, groups_of
from offload_engine.counted import counted
from offload_engine.rehearsal.forecast import Forecast, StepForecast
from offload_engine.sizes import fine_size

_WIDTH = 120
_GIB = 1 << 30
_SHAPES = "o^vs"
"""Marks of the ways to train, in their order."""


def forecast_text(forecast: Forecast, notes: Sequence[str] = ()) -> str:
    """Return all tables of a forecast, with its assumptions."""
    parts: list[RenderableType] = [
        _machine(forecast),
        _module_table(forecast),
        _rank_table(forecast),
        _step_table(forecast),
        *_choice_tables(forecast),
        _verdict(forecast),
        *notes,
    ]
    return _as_text(parts)


def draw_forecast(forecast: Forecast, file: str) -> None:
    """Draw throughput over memory: a curve through budgets, and the ways to train.

    Raises:
        ImportError: without matplotlib.
        OSError, ValueError: if the file cannot be written, or its suffix is not known.
    """
    marks = [
        Mark(_name_of(forecast, step), _point(forecast, step), shape)
        for step, shape in zip(forecast.steps, _SHAPES, strict=False)
    ]
    curve = [_point(forecast, step) for step in forecast.curve]
    memory = f"fullest GPU of {forecast.hardware.name}, predicted"
    draw_budgets(file, curve, marks, forecast.budget_bytes, memory, "tokens a second and GPU, predicted")


def _name_of(forecast: Forecast, step: StepForecast) -> str:
    """Return the name of a way to train, and whether it is the one to take."""
    return f"{step.name}{': fastest that fits' if step == forecast.best else '' if step.fits else ': does not fit'}"


def _point(forecast: Forecast, step: StepForecast) -> Point:
    return Point(step.gpu_bytes, _tokens_per_second(forecast, step))


def _machine(forecast: Forecast) -> str:
    hardware = forecast.hardware
    source = "" if hardware.source == "measured" else " (datasheet: rates are scaled, not measured)"
    gpus = counted(forecast.num_gpus, "GPU")
    nodes = counted(-(-forecast.num_gpus // forecast.gpus_of_node), "node")
    return (
        f"{gpus} on {nodes} of {hardware.name}{source}: {_gib(forecast.budget_bytes)} of {hardware.gpu_gib:g} GiB of "
        f"each GPU, {hardware.host_gib:,g} GiB a host, copies at {forecast.link.out_gbps:.1f} GB/s out and "
        f"{forecast.link.in_gbps:.1f} GB/s in, of {counted(forecast.gpus_of_node, 'GPU')} of the host at once"
    )


def _module_table(forecast: Forecast) -> Table:
    columns = ("stage", "module", "groups", "GiB a step", "moved GiB", "on the link ms", "exposed ms")
    table = _table("what a step saves, and what moving it takes", columns, 2)
    for rank, modules in enumerate(forecast.modules):
        for module in modules:
            table.add_row(
                str(rank),
                module.name,
                str(module.num_groups),
                _gib(module.nbytes),
                _gib(module.moved_bytes),
                f"{module.link_ms:,.1f}",
                f"{module.exposed_ms:,.1f}",
            )
    return table


def _rank_table(forecast: Forecast) -> Table:
    names = [way.name for way in forecast.ranks[0].ways]
    columns = ("stage", "parameters", "weights, gradients, optimizer", *(f"peak, {name}" for name in names))
    table = _table("allocated on each GPU, GiB", columns, 1)
    for rank, each in enumerate(forecast.ranks):
        peaks = (_gib(way.peak_bytes) for way in each.ways)
        table.add_row(str(rank), f"{each.num_parameters / 1e9:,.3f} B", _gib(each.state_bytes), *peaks)
    return table


def _step_table(forecast: Forecast) -> Table:
    columns = ("", "step ms", "tokens/s and GPU", "fullest GPU GiB", "host GiB a node", "fits")
    table = _table(f"a step of {forecast.num_tokens:,} tokens", columns, 1)
    for step in forecast.steps:
        table.add_row(
            step.name,
            f"{step.milliseconds:,.1f}",
            f"{_tokens_per_second(forecast, step):,.0f}",
            _gib(step.gpu_bytes),
            _gib(step.host_bytes),
            "yes" if step.fits else "no",
        )
    return table


def _choice_tables(forecast: Forecast) -> list[Table]:
    """Return the choices for the groups of each name, where choices were made."""
    if any(rank.chosen is None for rank in forecast.ranks):
        return []
    stages = []
    for number, rank in enumerate(forecast.ranks):
        names = [group.name for shape in rank.shapes for group in shape.groups]
        assert rank.chosen is not None
        stages.append((number, groups_of(rank.chosen, names)))
    return [group_table("chosen within the budget, GiB a step", stages, _gib)]


def _verdict(forecast: Forecast) -> str:
    if (best := forecast.best) is not None:
        return f"It fits {forecast.hardware.name}, fastest with: {best.name}, {best.milliseconds:,.0f} ms a step."
    least = min(forecast.steps, key=lambda step: step.gpu_bytes)
    missing = least.gpu_bytes - forecast.budget_bytes
    if missing <= 0:
        return f"It does not fit: {least.name} needs {_gib(least.host_bytes)} GiB of host memory on each node."
    return (
        f"It does not fit {forecast.hardware.name}: {fine_size(missing)} are missing even with {least.name}. Use more "
        "GPUs, smaller microbatches, shorter sequences, or other GPUs."
    )


def _tokens_per_second(forecast: Forecast, step: StepForecast) -> float:
    return 1e3 * forecast.num_tokens / step.milliseconds / forecast.num_gpus


def _table(title: str, columns: Sequence[str], num_words: int) -> Table:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index < num_words else "right")
    return table


def _as_text(parts: Sequence[RenderableType]) -> str:
    console = Console(width=_WIDTH, force_terminal=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part, markup=False, highlight=False)
    return capture.get()


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:,.2f}"
