# SPDX-License-Identifier: Apache-2.0
"""`checkpoint` and `CheckpointOffload`: PyTorch's checkpointing with its inputs on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import offload_engine
from offload_engine import (
    CheckpointOffload,
    CopyError,
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
    HIDDEN,
    INPUT_BYTES,
    LENGTH,
    Block,
    Stack,
    WatchedStack,
    all_equal,
    first_recomputation,  # noqa: F401 (a fixture)
    make_language_model,
    random_tokens,
    train,
    watch_inputs,
)

Checkpoint = Callable[..., Any]


@pytest.fixture
def offload(device: AdversarialDevice) -> Iterator[CheckpointOffload]:
    config = OffloadConfig(min_tensor_bytes=1024, policy=GroupWindow(2))
    offload = CheckpointOffload(engine=OffloadEngine(config, device))
    yield offload
    offload.close()


def run(function: Checkpoint, is_reentrant: bool = False, num_steps: int = 2, **options: Any) -> list[torch.Tensor]:
    """Train a `Stack` that checkpoints its blocks by `function`; returns losses and gradients."""
    torch.manual_seed(0)
    model = Stack(call=lambda block, x: function(block, x, use_reentrant=is_reentrant, **options))
    seen: list[torch.Tensor] = []
    for _ in range(num_steps):
        loss = model(torch.randn(2, LENGTH, HIDDEN))
        loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    return seen


# -- parity and residency ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_bound_to_an_engine(offload: CheckpointOffload, device: AdversarialDevice, is_reentrant: bool) -> None:
    """With dropout in every block, so the random state is that of PyTorch's checkpoint."""
    with device.observe_compute():
        found = run(offload.checkpoint, is_reentrant)
    assert all_equal(found, run(torch_checkpoint, is_reentrant))
    stats = offload.stats
    assert stats.copied_out_bytes == DEPTH * INPUT_BYTES and stats.num_groups == DEPTH
    assert stats.peak_resident_bytes == 2 * INPUT_BYTES and stats.prefetch_misses == 0


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_the_function_in_a_with_statement(offload: CheckpointOffload, is_reentrant: bool) -> None:
    """Around the whole loop, and around each forward alone."""
    expected = run(torch_checkpoint, is_reentrant)
    with offload:
        assert all_equal(run(checkpoint, is_reentrant), expected)
    assert offload.stats.copied_out_bytes == DEPTH * INPUT_BYTES
    torch.manual_seed(0)
    model = Stack(call=lambda block, x: checkpoint(block, x, use_reentrant=is_reentrant))
    found: list[torch.Tensor] = []
    for _ in range(2):
        with offload:
            loss = model(torch.randn(2, LENGTH, HIDDEN))
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    assert all_equal(found, expected)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed; pip install transformers")
def test_as_the_function_of_transformers(offload: CheckpointOffload) -> None:
    model = make_language_model("qwen2")
    model._set_gradient_checkpointing(True, offload_engine.checkpoint)
    with offload:
        found = train(model)
    assert offload.stats.copied_out_bytes == DEPTH * INPUT_BYTES
    assert all_equal(found, train(make_language_model("qwen2", "transformers")))


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed; pip install transformers")
def test_in_a_wrapped_model(device: AdversarialDevice) -> None:
    """The engine is that of `offload_wrapper`."""
    model = make_language_model("llama")
    model._set_gradient_checkpointing(True, offload_engine.checkpoint)
    config = OffloadConfig(min_tensor_bytes=1024, policy=GroupWindow(2))
    model = offload_engine.offload_wrapper(model, engine=OffloadEngine(config, device))
    tokens = random_tokens(0)
    model(tokens, labels=tokens).loss.backward()
    assert model.activation_offload.stats.copied_out_bytes == DEPTH * INPUT_BYTES
    model.activation_offload.remove()


def test_inside_manage_activations(device: AdversarialDevice) -> None:
    """Its hooks take charge of the inputs, as of everything else."""
    activations = manage_activations(engine=OffloadEngine(OffloadConfig(min_tensor_bytes=1024), device), group_bytes=1)
    with activations:
        found = run(checkpoint, num_steps=1)
    assert all_equal(found, run(torch_checkpoint, num_steps=1))
    assert activations.stats.managed_bytes >= DEPTH * INPUT_BYTES
    with pytest.raises(OffloadError, match="does not know which engine to use"):
        checkpoint(torch.sin, torch.ones(3, requires_grad=True))
    activations.close()


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_the_storages_really_go(offload: CheckpointOffload, is_reentrant: bool) -> None:
    torch.manual_seed(0)
    model = Stack(call=lambda block, x: offload.checkpoint(block, x, use_reentrant=is_reentrant))
    with watch_inputs(model.blocks) as alive:  # type: ignore[arg-type]
        loss = model(torch.randn(2, LENGTH, HIDDEN))
    assert alive[:DEPTH] == [[i] for i in range(DEPTH)]
    loss.backward()


