# SPDX-License-Identifier: Apache-2.0
"""`manage_activations` on models and training loops of every kind: to the last bit as without it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from offload_engine import (
    CopyError,
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


def forward_only(region: Region) -> Results:
    model, losses = make_model(), []
    for step in range(3):
        with region():
            losses.append(loss_of(model, step))
        losses[-1].backward()
    return results(model, *losses)


def forward_and_backward(region: Region) -> Results:
    model, losses = make_model(), []
    for step in range(3):
        with region():
            losses.append(loss_of(model, step))
            losses[-1].backward()
    return results(model, *losses)


def whole_loop(region: Region) -> Results:
    model, losses = make_model(), []
    optimizer = torch.optim.AdamW(model.parameters())
    with region():
        for step in range(3):
            losses.append(loss_of(model, step))
            losses[-1].backward()
            optimizer.step()
    return results(model, *losses)


def checkpointed(region: Region, use_reentrant: bool, nested: bool = False) -> Results:
    model = make_model()
    recompute = partial(checkpoint, use_reentrant=use_reentrant)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_() * 1
        for first, second in zip(model[::2], model[1::2], strict=True):
            if nested:
                x = recompute(lambda y, f=first, s=second: recompute(s, recompute(f, y).sin()), x).exp()
            else:
                x = second(recompute(first, x))
        return x

    with region():
        loss = loss_of(run)
    loss.backward()
    with region():
        again = loss_of(run, 1)
        again.backward()
    return results(model, loss, again)


def two_forwards(region: Region, first_backward: int) -> Results:
    model = make_model()
    losses = []
    for step in range(2):
        with region():
            losses.append(loss_of(model, step))
    losses[first_backward].backward()
    losses[1 - first_backward].backward()
    return results(model, *losses)


def two_forwards_one_backward(region: Region) -> Results:
    model = make_model()
    with region():
        first = loss_of(model)
    with region():
        second = loss_of(model, 1)
    (first * second).backward()
    return results(model, first, second)


def two_forwards_in_one_region(region: Region) -> Results:
    model = make_model()
    with region():
        first, second = loss_of(model), loss_of(model, 1)
        second.backward()
        first.backward()
    return results(model, first, second)


def forward_of_one_inside_backward_of_another(region: Region) -> Results:
    """Two models under one region, their layers in turn: groups of both graphs are unpacked in turn too."""
    one, other = make_model(), make_model()
    with region():
        x, y = batch(), batch(1)
        for a, b in zip(one, other, strict=True):
            x, y = a(x), b(y)
    (x.sum() + y.sum()).backward()
    return [*results(one), *results(other)]


def retained(region: Region) -> Results:
    model = make_model()
    with region():
        loss = loss_of(model)
    loss.backward(retain_graph=True)
    with region():
        other = loss_of(model, 1)
    other.backward()
    loss.backward()
    return results(model, loss, other)


def gradients_of_some(region: Region) -> Results:
    """As an adaptive loss weight does it: the last layer alone, and then everything."""
    model = make_model()
    with region():
        loss = loss_of(model)
        last = torch.autograd.grad(loss, list(model[-1].parameters()), retain_graph=True)
    loss.backward()
    return [*results(model, loss), *last]


def double_backward(region: Region) -> Results:
    model = make_model(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    with region():
        loss = loss_of(model)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = sum(grad.square().sum() for grad in grads)
    (loss + penalty).backward()
    return results(model, loss, penalty)


def backward_inside_forward(region: Region) -> Results:
    """Run an inner optimisation in the middle of a forward, as in meta-learning."""
    model = make_model()
    with region():
        x = model[:3](batch())
        inner = x.detach().requires_grad_()
        (step,) = torch.autograd.grad(loss_of(lambda _: model[3:](inner)), inner)
        loss = model[3:](x - step).square().mean()
    loss.backward()
    return results(model, loss)


class Cube(torch.autograd.Function):
    """Saves an input, an output and an intermediate; keeps a plain attribute too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        square = x * x
        out = square * x
        ctx.save_for_backward(x, square, out)
        ctx.scale = 3.0
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, square, out = ctx.saved_tensors
        return grads[0] * ctx.scale * (square + 0 * x + 0 * out)


