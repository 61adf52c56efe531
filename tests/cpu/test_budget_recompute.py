# SPDX-License-Identifier: Apache-2.0
"""Checkpointing as a budget's third choice for a layer: right, or not chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload_engine._budget.state import State
from offload_engine.errors import BudgetError
from offload_engine.plan_files import load_plan, save_plan
from tests.cpu.test_budget import BASE, DEPTH, HIDDEN, Allocator, ByLayers, assert_same_training, config

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = 256
INPUT_BYTES = ROWS * HIDDEN * 4
NUM_COLLECTIVES: list[int] = []
Context = Callable[[], AbstractContextManager[Any]]
Run = Callable[[nn.Module, torch.Tensor], Any]


class Layer(nn.Module):
    """An MLP with dropout; what it is called with besides is read as a mask, or ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)
        self.num_runs = 0

    def forward(self, x: torch.Tensor, past_key_values: Any = None) -> torch.Tensor:
        self.num_runs += 1
        hidden = nn.functional.dropout(nn.functional.gelu(self.up(x)), 0.1, self.training)
        return x + self.down(hidden)


class Net(nn.Sequential):
    """Layers, each run by `run`."""

    def __init__(self, make: Callable[[], nn.Module] = Layer, run: Run = lambda layer, x: layer(x)) -> None:
        torch.manual_seed(0)
        super().__init__(*(make() for _ in range(DEPTH)))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = self.run(layer, x)
        return x


class NetJob(ByLayers):
    """Trains a net; all forwards of a step come before its one backward."""

    rows = ROWS

    def __init__(self, net: Net, context: Context = nullcontext, **settings: Any) -> None:
        super().__init__(config(**settings), net)
        self._context = context

    def run(self, batches: list[torch.Tensor]) -> float:
        torch.manual_seed(100 + len(self.trace))
        losses = []
        for batch in batches:
            with self._context():
                losses.append(self.model(batch).float().square().mean())
        total = sum(losses[1:], losses[0])
        total.backward()
        return total.item()

    def steps(self, num_steps: int, num_microbatches: int = 1, **settings: int) -> Self:
        return super().steps(num_steps, num_microbatches=num_microbatches, **settings)

    def recomputed(self) -> list[int]:
        """Return the layers that are checkpointed now."""
        return [i for i, layer in enumerate(self.model) if "forward" in layer.__dict__]


def lowest_of(net: Net, recompute: str = "auto") -> int:
    return NetJob(net, gpu_budget=1 << 40, recompute=recompute).steps(8).summary.lowest_bytes


@cache
def lowest(recompute: str = "auto") -> int:
    return lowest_of(Net(), recompute)


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize(("context", "num_forwards"), [(nullcontext, 1), (autocast, 2)])
def test_below_the_floor_of_offload_layers_are_checkpointed(context: Context, num_forwards: int) -> None:
    reference = NetJob(Net(), context, dry_run=True).steps(8, num_forwards)
    least = NetJob(Net(), context, gpu_budget=1 << 40).steps(8, num_forwards).summary.lowest_bytes
    for budget in (least, round(1.3 * least), max(reference.peaks)):
        job = NetJob(Net(), context, gpu_budget=budget).steps(4, num_forwards)
        first = job.summary.predicted_peak_bytes
        job.steps(6, num_forwards)
        assert_same_training(job, reference)
        assert max(job.peaks[6:]) <= budget
        assert job.peaks[3] <= max(*job.peaks[:3], first), "the first step with a decision holds no more"
        assert job.peaks[4] == first, "groups alone are measured, so the first prediction is exact"
        assert job.states[-1] is State.HOLD
        assert job.summary.predicted_peak_bytes <= budget
        assert (job.summary.recomputed_bytes > 0) == bool(job.recomputed())
        if budget == least:
            assert job.recomputed() == list(range(DEPTH))
            assert "recomputed" in job.handle.report()
        if budget == max(reference.peaks):
            assert not job.recomputed() and not job.moved[-1]


def test_inputs_of_checkpointed_layers_are_offloaded_until_it_is_removed() -> None:
    job = NetJob(Net(), gpu_budget=lowest()).steps(8)
    assert job.recomputed() == list(range(DEPTH))
    assert all(option.stops_early for option in job.controller.decider.known.costs.options)
    assert job.handle._groups._checkpointed == set(job.model)  # so what is read is released at once
    assert job.moved[-1] == (DEPTH - 2) * INPUT_BYTES  # the first has no gradient, the last stays
    assert [layer.num_runs for layer in job.model] == [3 + 2 * 5] * DEPTH  # three steps are measured
    job.handle.remove()
    assert not job.recomputed()
    job.model(torch.randn(ROWS, HIDDEN)).square().mean().backward()
    assert [layer.num_runs for layer in job.model] == [3 + 2 * 5 + 1] * DEPTH


