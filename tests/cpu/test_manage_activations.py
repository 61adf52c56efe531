# SPDX-License-Identifier: Apache-2.0
"""`manage_activations` on models and training loops of every kind: to the last bit as without it.

Of its session and its groups, of errors among them: test_session.py; of the forms of tensors: test_saved_forms.py.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from offload_engine import (
    FixedBounds,
    ManagedActivations,
    OffloadConfig,
    OffloadEngine,
    OffloadError,
    manage_activations,
)
from tests.adversarial import AdversarialDevice

WIDTH, ROWS, DEPTH = 16, 8, 6
TENSOR_BYTES = WIDTH * ROWS * 4

Region = Callable[[], AbstractContextManager[Any]]
Results = list[torch.Tensor]
"""What a scenario is compared by: losses and gradients."""


class Block(nn.Module):
    """Attention, a branch, and enough kinds of saved tensors: inputs, outputs, views, masks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(ROWS, 1, 3, WIDTH).unbind(2)
        x = x + F.dropout(F.scaled_dot_product_attention(q, k, v).view(ROWS, WIDTH), 0.1)
        return x + self.down(F.silu(self.up(x)))


def make_model(block: Callable[[], nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*[block() for _ in range(DEPTH)])


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], seed: int = 0) -> torch.Tensor:
    return model(batch(seed)).square().mean()


def results(model: nn.Module, *losses: torch.Tensor) -> Results:
    return [*[loss.detach() for loss in losses], *[p.grad for p in model.parameters() if p.grad is not None]]


# -- scenarios: training loops that are run without offload and with it ---------------------------------------------


def whole_loop(region: Region) -> Results:
    model, losses = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters())
    with region():
        for step in range(3):
            losses.append(loss_of(model, step))
            losses[-1].backward()
            optimizer.step()
    return results(model, *losses)


def nested_checkpoints(region: Region, use_reentrant: bool) -> Results:
    model = make_model()
    recompute = partial(checkpoint, use_reentrant=use_reentrant)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() * 1
        for first, second in zip(list(model)[::2], list(model)[1::2], strict=True):
            x = recompute(lambda y, f=first, s=second: recompute(s, recompute(f, y).sin()), x).exp()
        return x

    with region():
        loss = loss_of(run)
    loss.backward()
    with region():
        again = loss_of(run, 1)
        again.backward()
    return results(model, loss, again)


def two_forwards(region: Region, order: tuple[int, int], regions: int = 2) -> Results:
    model = make_model()
    losses: list[torch.Tensor] = []
    for _ in range(regions):
        with region():
            losses += [loss_of(model, len(losses) + i) for i in range(2 // regions)]
    for number in order:
        losses[number].backward()
    return results(model, *losses)


def retained(region: Region) -> Results:
    """First the gradients of the last layer alone, as an adaptive loss weight needs them, and then all, twice."""
    model = make_model()
    with region():
        loss = loss_of(model)
        last = torch.autograd.grad(loss, list(model[-1].parameters()), retain_graph=True)
    loss.backward(retain_graph=True)
    with region():
        other = loss_of(model, 1)
    other.backward()
    loss.backward()
    return [*results(model, loss, other), *last]


def double_backward(region: Region) -> Results:
    model = make_model(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    with region():
        loss = loss_of(model)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = sum((grad.square().sum() for grad in grads), torch.zeros(()))
    (loss + penalty).backward()
    return results(model, loss, penalty)


def forward_over_reverse(region: Region) -> Results:
    """Compute a Hessian by a vector: tangents pass through the hooks, some of them zeros without bytes."""
    model = make_model(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    x = batch().requires_grad_()
    with region(), forward_ad.dual_level():
        y = model(forward_ad.make_dual(x, batch(1))).square().sum()
        (gradient,) = torch.autograd.grad(y, x)
        return [part for part in forward_ad.unpack_dual(gradient) if part is not None]


def evaluation_in_between(region: Region) -> Results:
    """And a forward that raises, and one whose graph is dropped."""
    model = make_model().eval()
    with region():
        loss = loss_of(model)
    with region(), torch.no_grad():
        evaluated = loss_of(model, 1)
    with region():
        abandoned = loss_of(model, 2).detach()
    with suppress(ArithmeticError), region():
        model[:4](batch())
        raise ArithmeticError("not today")
    loss.backward()
    with torch.inference_mode(), region():
        loss_of(model, 3)
    with region():
        last = loss_of(model, 4)
    last.backward()
    return results(model, loss, evaluated, abandoned, last)


SCENARIOS: dict[str, Callable[[Region], Results]] = {
    "around the whole loop": whole_loop,
    "nested checkpoints, not reentrant": partial(nested_checkpoints, use_reentrant=False),
    "nested checkpoints, reentrant": partial(nested_checkpoints, use_reentrant=True),
    "two forwards, first backward first": partial(two_forwards, order=(0, 1)),
    "two forwards, last backward first": partial(two_forwards, order=(1, 0)),
    "two forwards in one region": partial(two_forwards, order=(1, 0), regions=1),
    "retain_graph": retained,
    "create_graph": double_backward,
    "forward over reverse": forward_over_reverse,
    "evaluation in between": evaluation_in_between,
}


@pytest.fixture
def activations(device: AdversarialDevice) -> Iterator[ManagedActivations]:
    # Nothing waits for its release: so everything except the last group is on host before the backward begins.
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=0)), device)
    activations = manage_activations(group_bytes=2 * TENSOR_BYTES, engine=engine)
    yield activations
    activations.close()


@pytest.mark.parametrize("scenario", SCENARIOS.values(), ids=SCENARIOS)
def test_parity(
    scenario: Callable[[Region], Results], device: AdversarialDevice, activations: ManagedActivations
) -> None:
    torch.manual_seed(1)
    expected = scenario(nullcontext)
    torch.manual_seed(1)
    with device.observe_compute():
        found = scenario(lambda: activations)
    assert len(expected) == len(found) > 1
    for want, got in zip(expected, found, strict=True):
        assert torch.equal(want, got)
    assert device.num_copies["out"] and device.num_copies["in"]
    gc.collect()  # graphs of exceptions are in cycles
    assert not activations.engine.has_saved and activations.engine.pool.num_leases == 0


# -- what moves, and what does not ------------------------------------------------------------------------------------


def managed_tensors(activations: ManagedActivations, forward: Callable[[], torch.Tensor]) -> float:
    """Return the bytes that `forward` saved and the engine took charge of, in tensors of `batch()`."""
    with activations:
        loss = forward()
    managed = activations.stats.managed_bytes
    loss.backward()
    return managed / TENSOR_BYTES


def test_weights_and_the_copies_that_autocast_makes_of_them_stay(activations: ManagedActivations) -> None:
    weight, x = nn.Parameter(torch.randn(WIDTH, WIDTH)), torch.randn(ROWS, WIDTH)

    def forward(dtype: torch.dtype) -> torch.Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
            return F.linear(F.linear(F.linear(x.to(dtype), weight), weight), weight.t()).float().sum()

    assert managed_tensors(activations, lambda: forward(torch.float32)) == 3
    assert managed_tensors(activations, lambda: forward(torch.bfloat16)) == 3 / 2


@pytest.mark.parametrize("kind", ["module", "tensors"])
def test_buffers_stay_where_the_model_is_given(device: AdversarialDevice, kind: str) -> None:
    class Scaled(nn.Module):
        scale: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.randn(ROWS, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    model = Scaled()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), device)
    known = manage_activations(model if kind == "module" else model.buffers(), engine=engine)
    assert managed_tensors(known, lambda: model(x).sum()) == 0
    known.close()