def custom_function(region: Region) -> Results:
    model = make_model()
    with region():
        loss = loss_of(lambda x: Cube.apply(model[3:](Cube.apply(model[:3](x)))))
    loss.backward()
    return results(model, loss)


def autocast(region: Region) -> Results:
    model = make_model()
    with region(), torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(model)
    loss.backward()
    return results(model, loss)


def views_and_in_place(region: Region) -> Results:
    model = make_model()

    def run(x: torch.Tensor) -> torch.Tensor:
        x = model[:2](x)
        x.relu_()
        halves = x.view(ROWS, 2, -1)
        x = torch.cat([halves[:, 0].sin(), halves[:, 1].t().exp().t()], 1)
        x = model[2:](x.expand(ROWS, WIDTH).mul_(1.5))
        x[:, 0] = x[:, 1].clone().sigmoid_()
        return x

    with region():
        loss = loss_of(run)
    loss.backward()
    return results(model, loss)


def complex_numbers(region: Region) -> Results:
    weight = nn.Parameter(torch.polar(torch.ones(WIDTH, WIDTH), torch.linspace(0, 3, WIDTH * WIDTH).view(WIDTH, WIDTH)))
    with region():
        x = torch.fft.fft(batch()) @ weight / WIDTH
        x = x.conj() * x
        loss = (x.conj().imag * x.mH.T.real * x.abs()).sum()  # the imaginary part of a conjugate is a negated view
    loss.backward()
    assert weight.grad is not None
    return [loss.detach(), torch.view_as_real(weight.grad)]


def left_alone(region: Region) -> Results:
    """Sparse and quantised tensors and subclasses among what is saved."""
    weight = nn.Parameter(batch())
    mask = (batch(1) > 0).float().to_sparse()
    quantised = torch.quantize_per_tensor(batch(2), 0.1, 0, torch.qint8)

    class Halve(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, quantised: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, quantised)
            return x * 0.5

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            x, quantised = ctx.saved_tensors
            return grads[0] * quantised.dequantize() * x, None

    class Tagged(torch.Tensor):
        pass

    with region():
        x = Halve.apply(weight.sin().exp().sin().cos(), quantised)
        y = torch.sparse.mm(mask.t(), x).cos()
        z = y.as_subclass(Tagged).sin() * 2
        loss = z.as_subclass(torch.Tensor).sum()
    loss.backward()
    return [loss.detach(), weight.grad] if weight.grad is not None else []


def nested_sizes(region: Region) -> Results:
    model = make_model(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))
    rows = torch.nested.nested_tensor([batch(), batch(1)[:3]], layout=torch.strided)
    with region():
        loss = torch.nested.to_padded_tensor(model(rows), 0.0).sin().exp().sin().cos().square().mean()
    loss.backward()
    return results(model, loss)


def forward_over_reverse(region: Region) -> Results:
    """Compute a Hessian by a vector: tangents pass through the hooks, some of them zeros without bytes."""
    model = make_model(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))
    x = batch().requires_grad_()
    with region(), forward_ad.dual_level():
        y = model(forward_ad.make_dual(x, batch(1))).square().sum()
        (gradient,) = torch.autograd.grad(y, x)
        return [part for part in forward_ad.unpack_dual(gradient) if part is not None]


def shared_weights(region: Region) -> Results:
    """Run an embedding tied to the head, and a layer used twice."""
    torch.manual_seed(7)
    embedding, layer = nn.Embedding(32, WIDTH), Block()
    with region():
        x = layer(layer(embedding(torch.arange(ROWS))))
        loss = F.cross_entropy(x @ embedding.weight.t(), torch.arange(ROWS))
    loss.backward()
    return [*results(embedding, loss), *results(layer)]


def evaluation_in_between(region: Region) -> Results:
    model = make_model().eval()
    with region():
        loss = loss_of(model)
    with region(), torch.no_grad():
        evaluated = loss_of(model, 1)
    with region():
        abandoned = loss_of(model, 2).detach()
    loss.backward()
    with torch.inference_mode(), region():
        loss_of(model, 3)
    with region():
        last = loss_of(model, 4)
    last.backward()
    return results(model, loss, evaluated, abandoned, last)