@pytest.mark.parametrize("horizon", [1, 2, 3])
@pytest.mark.parametrize("kind", ["cpu", "adversarial"])
def test_an_input_goes_when_it_has_been_read(device: AdversarialDevice, kind: str, horizon: int) -> None:
    """In the rest of its layer's backward only those are there that come next, of which one less than the horizon."""
    meter = ResidencyMeter()
    config = OffloadConfig(min_tensor_bytes=1024, policy=GroupWindow(horizon))
    offload = CheckpointOffload(engine=OffloadEngine(config, CpuDevice("none") if kind == "cpu" else device, meter))
    model = WatchedStack(lambda block, x: offload.checkpoint(block, x))
    model.look = lambda: meter.current_bytes
    model(torch.randn(2, LENGTH, HIDDEN)).backward()
    assert model.seen == [(0, min(horizon - 1, left) * INPUT_BYTES) for left in reversed(range(DEPTH))]
    assert meter.current_bytes == 0 and offload.engine.pool.num_leases == 0
    offload.close()


def test_input_that_its_layer_saves_leaves_with_the_layer() -> None:
    """As without offload; it counts with the recomputation, which is not counted."""
    meter = ResidencyMeter()
    config = OffloadConfig(min_tensor_bytes=1024, policy=GroupWindow(1))
    offload = CheckpointOffload(engine=OffloadEngine(config, CpuDevice("none"), meter))
    model = WatchedStack(lambda block, x: offload.checkpoint(block, x), begin=torch.square)
    model.look = lambda: meter.current_bytes
    model(torch.randn(2, LENGTH, HIDDEN)).backward()
    assert model.seen == [(1, 0)] * DEPTH
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


def test_an_input_that_is_passed_twice(offload: CheckpointOffload) -> None:
    def gradient(function: Checkpoint) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(4, 1024).requires_grad_()
        y = x
        for _ in range(3):
            y = 2 * y
            y = function(lambda a, b: a.sin() * b.cos(), y, y, use_reentrant=False)
        return list(torch.autograd.grad(y.sum(), x))

    assert all_equal(gradient(offload.checkpoint), gradient(torch_checkpoint))
    assert offload.stats.copied_in_bytes == 2 * 4 * 4096


@pytest.mark.parametrize("is_shared", [False, True])
def test_inputs_that_are_views(offload: CheckpointOffload, is_shared: bool) -> None:
    """Strided and with an offset, one of a storage or two of it, which is copied as a whole."""

    def cut(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.t().split(32) if is_shared else (x.t()[32:],)

    def sines(*parts: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.sin() for part in parts])

    def gradient(function: Checkpoint) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = torch.randn(64, 64).requires_grad_()
        first = function(sines, *cut(2 * x), use_reentrant=False)
        second = function(sines, *cut(torch.cat([first, first])[:64]), use_reentrant=False)
        return list(torch.autograd.grad(second.sum(), x))

    assert all_equal(gradient(offload.checkpoint), gradient(torch_checkpoint))
    stats = offload.stats
    assert stats.copied_out_bytes == stats.managed_bytes and stats.copied_in_bytes == 4 * 64 * 64


@pytest.mark.parametrize("horizon", [1, 2])
def test_a_retained_graph_gets_its_inputs_again(device: AdversarialDevice, horizon: int) -> None:
    """From the host: each backward behind the first copies all of them in."""
    config = OffloadConfig(min_tensor_bytes=1024, policy=GroupWindow(horizon))
    offload = CheckpointOffload(engine=OffloadEngine(config, device))

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


def gradients_of_keywords(function: Checkpoint) -> list[torch.Tensor]:
    """One activation is passed by position, one by keyword; 8 KiB each."""

    def scaled(x: torch.Tensor, *, by: torch.Tensor, power: int) -> torch.Tensor:
        return (x * by).tanh() ** power

    torch.manual_seed(0)
    x, by = torch.randn(2, 1024).requires_grad_(), torch.randn(2, 1024).requires_grad_()
    y = function(scaled, 2 * x, by=3 * by, power=2, use_reentrant=False, preserve_rng_state=False, early_stop=False)
    return list(torch.autograd.grad(y.sum(), (x, by)))


def test_keywords(offload: CheckpointOffload) -> None:
    """Of the function, and PyTorch's own; an activation passed by keyword leaves as well."""
    assert all_equal(gradients_of_keywords(offload.checkpoint), gradients_of_keywords(torch_checkpoint))
    assert offload.stats.copied_out_bytes == 2 * 2 * 1024 * 4


