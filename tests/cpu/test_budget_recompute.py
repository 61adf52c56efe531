# SPDX-License-Identifier: Apache-2.0
"""Checkpointing as a budget's third choice for a layer: right, or not chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload_engine import OffloadConfig, enable_activation_offloading
from offload_engine._budget.state import State
from offload_engine._budget.summary import BudgetSummary
from offload_engine.errors import BudgetError
from offload_engine.frontends.layers import LayerOffload
from offload_engine.plan_files import load_plan, save_plan

HIDDEN, ROWS, DEPTH = 32, 256, 6
INPUT_BYTES = ROWS * HIDDEN * 4
Context = Callable[[], AbstractContextManager[Any]]


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


class Net(nn.Module):
    """Layers, each run by `run`."""

    def __init__(self, make: Callable[[], nn.Module] = Layer, run: Callable[..., Any] = lambda layer, x: layer(x)):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(DEPTH))
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.run(layer, x)
        return x


class Job:
    """Trains a net; the same batches and random numbers in each job."""

    def __init__(self, make: Callable[[], Net], settings: dict[str, Any], context: Context = nullcontext) -> None:
        torch.manual_seed(0)
        self.net = make()
        config = OffloadConfig(min_tensor_bytes=1, directory="none", **settings)
        self.handle: LayerOffload = enable_activation_offloading(self.net, "none", config=config)
        self._optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self._context = context
        self.trace: list[Any] = []
        self.peaks: list[int] = []
        self.num_steps = 0

    def steps(self, num_steps: int, rows: int = ROWS, num_forwards: int = 1) -> Job:
        for _ in range(num_steps):
            torch.manual_seed(100 + self.num_steps)
            losses = []
            for _ in range(num_forwards):
                with self._context():
                    losses.append(self.net(torch.randn(rows, HIDDEN)).float().square().mean())
            sum(losses[1:], losses[0]).backward()
            grads = [p.grad.clone() for p in self.net.parameters() if p.grad is not None]
            self.trace.append(([loss.item() for loss in losses], grads, torch.get_rng_state()))
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.num_steps += 1
            self.peaks.append(self.handle.stats.peak_resident_bytes)
        return self

    @property
    def summary(self) -> BudgetSummary:
        assert self.handle.engine.budget is not None
        found = self.handle.engine.budget.summary
        assert found is not None
        return found

    @property
    def state(self) -> State:
        assert self.handle.engine.budget is not None
        return self.handle.engine.budget.state

    def recomputed(self) -> list[int]:
        """Return the layers that are checkpointed now."""
        return [i for i, layer in enumerate(self.net.layers) if "forward" in layer.__dict__]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Sums in another order would be other sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def assert_same(job: Job, reference: Job) -> None:
    for (losses, grads, state), (expected_losses, expected, expected_state) in zip(
        job.trace, reference.trace, strict=False
    ):
        assert losses == expected_losses
        assert all(torch.equal(grad, other) for grad, other in zip(grads, expected, strict=True))
        assert torch.equal(state, expected_state)


def plain(make: Callable[[], Net] = Net, context: Context = nullcontext, **how: int) -> Job:
    return Job(make, {"dry_run": True}, context).steps(8, **how)


def lowest(make: Callable[[], Net] = Net, recompute: str = "auto", **how: int) -> int:
    return Job(make, {"gpu_budget": 1 << 40, "recompute": recompute}).steps(8, **how).summary.lowest_bytes


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("num_forwards", [1, 2])
@pytest.mark.parametrize("context", [nullcontext, autocast])
def test_below_the_floor_of_offload_layers_are_checkpointed_and_bits_are_equal(
    context: Context, num_forwards: int
) -> None:
    reference = Job(Net, {"dry_run": True}, context).steps(8, num_forwards=num_forwards)
    least = Job(Net, {"gpu_budget": 1 << 40}, context).steps(8, num_forwards=num_forwards).summary.lowest_bytes
    for budget in (least, round(1.3 * least), max(reference.peaks)):
        job = Job(Net, {"gpu_budget": budget}, context).steps(10, num_forwards=num_forwards)
        assert_same(job, reference)
        assert max(job.peaks[6:]) <= budget
        assert job.state is State.HOLD
        summary = job.summary
        assert summary.predicted_peak_bytes <= budget
        assert (summary.recomputed_bytes > 0) == bool(job.recomputed())
        if budget == least:
            assert job.recomputed() == list(range(DEPTH))
            assert "recomputed" in job.handle.report()
        if budget == max(reference.peaks):
            assert not job.recomputed() and not job.handle.stats.copied_out_bytes


def test_inputs_of_checkpointed_layers_are_offloaded() -> None:
    job = Job(Net, {"gpu_budget": lowest()}).steps(8)
    assert job.recomputed() == list(range(DEPTH))
    assert job.handle._groups._checkpointed == set(job.net.layers)  # so what is read is released at once
    assert job.handle.stats.copied_out_bytes == (DEPTH - 2) * INPUT_BYTES  # the first has no gradient, the last stays
    assert [layer.num_runs for layer in job.net.layers] == [4 + 2 * 4] * DEPTH  # four steps are measured


def test_off_forbids_it() -> None:
    auto, off = lowest(), lowest(recompute="off")
    assert auto < off
    with pytest.raises(BudgetError, match="of a step with everything offloaded, of which"):
        Job(Net, {"gpu_budget": auto, "recompute": "off"}).steps(8)
    with pytest.raises(BudgetError, match="with everything offloaded, and recomputed where that is known how"):
        Job(Net, {"gpu_budget": auto - 1}).steps(8)
    job = Job(Net, {"gpu_budget": off, "recompute": "off"}).steps(8)
    assert not job.recomputed() and not job.summary.recomputed_bytes
    with pytest.raises(ValueError, match="recompute must be one of auto, off, got 'on'"):
        OffloadConfig(recompute="on")  # type: ignore[arg-type]


class Counting(Layer):
    """Writes a buffer in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(HIDDEN)

    def forward(self, x: torch.Tensor, past_key_values: Any = None) -> torch.Tensor:
        return super().forward(self.norm(x))


