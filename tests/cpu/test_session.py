# SPDX-License-Identifier: Apache-2.0
"""`Session`, its groups, kept graphs, nested forwards, and `manage_activations`: to the last bit as without it."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
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
    enable_activation_offloading,
    manage_activations,
)
from offload_engine._budget.state import State
from offload_engine._compat import torch_private
from offload_engine.frontends._common.groups import AutomaticGroups
from offload_engine.frontends._common.session import Session
from offload_engine.frontends._common.weights import may_move
from tests.adversarial import AdversarialDevice
from tests.lookups import present

WIDTH, ROWS, DEPTH = 16, 8, 6
TENSOR_BYTES = WIDTH * ROWS * 4
ALL = OffloadConfig(min_tensor_bytes=1, directory="none")
LATE = OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=1 << 20))
# Nothing waits for its release: so everything except the last group is on host before the backward begins.
AT_ONCE = OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=0))


class Block(nn.Module):
    """Attention, a branch, and enough kinds of saved tensors: inputs, outputs, views, masks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(ROWS, 1, 3, WIDTH).unbind(2)
        x = x + F.dropout(F.scaled_dot_product_attention(q, k, v).view(ROWS, WIDTH), 0.1)
        return x + self.mlp(x)


def tanh() -> nn.Module:
    """Saves one tensor: the output of its Tanh, which is also the input of the next Linear."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def make_model(block: Callable[[], nn.Module] = Block) -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(*[block() for _ in range(DEPTH)])


@pytest.fixture
def session(device: AdversarialDevice) -> Iterator[Session]:
    session = Session(OffloadEngine(OffloadConfig(min_tensor_bytes=0), device))
    yield session
    session.close()


@pytest.fixture
def groups(session: Session) -> AutomaticGroups:
    """Two tensors of a model of `tanh` make a group."""
    return AutomaticGroups(session, 2 * TENSOR_BYTES)


@pytest.fixture
def forward(groups: AutomaticGroups) -> Callable[[], torch.Tensor]:
    model = make_model(tanh)

    def run() -> torch.Tensor:
        with groups.hooks():
            loss = loss_of(model)
        groups.end_forward()
        return loss

    return run


def test_an_iteration_spans_forward_and_backward(session: Session, forward: Callable[[], torch.Tensor]) -> None:
    """Its last group stays where its backward comes next."""
    assert not bool(session.engine.is_in_iteration)
    loss = forward()
    assert bool(session.engine.is_in_iteration) and session.chunk is None
    assert session.stats.num_groups == session.stats.num_offloaded_groups == (DEPTH + 1) // 2
    copied_out = session.stats.copied_out_bytes
    loss.backward(retain_graph=True)
    assert bool(session.engine.is_in_iteration), "a retained graph keeps it open"
    loss.backward()
    assert not session.engine.is_in_iteration
    assert session.stats.num_storages_left == 0 and session.stats.prefetch_misses == 0
    assert session.stats.copied_out_bytes == copied_out > 0 and session.stats.num_kept_groups == 1


def test_passive_without_gradients_inside_a_backward_and_inside_a_forward(session: Session) -> None:
    with torch.no_grad():
        assert session.start_forward() is None
    x = torch.ones(2, requires_grad=True)
    seen: list[object] = []
    y = x * 2
    y.register_hook(torch.enable_grad()(lambda grad: seen.append(session.start_forward())))  # as a recomputation
    y.sum().backward()
    assert seen == [None]
    with session.forward() as chunk:
        assert chunk is not None and session.start_forward() is None
        y = x * 2
        y.register_hook(lambda grad: session.note_backward())
        y.sum().backward()
        assert session.engine.is_in_iteration, "a backward inside a forward does not end it"


def test_forward_that_raises(session: Session, forward: Callable[[], torch.Tensor]) -> None:
    kept = forward()
    with pytest.raises(ArithmeticError), session.forward() as chunk:
        assert chunk is not None
        for name in ("outer", "inner"):
            chunk.open_group(name)
        raise ArithmeticError("not today")
    assert session.chunk is None and present(chunk).groups.innermost is None
    kept.backward()
    assert not session.engine.is_in_iteration


def test_after_a_failed_copy_the_next_forward_starts_anew(
    session: Session, device: AdversarialDevice, forward: Callable[[], torch.Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    device.fail_next_copy("out")
    with pytest.raises(CopyError, match="disk full|failed"):
        forward().backward()
    with caplog.at_level(logging.WARNING):
        loss = forward()
    assert "cannot run backward" in caplog.text
    loss.backward()
    assert not session.engine.is_in_iteration and not session.engine.failures.has_failed


def test_a_failed_copy_of_a_kept_graph_is_no_error_of_the_next_forward(
    device: AdversarialDevice, caplog: pytest.LogCaptureFixture
) -> None:
    """Which ends the iteration, and only then learns of it."""
    model, engine = make_model(tanh), OffloadEngine(LATE, device)
    activations = manage_activations(engine=engine, group_bytes=1)
    device.fail_next_copy("out")
    with activations:
        kept = loss_of(model)
    with activations:
        loss_of(model).backward()
    assert bool(engine.is_in_iteration) and not engine.failures.has_failed
    with caplog.at_level(logging.WARNING), activations:
        loss = loss_of(model)
    assert "no longer needed failed" in caplog.text and kept.requires_grad
    loss.backward()
    assert not engine.failures.has_failed
    activations.close()


@pytest.mark.parametrize("last", ["weight", "storage of the group", "view of it"])
def test_full_group_stays_open_for_tensors_of_its_storages(
    session: Session, groups: AutomaticGroups, last: str
) -> None:
    """Otherwise the last group of the forward would have no bytes, and all that its backward needs would have left."""
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with groups.hooks():
        y = (x * 1).exp().exp()  # the two results make a group
        factor = {"weight": x, "storage of the group": y.detach(), "view of it": y.detach().view(-1).view(ROWS, WIDTH)}
        loss = (torch.ones(ROWS, WIDTH, requires_grad=True) * factor[last]).sum() + y.sum()
    assert session.stats.num_groups == 0 and session.stats.managed_bytes == 2 * TENSOR_BYTES, "a storage counts once"
    loss.backward()
    assert session.stats.num_kept_groups == 1 and session.stats.copied_out_bytes == 0


def test_weights_are_known_without_the_model() -> None:
    weight, frozen = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4), requires_grad=False)
    leaf, data = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
    views = (weight.t(), frozen[1:], leaf.view(-1), weight.split(2)[1].view(-1))
    for stays in (weight, frozen, leaf, *views, weight.half(), weight.half().t(), weight.t()[1:].half()):
        assert not may_move(stays)
    for moves in (data, data.t(), weight * 2, (weight * 2).half(), (weight * 2).t(), frozen.half()):
        assert may_move(moves)


def offload_layers(model: nn.Module, **settings: Any) -> Any:
    return enable_activation_offloading(model, layers=list(model.children()), config=ALL.replace(**settings))


class Job:
    """A net, with or without offload, and its losses and gradients."""

    def __init__(self, enable: Callable[[nn.Module], Any] | None = None) -> None:
        self.model = make_model(tanh)
        self.handle: Any = enable(self.model) if enable is not None else None
        self.seen: list[torch.Tensor] = []

    def loss(self, seed: int) -> torch.Tensor:
        return loss_of(self.model, seed)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.seen += [p.grad.clone() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad()

    def steps(self, num: int) -> None:
        for seed in range(num):
            self.backward(self.loss(seed))

    def assert_same(self, other: Job) -> None:
        assert len(self.seen) == len(other.seen) and all(map(torch.equal, self.seen, other.seen))


@pytest.fixture(params=["layers", "any model"])
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    if request.param == "layers":
        job = Job(offload_layers)
        yield job
        job.handle.remove()
    else:
        model = make_model(tanh)
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
        for _ in range(3):
            job.loss(5)  # whose graph is dropped
            job.steps(1)
            assert not job.handle.engine.is_in_iteration and job.handle.stats.num_groups == num_groups
    assert caplog.text.count("saved storages outlive the iteration, the first is") == 1
    job.handle.record(tmp_path / "step.json")
    job.steps(2)
    del kept
    job.steps(1)
    assert job.handle.stats.num_storages_left == 0 and "Saved tensors by module" in job.handle.report()


def test_a_budget_leaves_the_floor() -> None:
    job = Job(lambda model: offload_layers(model, gpu_budget=64 << 20))
    optimizer = torch.optim.SGD(job.model.parameters(), lr=0.01)
    kept = job.loss(100)
    for seed in range(14):
        job.backward(job.loss(seed))
        optimizer.step()
    assert job.handle.engine.budget.state not in (State.FLOOR, State.MEASURE) and kept.requires_grad
    job.handle.remove()


@pytest.mark.parametrize(
    "order", ["F0 F1 B0 F2 B1 F3 B2 B3", "F0 F1 F2 B2 B1 B0", "F0 F1 B1 B0", "F0 F1 X F2 B0 X F3 B1 B2 B3"]
)
def test_forwards_and_backwards_in_any_usual_order_are_one_iteration(job: Job, order: str) -> None:
    """X is a forward whose graph is dropped."""
    plain, found = Job(), list[Any]()  # the statistics of each iteration
    for each in (plain, job):
        losses: dict[str, torch.Tensor] = {}
        for index, action in enumerate(order.split()):
            if action == "X":
                each.loss(index)
            elif action[0] == "F":
                losses[action[1:]] = each.loss(index)
            else:
                each.backward(losses.pop(action[1:]))
            if each is job and not any(job.handle.stats is stats for stats in found):
                found.append(job.handle.stats)
    job.assert_same(plain)
    assert len(found) == 1


@pytest.fixture
def layered() -> Iterator[tuple[nn.Sequential, Any]]:
    """A model and its handle; the test runs one step of it."""
    model = make_model(tanh)
    handle = offload_layers(model)
    yield model, handle
    assert handle.stats.num_groups == DEPTH and not handle.engine.is_in_iteration
    handle.remove()


def test_the_outermost_one_ends_the_forward_also_behind_an_error_of_an_inner_one(
    layered: tuple[nn.Sequential, Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, handle = layered
    with handle.forward():
        with handle.forward():
            x = model[0](torch.ones(ROWS, WIDTH))
        with pytest.raises(ArithmeticError), handle.forward():
            raise ArithmeticError
        assert torch_private.innermost_hooks(True) is not None
        for layer in list(model)[1:]:
            x = layer(x)
    assert torch_private.innermost_hooks(True) is None
    x.sum().backward()
    assert not caplog.records


def test_one_of_another_thread_leaves_a_forward_alone(layered: tuple[nn.Sequential, Any]) -> None:
    model, handle = layered
    is_inside, may_leave = threading.Event(), threading.Event()

    def evaluate() -> None:
        with torch.no_grad(), handle.forward():
            is_inside.set()
            may_leave.wait(60)

    thread = threading.Thread(target=evaluate)

    def meanwhile(*_: object) -> None:
        thread.start()
        is_inside.wait(60)

    hook = model[1].register_forward_hook(meanwhile)
    try:
        x = model(torch.ones(ROWS, WIDTH))
        assert torch_private.innermost_hooks(True) is None
    finally:
        may_leave.set()
        hook.remove()
        thread.join()
    x.sum().backward()


Region = Callable[[], AbstractContextManager[Any]]
Results = list[torch.Tensor]
"""What a scenario is compared by: losses and gradients."""


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], seed: int = 0) -> torch.Tensor:
    return model(batch(seed)).square().mean()


def results(model: nn.Module, *losses: torch.Tensor) -> Results:
    return [*[loss.detach() for loss in losses], *[p.grad for p in model.parameters() if p.grad is not None]]


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
    model = make_model(tanh)
    with region():
        loss = loss_of(model)
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        penalty = sum((grad.square().sum() for grad in grads), torch.zeros(()))
    (loss + penalty).backward()
    return results(model, loss, penalty)


def forward_over_reverse(region: Region) -> Results:
    """Compute a Hessian by a vector: tangents pass through the hooks, some of them zeros without bytes."""
    model = make_model(tanh)
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
    "retain_graph": retained,
    "create_graph": double_backward,
    "forward over reverse": forward_over_reverse,
    "evaluation in between": evaluation_in_between,
}


@pytest.fixture
def activations(device: AdversarialDevice) -> Iterator[ManagedActivations]:
    activations = manage_activations(group_bytes=2 * TENSOR_BYTES, engine=OffloadEngine(AT_ONCE, device))
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


@pytest.mark.parametrize("is_module", [True, False])
def test_buffers_stay_where_the_model_is_given(device: AdversarialDevice, is_module: bool) -> None:
    model, x = nn.Module(), torch.randn(ROWS, WIDTH, requires_grad=True)
    model.register_buffer("scale", scale := torch.randn(ROWS, WIDTH))
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), device)
    with manage_activations(model if is_module else model.buffers(), engine=engine) as known:
        loss = (x * scale).sum()
    assert known.stats.managed_bytes == 0
    loss.backward()
    known.close()


@pytest.mark.parametrize("block", [Block, tanh])
@pytest.mark.parametrize("bounds", [{}, {"horizon_groups": 3}, {"prefetch_groups": 2}], ids=str)
def test_unused_graphs_make_no_later_step_late(
    device: AdversarialDevice, bounds: dict[str, int], block: Callable[[], nn.Module]
) -> None:
    """As validation losses that are kept with their graphs: what was copied in for them is not ahead of anything."""
    model, kept = make_model(block), []
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
        model = make_model()
        with manage_activations(model, ALL, group_bytes=TENSOR_BYTES):
            loss = loss_of(model)
        loss.backward()
        del model, loss


def test_one_inside_another(activations: ManagedActivations, caplog: pytest.LogCaptureFixture) -> None:
    """The innermost of two engines packs the tensors; one inside itself ends the outer `with`."""
    inner = manage_activations(engine=OffloadEngine(OffloadConfig(min_tensor_bytes=0), AdversarialDevice()))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with activations:
        y = (x * 1).exp()
        with inner:
            y = (y * 1).exp()
        with activations:
            assert "entered again" in caplog.text
        y = y.exp()
    assert torch_private.innermost_hooks(True) is None
    assert activations.stats.managed_bytes == inner.stats.managed_bytes == TENSOR_BYTES
    y.sum().backward()
    inner.close()
    activations.__enter__()  # as an interrupt at the entry of `__exit__` leaves it
    step(activations)
    assert torch_private.innermost_hooks(True) is None and activations.stats.copied_out_bytes > 0


def test_two_models_in_two_threads() -> None:
    def train(seed: int, region: Region) -> Results:
        losses = []
        for step in range(20):
            with region():
                losses.append(loss_of(models[seed], step + seed))
            losses[-1].backward()
        return results(models[seed], *losses)

    def train_managed(seed: int) -> Results:
        activations = manage_activations(models[seed], AT_ONCE.replace(directory="none"), group_bytes=TENSOR_BYTES)
        return train(seed, lambda: activations)

    models = [make_model(tanh) for _ in range(2)]
    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(train_managed, (0, 1)))
    for seed, model in enumerate(models):
        model.zero_grad()
        assert all(map(torch.equal, train(seed, nullcontext), found[seed]))


def test_where_hooks_are_refused_nothing_is_entered(activations: ManagedActivations) -> None:
    refused = torch.autograd.graph.disable_saved_tensors_hooks("not here")
    with pytest.raises(RuntimeError, match="not here"), refused, activations:
        pass
    step(activations)


def step(activations: ManagedActivations) -> None:
    with activations:
        loss = loss_of(make_model())
    loss.backward()