def exception_in_forward(region: Region) -> Results:
    model = make_model()
    with region():
        kept = loss_of(model)
    with pytest.raises(ArithmeticError), region():
        model[:4](batch())
        raise ArithmeticError("not today")
    with region():
        loss = loss_of(model, 1)
    loss.backward()
    kept.backward()
    return results(model, loss, kept)


def exception_in_backward(region: Region) -> Results:
    model = make_model()

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ArithmeticError("not today")

    with region():
        loss = loss_of(lambda x: model[3:](Fails.apply(model[:3](x))))
    with pytest.raises(ArithmeticError):
        loss.backward()
    model.zero_grad()
    with region():
        loss = loss_of(model, 1)
    loss.backward()
    return results(model, loss)


def frozen_layers(region: Region) -> Results:
    """As adapters are trained: most weights have no gradient, and the input of the first layer is made to have one."""
    model = make_model()
    model.requires_grad_(False)
    model[-1].requires_grad_(True)
    with region():
        loss = loss_of(lambda x: model((x * 2).requires_grad_()))
    loss.backward()
    return results(model, loss)


def recurrent(region: Region) -> Results:
    torch.manual_seed(7)
    model = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
    with region():
        loss = model(batch().view(2, ROWS // 2, WIDTH))[0].square().mean()
    loss.backward()
    return results(model, loss)


def convolution_and_batch_norm(region: Region) -> Results:
    torch.manual_seed(7)
    model = nn.Sequential(nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.MaxPool1d(2), nn.Flatten())
    losses = []
    for step in range(2):
        with region():
            losses.append(model(batch(step).view(ROWS, 1, WIDTH)).square().mean())
        losses[-1].backward()
    return [*results(model, *losses), *model.buffers()]


SCENARIOS: dict[str, Callable[[Region], Results]] = {
    "around forward": forward_only,
    "around forward and backward": forward_and_backward,
    "around the whole loop": whole_loop,
    "checkpoint, not reentrant": partial(checkpointed, use_reentrant=False),
    "checkpoint, reentrant": partial(checkpointed, use_reentrant=True),
    "nested checkpoints, not reentrant": partial(checkpointed, use_reentrant=False, nested=True),
    "nested checkpoints, reentrant": partial(checkpointed, use_reentrant=True, nested=True),
    "two forwards, first backward first": partial(two_forwards, first_backward=0),
    "two forwards, last backward first": partial(two_forwards, first_backward=1),
    "two forwards, one backward": two_forwards_one_backward,
    "two forwards in one region": two_forwards_in_one_region,
    "two models in turn": forward_of_one_inside_backward_of_another,
    "retain_graph": retained,
    "torch.autograd.grad of some": gradients_of_some,
    "create_graph": double_backward,
    "backward inside forward": backward_inside_forward,
    "custom function": custom_function,
    "autocast": autocast,
    "views and in-place": views_and_in_place,
    "complex": complex_numbers,
    "sparse, quantised, subclass": left_alone,
    "nested sizes": nested_sizes,
    "forward over reverse": forward_over_reverse,
    "shared weights": shared_weights,
    "evaluation in between": evaluation_in_between,
    "exception in forward": exception_in_forward,
    "exception in backward": exception_in_backward,
    "frozen layers": frozen_layers,
    "LSTM": recurrent,
    "convolution": convolution_and_batch_norm,
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


def managed_tensors(activations: ManagedActivations, forward: Callable[[], torch.Tensor]) -> int:
    """Return the bytes that `forward` saved and the engine took charge of, in tensors of `batch()`."""
    with activations:
        loss = forward()
    managed = activations.stats.managed_bytes
    loss.backward()
    return managed // TENSOR_BYTES


def test_weights_stay(activations: ManagedActivations) -> None:
    weight, x = nn.Parameter(torch.randn(WIDTH, WIDTH)), torch.randn(ROWS, WIDTH)
    assert managed_tensors(activations, lambda: F.linear(x, weight).sum()) == 1
    assert managed_tensors(activations, lambda: F.linear(F.linear(x, weight), weight.t()).sum()) == 2


def test_copies_that_autocast_makes_of_weights_stay(activations: ManagedActivations) -> None:
    weight, x = nn.Parameter(torch.randn(WIDTH, WIDTH)), torch.randn(ROWS, WIDTH, dtype=torch.bfloat16)

    def forward() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(F.linear(F.linear(x, weight), weight), weight.t()).sum()

    with activations:
        loss = forward()
    assert activations.stats.managed_bytes == 3 * x.nbytes
    loss.backward()


@pytest.mark.parametrize("kind", ["module", "tensors"])
def test_buffers_stay_where_the_model_is_given(device: AdversarialDevice, kind: str) -> None:
    class Scaled(nn.Module):
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


@pytest.mark.parametrize("has_raised", [False, True])
def test_the_next_region_is_another_forward(activations: ManagedActivations, has_raised: bool) -> None:
    """Two tensors make a group, which leaves before the third: if they are of one forward."""
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with pytest.raises(ArithmeticError) if has_raised else nullcontext(), activations:
        first = (x * 1).exp()
        if has_raised:
            raise ArithmeticError("not today")
    with activations:
        second = (x * 1).exp().exp()
    assert activations.stats.copied_out_bytes == (0 if has_raised else TENSOR_BYTES)
    (first + second).sum().backward()


# -- host memory, statistics, life ------------------------------------------------------------------------------------


def test_prefetch_is_ahead_of_every_group() -> None:
    """Unless every copy-in was issued before its group was reached, there are misses."""
    model = make_model()
    engine = OffloadEngine(
        OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=0)), AdversarialDevice()
    )
    activations = manage_activations(model, group_bytes=2 * TENSOR_BYTES, engine=engine)
    with activations:
        loss = loss_of(model)
    loss.backward()
    assert activations.stats.copied_in_bytes > 10 * TENSOR_BYTES and activations.stats.prefetch_misses == 0
    assert activations.stats.peak_resident_bytes < activations.stats.managed_bytes / 2
    activations.close()


@pytest.mark.parametrize("bounds", [{}, {"horizon_groups": 3}, {"prefetch_groups": 2}], ids=str)
def test_unused_graphs_make_no_later_step_late(device: AdversarialDevice, bounds: dict[str, int]) -> None:
    """As validation losses that are kept with their graphs: what was copied in for them is not ahead of anything."""
    model = make_model()
    engine = OffloadEngine(OffloadConfig.from_flags(min_tensor_bytes=0, **bounds), device)
    activations = manage_activations(model, group_bytes=2 * TENSOR_BYTES, engine=engine)
    kept = []
    for step in range(8):
        with activations:
            loss = loss_of(model, step)
        if step % 2:
            loss.backward()
        else:
            kept.append(loss)
    assert activations.stats.prefetch_misses == 0
    assert engine._store.counters.resident_bytes <= 4 * 3 * TENSOR_BYTES  # a group of each
    sum(kept).backward()
    activations.close()


@pytest.mark.parametrize("num_tensors", [0, 8, 40])
def test_with_a_budget_less_is_copied_and_nothing_changes(num_tensors: int) -> None:
    expected = forward_only(nullcontext)
    copied: list[int] = []

    def train(**bounds: int) -> Results:
        device = AdversarialDevice()
        engine = OffloadEngine(OffloadConfig.from_flags(min_tensor_bytes=0, **bounds), device)
        activations = manage_activations(group_bytes=TENSOR_BYTES, engine=engine)
        found = forward_only(lambda: activations)
        copied.append(activations.stats.copied_out_bytes)
        if bounds:
            assert activations.stats.peak_resident_bytes <= max(bounds["resident_bytes"], 6 * TENSOR_BYTES)
        activations.close()
        assert not device.hazards
        return found

    for bounds in ({}, {"resident_bytes": num_tensors * TENSOR_BYTES}):
        torch.manual_seed(7)
        assert all(map(torch.equal, train(**bounds), expected))
    assert copied[1] <= copied[0] - max(0, num_tensors - 8) * TENSOR_BYTES


def test_without_close_nothing_is_left(no_tensor_left: Callable[[], AbstractContextManager[None]]) -> None:
    loss_of(make_model()).backward()  # what torch makes once is there from now on
    with no_tensor_left():
        config = OffloadConfig(min_tensor_bytes=0, directory="none")
        model = make_model()
        with manage_activations(model, config, group_bytes=TENSOR_BYTES):
            loss = loss_of(model)
        loss.backward()
        del model, loss


def test_entered_twice(activations: ManagedActivations) -> None:
    with activations, pytest.raises(OffloadError, match="entered already: leave it first"), activations:
        raise AssertionError("not reached")
    with activations:  # the outer one has been left all the same
        loss = loss_of(make_model())
    loss.backward()


def test_innermost_of_two_engines_packs_the_tensors(activations: ManagedActivations) -> None:
    inner = manage_activations(engine=OffloadEngine(OffloadConfig(min_tensor_bytes=0), AdversarialDevice()))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with activations:
        y = (x * 1).exp()
        with inner:
            y = (y * 1).exp()
    assert activations.stats.managed_bytes == inner.stats.managed_bytes == TENSOR_BYTES
    y.sum().backward()
    inner.close()


def test_two_models_in_two_threads() -> None:
    models = [make_model(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) for _ in range(2)]

    def train(seed: int) -> Results:
        config = OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=0), directory="none")
        activations = manage_activations(models[seed], config, group_bytes=TENSOR_BYTES)
        losses = []
        for step in range(20):
            with activations:
                losses.append(loss_of(models[seed], step + seed))
            losses[-1].backward()
        return results(models[seed], *losses)

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(train, (0, 1)))
    for seed, model in enumerate(models):
        model.zero_grad()
        losses = [loss_of(model, step + seed) for step in range(20)]
        for loss in losses:
            loss.backward()
        assert all(map(torch.equal, results(model, *losses), found[seed]))


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
def test_parity_under_ddp(process_group: None, activations: ManagedActivations) -> None:
    def train(region: Region) -> Results:
        model = nn.parallel.DistributedDataParallel(make_model())
        losses = []
        for step in range(3):
            torch.manual_seed(step)
            with region():
                losses.append(loss_of(model, step))
            losses[-1].backward()
        return results(model, *losses)

    expected, found = train(nullcontext), train(lambda: activations)
    assert all(torch.equal(want, got) for want, got in zip(expected, found, strict=True))
    assert activations.stats.copied_in_bytes > 0


