# SPDX-License-Identifier: Apache-2.0
"""Pictures of budgets: the numbers that are drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_engine import OffloadConfig, enable_activation_offloading
from offload_engine.plan_files import plot_budget
from offload_engine.planning.hardware import find_hardware
from offload_engine.rehearsal.forecast import Forecast, StepForecast
from offload_engine.rehearsal.tables import draw_forecast
from tests.lookups import present

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure  # noqa: E402

MIB, GIB = 1 << 20, 1 << 30
Drawn = dict[str, Any]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """Return the points of each line of the next picture, by its name; under "units" the labels of the axes."""
    found: Drawn = {}

    def note(figure: Figure, file: str, **_: Any) -> None:
        axes: Any = figure.axes[0]
        found.update({line.get_label(): [(float(x), float(y)) for x, y in line.get_xydata()] for line in axes.lines})
        found["units"] = axes.get_xlabel(), axes.get_ylabel()

    monkeypatch.setattr(Figure, "savefig", note)
    return found


@pytest.mark.usefixtures("one_thread")
def test_a_budget_of_a_small_job_has_a_curve_that_ends_at_the_budget(drawn: Drawn, tmp_path: Path) -> None:
    """It had been a line between two points, everything recomputed and everything kept."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(8)]
    model = nn.Sequential(*layers)
    config = OffloadConfig(min_tensor_bytes=1, gpu_budget=MIB, directory="none")
    handle = enable_activation_offloading(model, "none", config=config, layers=layers)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(8):
        model(torch.randn(64, 32)).square().mean().backward()
        optimizer.step()
    plot_budget(handle.engine, tmp_path / "plan.png")
    curve = drawn["predicted for each budget"]
    assert (
        len(curve) > 3 and curve == sorted(curve) and sorted(rate for _, rate in curve) == [rate for _, rate in curve]
    )
    assert curve[-1] == (1.0, curve[-2][1]) and drawn["units"] == ("memory of the process, MiB", "steps a second")
    assert drawn["chosen"] == [
        (present(present(handle.engine.budget).summary).predicted_peak_bytes / MIB, curve[-1][1])
    ]
    assert all(x == 1.0 for x, _ in drawn["budget"])


def test_a_forecast_draws_its_curve_beside_the_ways_to_train(drawn: Drawn) -> None:
    def step(name: str, gib: int, milliseconds: float, fits: bool = True) -> StepForecast:
        return StepForecast(name, milliseconds, gib * GIB, 0, fits)

    ways = step("no offload", 60, 100.0, False), step("all offloaded", 20, 400.0), step("chosen", 39, 125.0)
    curve = step("chosen", 20, 200.0), step("chosen", 60, 100.0)
    h200 = find_hardware("h200x2")
    forecast = Forecast(h200, 2, 2, 40 * GIB, h200.link(2, False), 2000, 0.0, (), (), ways, curve)
    draw_forecast(forecast, "plan.png")
    assert drawn.pop("units") == ("fullest GPU of h200x2, predicted, GiB", "tokens a second and GPU, predicted")
    assert drawn.pop("budget") and drawn == {
        "predicted for each budget": [(20, 5e3), (60, 1e4)],
        "no offload: does not fit": [(60, 1e4)],
        "all offloaded": [(20, 2.5e3)],
        "chosen: fastest that fits": [(39, 8e3)],
    }