def test_a_checkpoint_inside_a_checkpoint(offload: CheckpointOffload) -> None:
    """The outer one saves no input of the inner one, so there is nothing to offload."""

    def nest(function: Checkpoint) -> list[torch.Tensor]:
        def inner(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return function(block, x, use_reentrant=False)

        return run(lambda block, x, use_reentrant: function(inner, block, x, use_reentrant=use_reentrant))

    with offload:
        found = nest(checkpoint)
    assert offload.stats.num_groups == DEPTH
    assert all_equal(found, nest(torch_checkpoint))


def test_inputs_too_small_to_leave(offload: CheckpointOffload) -> None:
    """They stay, and the step ends all the same."""
    for _ in range(3):
        offload.checkpoint(torch.tanh, 2 * torch.ones(3, requires_grad=True)).sum().backward()
        assert not offload.engine.is_in_iteration
    assert offload.stats.num_groups == 1 and offload.stats.managed_bytes == 0


def test_an_input_modified_in_place_is_an_error(offload: CheckpointOffload) -> None:
    x = 2 * torch.ones(1024, requires_grad=True)
    y = offload.checkpoint(torch.sin, x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# -- the checks and the contexts of PyTorch's checkpoint ---------------------------------------------------------------


def test_determinism_is_checked(offload: CheckpointOffload) -> None:
    sizes = iter((1024, 2048))

    def changing(x: torch.Tensor) -> torch.Tensor:
        return x[: next(sizes)].sin().cos()

    y = offload.checkpoint(changing, 2 * torch.ones(4096, requires_grad=True))
    with pytest.raises(CheckpointError, match="different metadata"):
        y.sum().backward()


def test_autocast_is_that_of_the_forward(offload: CheckpointOffload) -> None:
    def outputs(function: Checkpoint) -> list[torch.Tensor]:
        torch.manual_seed(0)
        block, x = Block(), torch.randn(2, LENGTH, HIDDEN).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = function(block, 2 * x, use_reentrant=False)
        y.sum().backward()  # outside of it
        return [y, x.grad, *(p.grad for p in block.parameters())]  # type: ignore[list-item]

    assert all_equal(outputs(offload.checkpoint), outputs(torch_checkpoint))


# -- outside, errors ---------------------------------------------------------------------------------------------------


def test_outside_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(OffloadError, match=r"call it inside `with CheckpointOffload\(\):` or as a method of one"):
        checkpoint(torch.sin, torch.ones(3, requires_grad=True))


def test_outside_without_gradients_it_just_runs() -> None:
    with torch.no_grad():
        assert torch.equal(checkpoint(torch.sin, torch.ones(3)), torch.ones(3).sin())


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_recomputation_needs_no_context(offload: CheckpointOffload, is_reentrant: bool) -> None:
    """A checkpoint inside a checkpointed function runs again in backward, outside of the `with`."""

    def outer(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.sin, x.cos(), use_reentrant=is_reentrant).tanh()

    x = torch.ones(1024, requires_grad=True)
    with offload:
        y = checkpoint(outer, x, use_reentrant=is_reentrant)
    y.sum().backward()
    expected = torch.ones(1024, requires_grad=True)
    expected.cos().sin().tanh().sum().backward()
    assert torch.equal(x.grad, expected.grad)  # type: ignore[arg-type]


def test_with_statements_nest(offload: CheckpointOffload) -> None:
    inner = CheckpointOffload(OffloadConfig(min_tensor_bytes=0, directory="none"))

    def call() -> None:
        checkpoint(torch.sin, 2 * torch.ones(1024, requires_grad=True)).sum().backward()

    with offload:
        with inner, inner:
            call()
        assert inner.stats.num_groups == 1 and offload.stats.num_groups == 0
        call()
    assert offload.stats.num_groups == 1
    inner.close()


def test_an_exception_ends_the_forward(offload: CheckpointOffload) -> None:
    def fail(_: torch.Tensor) -> None:
        raise KeyError("mine")

    x = offload.checkpoint(torch.sin, 2 * torch.ones(1024, requires_grad=True))
    with pytest.raises(KeyError, match="mine"):
        offload.checkpoint(fail, x)
    del x
    assert all_equal(run(offload.checkpoint), run(torch_checkpoint))
    assert offload.stats.num_groups == DEPTH


@pytest.mark.parametrize("kind", ["out", "in"])
def test_a_failed_copy_is_told_and_overcome(offload: CheckpointOffload, device: AdversarialDevice, kind: str) -> None:
    device.fail_next_copy(kind, after=1)
    with pytest.raises(CopyError, match=r"\(checkpoint\)"):
        run(offload.checkpoint)
    assert all_equal(run(offload.checkpoint), run(torch_checkpoint))


def test_a_config_and_an_engine_are_an_error(device: AdversarialDevice) -> None:
    with pytest.raises(ValueError, match="a config or an engine"):
        CheckpointOffload(OffloadConfig(), engine=OffloadEngine(OffloadConfig(), device))


def test_the_default_is_two_inputs_on_the_device() -> None:
    offload = CheckpointOffload()
    assert offload.engine.config.policy == GroupWindow(2)
    offload.close()