def test_offload_that_does_nothing_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    activations = manage_activations(engine=OffloadEngine(device=AdversarialDevice()))
    model = make_model()
    for _ in range(2):
        with activations:
            loss = loss_of(model)
        loss.backward()
    assert caplog.text.count("nothing was offloaded: no activation of at least 1048576 bytes was saved on cpu") == 1
    activations.close()


def test_evaluation_is_not_said_to_do_nothing(
    activations: ManagedActivations, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    with torch.no_grad(), activations:
        model(batch())
    managed_tensors(activations, lambda: loss_of(model))
    assert not caplog.text


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["out", "in"])
def test_after_a_failed_copy_the_next_step_is_as_ever(
    kind: str, device: AdversarialDevice, activations: ManagedActivations
) -> None:
    device.fail_next_copy(kind, after=1)
    model = make_model()
    torch.manual_seed(0)
    expected = loss_of(model)
    with pytest.raises(CopyError, match="saved tensors"), activations:
        loss = loss_of(model)
        loss.backward()
    device.forget_failures()
    model.zero_grad()
    torch.manual_seed(0)
    with activations:
        loss = loss_of(model)
    loss.backward()
    assert torch.equal(loss, expected) and not activations.engine.has_saved
    expected.backward()


def test_where_hooks_are_refused_nothing_is_entered(activations: ManagedActivations) -> None:
    refused = torch.autograd.graph.disable_saved_tensors_hooks("not here")
    with pytest.raises(RuntimeError, match="not here"), refused, activations:
        pass
    with activations:
        loss = loss_of(make_model())
    loss.backward()


def test_a_config_and_an_engine_are_one_too_many(activations: ManagedActivations) -> None:
    with pytest.raises(ValueError, match="a config or an engine"):
        manage_activations(config=OffloadConfig(), engine=activations.engine)


def test_groups_need_bytes(activations: ManagedActivations) -> None:
    with pytest.raises(ValueError, match="group_bytes must be positive, got 0"):
        manage_activations(group_bytes=0, engine=activations.engine)


def test_after_close(activations: ManagedActivations) -> None:
    activations.close()
    activations.close()
    with pytest.raises(OffloadError, match="call manage_activations"), activations:
        loss_of(make_model())