@pytest.mark.parametrize("in_first", [BASE, 0])
def test_a_step_with_checkpoints_begins_with_an_empty_allocator(in_first: int) -> None:
    """No plan knows the first; on an H200 its blocks let the third hold 1,024 MiB more than once they were returned."""
    freed = 12 * INPUT_BYTES  # by a layer, which a GPU has on the device again while the layer is recomputed
    job = NetJob(Net(), gpu_budget=BASE + 2 * (lowest() + freed))
    gauge = Allocator(job, 0, (in_first, 0))
    while not job.recomputed():
        assert len(job.states) < 5
        job.step(1)
    assert (gauge.held_bytes() > job.summary.budget_bytes) == bool(in_first)
    num_trims = gauge.num_trims
    job.step(1)
    assert gauge.num_trims == num_trims + 1 and gauge.held_bytes() <= job.summary.budget_bytes
    job.steps(2)
    assert in_first or (gauge.num_trims == num_trims + 1 and job.states[-1] is State.HOLD)


def test_off_forbids_it() -> None:
    auto, off = lowest(), lowest(recompute="off")
    assert auto < off
    with pytest.raises(BudgetError, match=r"of a step with everything offloaded \(saved tensors in use"):
        NetJob(Net(), gpu_budget=auto, recompute="off").steps(8)
    with pytest.raises(BudgetError, match="with everything offloaded, and recomputed where possible"):
        NetJob(Net(), gpu_budget=auto - 1).steps(8)
    job = NetJob(Net(), gpu_budget=off, recompute="off").steps(8)
    assert not job.recomputed() and not job.summary.recomputed_bytes


class Counting(Layer):
    """Writes a buffer in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: torch.Tensor, past_key_values: Any = None) -> torch.Tensor:
        return super().forward(self.norm(x))


class Communicating(Layer):
    """The other ranks might not run it again."""

    def forward(self, x: torch.Tensor, past_key_values: Any = None) -> torch.Tensor:
        NUM_COLLECTIVES.append(1)
        return super().forward(x)


def net_with(name: str, value: Callable[[nn.Module], Any]) -> Net:
    """Return one whose layers have this attribute."""
    net = Net()
    for layer in net:
        setattr(layer, name, value(layer))
    return net


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Net(Counting), "its forward writes buffers"),
        (lambda: net_with("_compiled_call_impl", lambda layer: layer._call_impl), "it is compiled"),
        (lambda: net_with("gradient_checkpointing", lambda _: True), "it checkpoints a part of itself"),
        (lambda: Net(Communicating), "its forward communicates with other ranks"),
        (lambda: Net(run=lambda layer, x: layer(x, past_key_values=[])), "it fills a cache of keys and values"),
        (lambda: Net(run=lambda layer, x: checkpoint(layer, x, use_reentrant=False)), "its caller checkpoints it"),
        (lambda: Net(run=lambda layer, x: layer(layer(x))), ""),
    ],
)
def test_layers_that_cannot_run_twice_are_not_offered(
    make: Callable[[], Net], reason: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload_engine._compat.torch_private.num_collectives", lambda: len(NUM_COLLECTIVES))
    with caplog.at_level(logging.INFO):
        least = lowest_of(make())
    assert "gpu_budget: 0 of 6 layers may be checkpointed" in caplog.text
    assert not reason or f"not 0: {reason}" in caplog.text
    job = NetJob(make(), gpu_budget=least).steps(8)
    assert_same_training(job, NetJob(make(), dry_run=True).steps(8))
    assert not job.recomputed() and not job.summary.recomputed_bytes


def test_longer_sequences_are_measured_without_it_and_recomputed_again(caplog: pytest.LogCaptureFixture) -> None:
    """Growth shows in what is saved beside checkpoints, which is little."""
    reference = NetJob(Net(), dry_run=True).steps(8).steps(8, rows=ROWS * 3 // 2)
    budget = round(1.6 * lowest())
    job = NetJob(Net(), gpu_budget=budget).steps(8)
    before = job.recomputed()
    with caplog.at_level(logging.INFO):
        job.steps(8, rows=ROWS * 3 // 2)
    assert caplog.text.count("gpu_budget: activations have grown") == 1
    assert_same_training(job, reference)
    assert 0 < len(before) <= len(job.recomputed()) == DEPTH and max(job.peaks[-3:]) <= budget


def test_a_plan_begins_with_checkpoints(tmp_path: Path) -> None:
    budget, file = lowest(), tmp_path / "plan.json"
    job = NetJob(Net(), gpu_budget=budget).steps(8)
    save_plan(job.engine, file)
    resumed = NetJob(Net(), gpu_budget=budget)
    load_plan(resumed.engine, file)
    resumed.steps(4)
    assert_same_training(resumed, job)
    assert resumed.recomputed() == list(range(DEPTH)) and max(resumed.peaks) <= budget
