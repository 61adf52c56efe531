# SPDX-License-Identifier: Apache-2.0
"""Writes what a budget has decided: a plan to begin with later, and a picture of what every budget takes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from offload_engine._budget.picture import Mark, Point, draw_budgets
from offload_engine.engine_view import EngineView
from offload_engine.errors import OffloadError
from offload_engine.planning.saved_plan import check_described, format_saved, parse_saved

_NOTHING: Final = "the engine has no gpu_budget, or has not measured a step yet"


def save_plan(engine: EngineView, file: str | os.PathLike[str], *, model: Mapping[str, object] | None = None) -> None:
    """Write the decision of `OffloadConfig.gpu_budget`, for `load_plan`.

    Args:
        engine: has a budget.
        file: to write.
        model: what the plan is for, such as sizes of the model and its layout: numbers, texts and None, by name.

    Raises:
        OffloadError: without a budget, and before the first decision.
        OSError: if the file cannot be written.
    """
    controller = engine.budget
    saved = None if controller is None else controller.decider.saved
    if saved is None:
        raise OffloadError(f"no plan to save: {_NOTHING}")
    Path(file).write_text(format_saved(saved if model is None else replace(saved, model=model)))


def load_plan(engine: EngineView, file: str | os.PathLike[str], *, model: Mapping[str, object] | None = None) -> None:
    """Begin with a plan that `save_plan` has written, instead of measuring. Call it before the first iteration.

    A plan that takes more than the budget is not used. A plan of another model that `model` does not tell apart is
    refused when the second iteration begins and the groups of this model are known, with a ValueError that names the
    file.

    Args:
        engine: has a budget.
        file: to read.
        model: what the plan is to be for; see `save_plan`. None: not known.

    Raises:
        OffloadError: without a budget, and after the first iteration.
        ValueError: if the file is not a plan, or one of another model or layout.
        OSError: if the file cannot be read.
    """
    controller = engine.budget
    if controller is None or controller.has_begun:
        raise OffloadError("load_plan() needs OffloadConfig(gpu_budget=...); call it before the first iteration")
    saved, source = parse_saved(Path(file).read_text(), os.fspath(file)), os.fspath(file)
    check_described(saved, model or {}, source)
    controller.start_with(saved, source)


def plot_budget(engine: EngineView, file: str | os.PathLike[str]) -> None:
    """Draw the throughput that is predicted for every budget, with the chosen point and the measured one.

    Args:
        engine: has a budget and has run some steps.
        file: path to write; its suffix, such as ".png" or ".svg", selects the format.

    Raises:
        OffloadError: if the engine has no budget, or has not decided yet.
        ModuleNotFoundError: without matplotlib (pip install "offload-engine[plots]").
    """
    controller = engine.budget
    summary = None if controller is None else controller.summary
    if controller is None or summary is None:
        raise OffloadError(f"nothing to draw: {_NOTHING}")
    marks = [_mark("chosen", summary.predicted_peak_bytes, summary.predicted_step_ms, "s")]
    if summary.measured_peak_bytes and summary.measured_step_ms:
        marks.append(_mark("measured", summary.measured_peak_bytes, summary.measured_step_ms, "x"))
    curve = [Point(nbytes, 1e3 / milliseconds) for nbytes, milliseconds in controller.curve if milliseconds > 0]
    draw_budgets(file, curve, marks, summary.budget_bytes, "memory of the process", "steps a second")


def _mark(name: str, nbytes: int, milliseconds: float, shape: str) -> Mark:
    return Mark(name, Point(nbytes, 1e3 / milliseconds if milliseconds > 0 else 0.0), shape)
