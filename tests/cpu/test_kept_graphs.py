# SPDX-License-Identifier: Apache-2.0
"""A graph that is kept, as that of an evaluation with gradients, and the steps that go on meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload_engine import OffloadConfig, enable_activation_offloading, manage_activations
from offload_engine._budget.state import State
from tests.cpu.test_found_layers import Model

WIDTH, ROWS, DEPTH = 16, 8, 5
ALL = OffloadConfig(min_tensor_bytes=1)


class Net(Model):
    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)))


class Job:
    """A net, with or without offload, and its losses and gradients."""

    def __init__(self, enable: Callable[[nn.Module], Any] | None = None) -> None:
        self.model = Net()
        self.handle: Any = enable(self.model) if enable is not None else None
        self.seen: list[torch.Tensor] = []

    def loss(self, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        found: torch.Tensor = self.model(torch.randn(ROWS, WIDTH)).square().sum()
        return found

    def backward(self, *losses: torch.Tensor) -> None:
        torch.stack(losses).sum().backward()
        self.seen += [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad()

    def steps(self, num: int) -> None:
        for seed in range(num):
            self.backward(self.loss(seed))

    def assert_same(self, other: Job) -> None:
        assert all(torch.equal(a, b) for a, b in zip(self.seen, other.seen, strict=True))


def layers(model: nn.Module) -> Any:
    return enable_activation_offloading(model, config=ALL)


@pytest.fixture(params=["layers", "any model"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    if request.param == "layers":
        job = Job(layers)
        yield job
        job.handle.remove()
    else:
        model = Net()
        with manage_activations(model, ALL) as handle:
            job = Job()
            job.model, job.handle = model, handle
            yield job


def keep_and_train(job: Job) -> None:
    """A backward of the kept graph comes 4 steps later, twice, inside a later step and outside of all."""
    kept, other = job.loss(100), job.loss(101)
    job.steps(4)
    first = job.loss(7)
    job.backward(kept)
    job.backward(first)
    job.steps(2)
    job.backward(other)
    job.steps(2)


def test_a_later_backward_of_a_kept_graph(job: Job) -> None:
    plain = Job()
    keep_and_train(plain)
    keep_and_train(job)
    job.assert_same(plain)
    assert not job.handle.engine.is_in_iteration and not job.handle.engine.has_saved
    assert job.handle.stats.num_storages_left == job.handle.stats.prefetch_misses == 0


def test_steps_are_steps_while_a_graph_is_kept(job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job.steps(1)
    num_groups = job.handle.stats.num_groups
    kept = job.loss(100)
    with caplog.at_level(logging.WARNING):
        job.steps(2)  # the next forward finds that the first of these has begun behind the kept one
        for _ in range(5):
            job.steps(1)
            assert not job.handle.engine.is_in_iteration
            assert job.handle.stats.num_groups == num_groups
    assert caplog.text.count("saved storages outlive the iteration, the first is") == 1
    assert "evaluate under torch.no_grad()" in caplog.text
    file = tmp_path / "step.json"
    job.handle.record(file)
    job.steps(2)
    del kept
    job.steps(1)
    assert job.handle.stats.num_storages_left == 0 and job.handle.engine.last_record is not None


def test_a_budget_leaves_the_floor() -> None:
    job = Job(lambda model: enable_activation_offloading(model, config=ALL.replace(gpu_budget=64 << 20)))
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.01)
    kept = job.loss(100)
    for seed in range(14):
        job.loss(seed).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = job.handle.engine.budget.state
    job.handle.remove()
    assert state not in (State.FLOOR, State.MEASURE) and kept.requires_grad


# -- forwards whose backward comes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "order", ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 F1 F2 B2 B1 B0", "F0 F1 B1 B0", "F0 F1 X F2 B0 X F3 B1 B2 B3"]
)
def test_forwards_and_backwards_in_any_usual_order_are_one_iteration(job: Job, order: str) -> None:
    """X is a forward whose graph is dropped."""
    plain = Job()
    plain_run, mine = run(plain, order), run(job, order)
    job.assert_same(plain)
    assert plain_run == 0 and mine == 1


def run(job: Job, order: str) -> int:
    """Return the number of iterations, told by their statistics."""
    losses: dict[str, torch.Tensor] = {}
    found: list[Any] = []
    for index, action in enumerate(order.split()):
        if action == "X":
            job.loss(index)
        elif action[0] == "F":
            losses[action[1:]] = job.loss(index)
        else:
            job.backward(losses.pop(action[1:]))
        if job.handle is not None and not any(job.handle.stats is each for each in found):
            found.append(job.handle.stats)
    return len(found)
