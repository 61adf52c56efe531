# SPDX-License-Identifier: Apache-2.0
"""`manage_activations` within a budget: groups by size, of which those of layers may be recomputed."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn

from offload_engine import manage_activations
from offload_engine._budget.state import State
from tests.cpu.test_budget import DEPTH, HIDDEN, ByFrontEnd, assert_same_training, config
from tests.cpu.test_budget_recompute import INPUT_BYTES, ROWS, Layer, Net

pytestmark = pytest.mark.usefixtures("one_thread")


class Listed(nn.Module):
    """A net whose layers can be found, and what is saved besides."""

    def __init__(self, num_runs: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Net())
        self._num_runs = num_runs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            for _ in range(self._num_runs):
                x = layer(x)
        return x


class Managed(ByFrontEnd):
    """Trains a net inside `with` statements, with dropout."""

    rows = ROWS

    def __init__(self, net: nn.Module | None = None, is_around_all: bool = False, **settings: Any) -> None:
        super().__init__(net or Listed())  # type: ignore[arg-type]
        self.activations = manage_activations(self.model, config(**settings), group_bytes=2 * INPUT_BYTES)
        self._is_around_all = is_around_all
        if is_around_all:
            self.activations.__enter__()
        self.engine = self.activations.engine

    def context(self) -> Any:
        return super().context() if self._is_around_all else self.activations

    def run(self, batches: list[torch.Tensor]) -> float:
        torch.manual_seed(100 + len(self.trace))
        return super().run(batches)

    def checkpointed(self) -> list[int]:
        return [i for i, layer in enumerate(self.model.layers) if "forward" in layer.__dict__]


def lowest(**settings: Any) -> int:
    return Managed(gpu_budget=1 << 40, **settings).steps(8, num_microbatches=1).summary.lowest_bytes


@pytest.mark.parametrize("is_around_all", [False, True], ids=["of each forward", "of all steps"])
def test_below_the_floor_of_offload_layers_are_checkpointed(is_around_all: bool) -> None:
    reference = Managed(dry_run=True).steps(10, num_microbatches=1)
    least = lowest()
    assert least < lowest(recompute="off")
    job = Managed(is_around_all=is_around_all, gpu_budget=least).steps(10, num_microbatches=1)
    assert_same_training(job, reference)
    assert job.checkpointed() == list(range(DEPTH)) and job.states[-1] is State.HOLD
    assert max(job.peaks[6:]) <= least and job.summary.recomputed_bytes > 0
    runs = [layer.num_runs for layer in job.model.layers]
    assert runs == [3 + 2 * 7] * DEPTH, "three steps are measured"
    with torch.no_grad():
        job.model(torch.randn(ROWS, HIDDEN))
    if not is_around_all:
        job.model(torch.randn(ROWS, HIDDEN)).sum().backward()  # outside, nothing is checkpointed
        assert [layer.num_runs for layer in job.model.layers] == [count + 2 for count in runs]
    if is_around_all:
        job.activations.__exit__(None, None, None)
    job.activations.close()
    assert not job.checkpointed() and not any(layer._forward_pre_hooks for layer in job.model.layers)


def test_groups_of_layers_have_their_names_and_others_do_not() -> None:
    job = Managed(gpu_budget=1 << 40).steps(6, num_microbatches=1)
    (shape,) = job.controller.decider.known.job.shapes
    names = [group.name for group in shape.groups]
    assert list(dict.fromkeys(names)) == [*(f"layers.{index}" for index in range(DEPTH)), "saved tensors"]
    assert len(names) > DEPTH + 1, "a large layer has several"
    assert [layer for layer in dict.fromkeys(group.layer for group in shape.groups)] == [*range(DEPTH), -1]


def test_an_error_in_a_layer_leaves_no_layer_open() -> None:
    job = Managed(gpu_budget=lowest()).steps(8, num_microbatches=1)
    layer = job.model.layers[1]
    assert isinstance(layer, Layer)
    handle = layer.up.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), job.activations:
        job.model(torch.randn(ROWS, HIDDEN))
    handle.remove()
    reference = Managed(dry_run=True).steps(10, num_microbatches=1)
    torch.manual_seed(0)
    job.steps(2, num_microbatches=1)
    assert job.checkpointed() == list(range(DEPTH))
    assert [len(trace) for trace in job.trace] == [len(trace) for trace in reference.trace]


def test_a_layer_that_runs_twice_in_a_forward_is_not_offered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    Managed(Listed(num_runs=2), gpu_budget=1 << 40).steps(6, num_microbatches=1)
    assert f"0 of {DEPTH} layers may be checkpointed" in caplog.text


def test_without_layers_nothing_is_recomputed(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    job = Managed(nn.Linear(HIDDEN, HIDDEN), gpu_budget=1 << 40)
    job.steps(6, num_microbatches=1)
    assert "nothing is recomputed, as no layers were found" in caplog.text
    assert job.states[-1] is State.HOLD