class Compiled(Layer):
    def __init__(self) -> None:
        super().__init__()
        self._compiled_call_impl = super()._call_impl  # type: ignore[assignment]


class Checkpointing(Layer):
    """Checkpoints a part of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = True


def twice(layer: nn.Module, x: torch.Tensor) -> Any:
    return layer(layer(x))


def with_cache(layer: nn.Module, x: torch.Tensor) -> Any:
    return layer(x, past_key_values=[])


def checkpointed(layer: nn.Module, x: torch.Tensor) -> Any:
    return checkpoint(layer, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Net(Counting), "its forward writes buffers"),
        (lambda: Net(Compiled), "it is compiled"),
        (lambda: Net(Checkpointing), "it checkpoints a part of itself"),
        (lambda: Net(run=with_cache), "it fills a cache of keys and values"),
        (lambda: Net(run=checkpointed), "its caller checkpoints it"),
        (lambda: Net(run=twice), ""),
    ],
)
def test_layers_that_cannot_run_twice_are_not_offered(
    make: Callable[[], Net], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        least = lowest(make)
    assert "gpu_budget: 0 of 6 layers may be checkpointed" in caplog.text
    assert not reason or f"not layers.0: {reason}" in caplog.text
    job = Job(make, {"gpu_budget": least}).steps(8)
    assert_same(job, plain(make))
    assert not job.recomputed() and not job.summary.recomputed_bytes


def test_a_layer_that_communicates_is_not_offered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other ranks might not run it again."""
    counts = iter(range(10**9))
    monkeypatch.setattr("offload_engine._compat.torch_private.num_collectives", lambda: next(counts))
    with caplog.at_level(logging.INFO):
        lowest()
    assert "not layers.0: its forward communicates with other ranks" in caplog.text


def test_longer_sequences_are_measured_without_it_and_recomputed_again(caplog: pytest.LogCaptureFixture) -> None:
    """Growth shows in what is saved beside checkpoints, which is little."""
    reference = Job(Net, {"dry_run": True}).steps(8).steps(8, rows=ROWS * 3 // 2)
    budget = round(1.6 * lowest())
    job = Job(Net, {"gpu_budget": budget}).steps(8)
    before = job.recomputed()
    with caplog.at_level(logging.INFO):
        job.steps(8, rows=ROWS * 3 // 2)
    assert caplog.text.count("gpu_budget: activations have grown") == 1
    assert_same(job, reference)
    assert 0 < len(before) <= len(job.recomputed()) == DEPTH
    assert max(job.peaks[-3:]) <= budget


def test_a_plan_begins_with_checkpoints(tmp_path: Path) -> None:
    budget, file = lowest(), tmp_path / "plan.json"
    job = Job(Net, {"gpu_budget": budget}).steps(8)
    save_plan(job.handle.engine, file)
    resumed = Job(Net, {"gpu_budget": budget})
    load_plan(resumed.handle.engine, file)
    resumed.steps(4)
    assert_same(resumed, job)
    assert resumed.recomputed() == list(range(DEPTH)) and max(resumed.peaks) <= budget


def test_remove_restores_the_layers() -> None:
    job = Job(Net, {"gpu_budget": lowest()}).steps(8)
    assert job.recomputed()
    job.handle.remove()
    assert not job.recomputed()
    runs = [layer.num_runs for layer in job.net.layers]
    job.net(torch.randn(ROWS, HIDDEN)).square().mean().backward()
    assert [layer.num_runs for layer in job.net.layers] == [n + 1 for n in runs]
