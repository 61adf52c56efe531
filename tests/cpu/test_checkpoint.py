# SPDX-License-Identifier: Apache-2.0
"""`checkpoint` and `CheckpointOffload`: PyTorch's checkpointing with its inputs on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from offload_engine import (
    CheckpointOffload,
    GroupWindow,
    OffloadConfig,
    OffloadEngine,
    OffloadError,
    ResidencyMeter,
    checkpoint,
    manage_activations,
)
from offload_engine._devices.cpu import CpuDevice
from tests.adversarial import AdversarialDevice
from tests.checkpointed import (
    DEPTH,
    INPUT_BYTES,
    Stack,
    WatchedStack,
    all_equal,
    first_recomputation,  # noqa: F401 (a fixture)
)
from tests.decoders import HIDDEN, LENGTH
from tests.lookups import present

Checkpoint = Callable[..., Any]


def make_offload(device: Any, horizon: int = 2, meter: ResidencyMeter | None = None) -> CheckpointOffload:
    config = OffloadConfig(min_tensor_bytes=1024, policy=GroupWindow(horizon))
    return CheckpointOffload(engine=OffloadEngine(config, device, meter))


@pytest.fixture
def offload(device: AdversarialDevice) -> Iterator[CheckpointOffload]:
    offload = make_offload(device)
    yield offload
    offload.close()


def run(
    function: Checkpoint, is_reentrant: bool = False, num_steps: int = 2, around_forward: Any = None, **options: Any
) -> list[torch.Tensor]:
    """Train a `Stack` that checkpoints its blocks by `function`; returns losses and gradients."""
    torch.manual_seed(0)
    model = Stack(call=lambda block, x: function(block, x, use_reentrant=is_reentrant, **options))
    seen: list[torch.Tensor] = []
    for _ in range(num_steps):
        with around_forward or nullcontext():
            loss = model(torch.randn(2, LENGTH, HIDDEN))
        loss.backward()
        seen += [loss.detach(), *(present(p.grad).clone() for p in model.parameters())]
    return seen


# -- parity and residency ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_the_function_in_a_with_statement(offload: CheckpointOffload, is_reentrant: bool) -> None:
    """Around the whole loop, and around each forward alone."""
    expected = run(torch_checkpoint, is_reentrant)
    with offload:
        assert all_equal(run(checkpoint, is_reentrant), expected)
    assert offload.stats.copied_out_bytes == DEPTH * INPUT_BYTES
    assert all_equal(run(checkpoint, is_reentrant, around_forward=offload), expected)


@pytest.mark.parametrize(("kind", "horizon"), [("adversarial", 1), ("cpu", 2), ("adversarial", 3)])
@pytest.mark.parametrize("is_saved", [False, True])
def test_an_input_goes_when_it_was_read(device: AdversarialDevice, kind: str, horizon: int, is_saved: bool) -> None:
    """In the rest of its layer's backward only those are there that come next, of which one less than the horizon.

    What its layer saves leaves with the layer, as without offload: it counts with the recomputation, which does not.
    """
    meter = ResidencyMeter()
    offload = make_offload(CpuDevice("none") if kind == "cpu" else device, horizon, meter)
    begin = {"begin": torch.square} if is_saved else {}
    model = WatchedStack(lambda block, x: offload.checkpoint(block, x), **begin)
    model.look = lambda: meter.current_bytes
    model(torch.randn(2, LENGTH, HIDDEN)).backward()
    ahead = [min(horizon - 1, left) * INPUT_BYTES for left in reversed(range(DEPTH))]
    assert model.seen == [(int(is_saved), nbytes) for nbytes in ahead]
    assert meter.current_bytes == 0 and offload.engine.pool.num_leases == 0
    offload.close()


def test_an_input_of_several_checkpoints_goes_with_the_last(offload: CheckpointOffload) -> None:
    """It stays until then: to hand it over would mean as many copy-ins."""
    mask = (torch.rand(2, LENGTH, HIDDEN) > 0.5).float()

    def masked(function: Checkpoint) -> list[torch.Tensor]:
        return run(lambda block, x, use_reentrant: function(block, x, mask, use_reentrant=use_reentrant))

    assert all_equal(masked(offload.checkpoint), masked(torch_checkpoint))
    assert offload.stats.copied_out_bytes == (DEPTH + 1) * INPUT_BYTES
    assert offload.stats.copied_in_bytes == DEPTH * INPUT_BYTES  # the last input never left
    assert offload.engine.pool.num_leases == 0


def passed_twice(function: Checkpoint, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = function(lambda a, b: a.sin() * b.cos(), *[2 * x] * 2, use_reentrant=False)
    return x


def views(function: Checkpoint, x: torch.Tensor, cut: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    def sines(*parts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.sin() for part in parts])

    first = function(sines, *cut((2 * x).t()), use_reentrant=False)
    return function(sines, *cut(torch.cat([first, first])[:64].t()), use_reentrant=False)


def by_keyword(function: Checkpoint, x: torch.Tensor) -> torch.Tensor:
    """One activation is passed by position, one by keyword, beside PyTorch's own."""

    def scaled(x: torch.Tensor, *, by: torch.Tensor, power: int) -> torch.Tensor:
        return (x * by).tanh() ** power

    options = {"use_reentrant": False, "preserve_rng_state": False, "early_stop": False}
    return function(scaled, 2 * x, by=3 * x, power=2, **options)