# -- host memory, statistics, life ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [{}, {"horizon_groups": 3}, {"prefetch_groups": 2}], ids=str)
def test_unused_graphs_make_no_later_step_late(device: AdversarialDevice, bounds: dict[str, int]) -> None:
    """As validation losses that are kept with their graphs: what was copied in for them is not ahead of anything."""
    model, kept = make_model(), []
    engine = OffloadEngine(OffloadConfig.from_flags(min_tensor_bytes=0, **bounds), device)
    activations = manage_activations(model, group_bytes=2 * TENSOR_BYTES, engine=engine)
    for step in range(8):
        with activations:
            loss = loss_of(model, step)
        if step % 2:
            loss.backward()
        else:
            kept.append(loss)
    assert activations.stats.prefetch_misses == 0
    assert engine._store.counters.resident_bytes <= 4 * 3 * TENSOR_BYTES  # a group of each
    sum(kept, torch.zeros(())).backward()
    activations.close()


def test_without_close_nothing_is_left(no_tensor_left: Callable[[], AbstractContextManager[None]]) -> None:
    loss_of(make_model()).backward()  # what torch makes once is there from now on
    with no_tensor_left():
        config = OffloadConfig(min_tensor_bytes=0, directory="none")
        model = make_model()
        with manage_activations(model, config, group_bytes=TENSOR_BYTES):
            loss = loss_of(model)
        loss.backward()
        del model, loss


def test_one_inside_another(activations: ManagedActivations) -> None:
    """The innermost of two engines packs the tensors; one cannot be inside itself."""
    inner = manage_activations(engine=OffloadEngine(OffloadConfig(min_tensor_bytes=0), AdversarialDevice()))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with activations:
        y = (x * 1).exp()
        with inner:
            y = (y * 1).exp()
        with pytest.raises(OffloadError, match="already entered: exit it first"), activations:
            raise AssertionError("not reached")
    assert activations.stats.managed_bytes == inner.stats.managed_bytes == TENSOR_BYTES
    y.sum().backward()
    inner.close()
    with activations:  # it has been left all the same
        loss = loss_of(make_model())
    loss.backward()


def test_two_models_in_two_threads() -> None:
    def train(seed: int, region: Region) -> Results:
        losses = []
        for step in range(20):
            with region():
                losses.append(loss_of(models[seed], step + seed))
            losses[-1].backward()
        return results(models[seed], *losses)

    def train_managed(seed: int) -> Results:
        config = OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=0), directory="none")
        activations = manage_activations(models[seed], config, group_bytes=TENSOR_BYTES)
        return train(seed, lambda: activations)

    models = [make_model(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(train_managed, (0, 1)))
    for seed, model in enumerate(models):
        model.zero_grad()
        assert all(map(torch.equal, train(seed, nullcontext), found[seed]))


# -- errors -----------------------------------------------------------------------------------------------------------


def test_where_hooks_are_refused_nothing_is_entered(activations: ManagedActivations) -> None:
    refused = torch.autograd.graph.disable_saved_tensors_hooks("not here")
    with pytest.raises(RuntimeError, match="not here"), refused, activations:
        pass
    with activations:
        loss = loss_of(make_model())
    loss.backward()