@pytest.mark.parametrize(
    ("run_once", "num_out", "num_in"),
    [
        pytest.param(passed_twice, 3, 2, id="passed twice"),
        pytest.param(lambda f, x: views(f, x, lambda y: (y[32:],)), 2, 1, id="strided, with an offset"),
        pytest.param(lambda f, x: views(f, x, lambda y: y.split(32)), 3, 1, id="two views of a storage"),
        pytest.param(by_keyword, 2, 0, id="keywords"),
    ],
)
def test_whatever_the_inputs_are_each_storage_moves_once(
    offload: CheckpointOffload, run_once: Callable[..., torch.Tensor], num_out: int, num_in: int
) -> None:
    def gradient(function: Checkpoint) -> torch.Tensor:
        torch.manual_seed(0)
        x = torch.randn(64, 64).requires_grad_()
        return torch.autograd.grad(run_once(function, x).sum(), x)[0]

    assert torch.equal(gradient(offload.checkpoint), gradient(torch_checkpoint))
    stats = offload.stats
    assert stats.copied_out_bytes == stats.managed_bytes == num_out * 4 * 64 * 64
    assert stats.copied_in_bytes == num_in * 4 * 64 * 64


@pytest.mark.parametrize("horizon", [1, 2])
def test_a_retained_graph_gets_its_inputs_again(device: AdversarialDevice, horizon: int) -> None:
    """From the host: each backward behind the first copies all of them in."""
    offload = make_offload(device, horizon)

    def gradients(function: Checkpoint) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Stack(call=lambda block, x: function(block, x, use_reentrant=False))
        loss = model(torch.randn(2, LENGTH, HIDDEN))
        seen = list(torch.autograd.grad(loss, list(model.blocks[2].parameters()), retain_graph=True))
        for i in range(3):
            seen += torch.autograd.grad(loss, list(model.parameters()), retain_graph=i < 2)
        return seen

    with device.observe_compute():
        found = gradients(offload.checkpoint)
    assert all_equal(found, gradients(torch_checkpoint))
    # And two for the part, of which the last, with room for two, had not left.
    assert offload.stats.copied_in_bytes == (3 * DEPTH + 3 - horizon) * INPUT_BYTES
    assert offload.engine.pool.num_leases == 0 and not offload.engine.is_in_iteration
    offload.close()


def test_a_recomputation_that_raises(offload: CheckpointOffload) -> None:
    """The graph is still whole, so another backward is right; and one that is dropped gives everything back."""

    class Once(Exception):
        pass

    fails = iter((False, False, True, False, False, False, False, False))  # the second recomputation

    def wavy(x: torch.Tensor) -> torch.Tensor:
        if next(fails):
            raise Once
        return x.sin().cos()

    x = torch.randn(1024).requires_grad_()
    y = offload.checkpoint(wavy, 2 * offload.checkpoint(wavy, 2 * x))
    with pytest.raises(Once):
        y.sum().backward()
    y.sum().backward()
    expected = x.detach().clone().requires_grad_()
    (2 * (2 * expected).sin().cos()).sin().cos().sum().backward()
    assert torch.equal(x.grad, expected.grad)  # type: ignore[arg-type]
    del y
    assert offload.engine.pool.num_leases == 0 and not offload.engine.has_saved


def test_a_checkpoint_inside_a_checkpoint(offload: CheckpointOffload) -> None:
    """The outer one saves no input of the inner one, so there is nothing to offload."""

    def nest(function: Checkpoint) -> list[torch.Tensor]:
        def inner(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return function(block, x, use_reentrant=False)

        return run(lambda block, x, use_reentrant: function(inner, block, x, use_reentrant=use_reentrant))

    with offload:
        found = nest(checkpoint)
    assert offload.stats.num_groups == DEPTH and all_equal(found, nest(torch_checkpoint))


# -- outside, errors ---------------------------------------------------------------------------------------------------


def test_defaults_and_what_is_refused() -> None:
    offload = CheckpointOffload()
    assert offload.engine.config.policy == GroupWindow(2)
    with pytest.raises(ValueError, match="a config or an engine"):
        CheckpointOffload(OffloadConfig(), engine=offload.engine)
    offload.close()
    with pytest.raises(OffloadError, match=r"call it inside `with CheckpointOffload\(\):` or as a method of one"):
        checkpoint(torch.sin, torch.ones(3, requires_grad=True))
    with torch.no_grad():
        assert torch.equal(checkpoint(torch.sin, torch.ones(3)), torch.ones(3).sin())


# -- which one is in force ---------------------------------------------------------------------------------------------

CONFIG = OffloadConfig(min_tensor_bytes=1, directory="none")


def checkpointed() -> torch.Tensor:
    return checkpoint(nn.Linear(16, 16), torch.ones(8, 16, requires_grad=True)).sum()


@pytest.mark.parametrize("kinds", ["mc", "cm", "cc", "mcm", "c twice"])
def test_none_is_in_force_in_whatever_order_with_statements_are_left(kinds: str) -> None:
    """Of `manage_activations` for each "m" and `CheckpointOffload` for each "c"."""
    make = {"m": lambda: manage_activations(None, CONFIG), "c": lambda: CheckpointOffload(CONFIG)}
    made: list[Any] = [make["c"]()] * 2 if kinds == "c twice" else [make[kind]() for kind in kinds]
    for order in permutations(made):
        for context in made:
            context.__enter__()
        for context in order:
            checkpointed()
            context.__exit__(None, None, None)
        with pytest.raises(OffloadError, match="has no engine"):
            checkpointed()
    for context in made:
        context.close()
