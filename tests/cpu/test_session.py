# SPDX-License-Identifier: Apache-2.0
"""`Session` and `AutomaticGroups`: when iterations begin and end, and which group moves when."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from offload_engine import CopyError, OffloadConfig, OffloadEngine
from offload_engine._saved.eligibility import with_storage
from offload_engine.frontends._common.groups import AutomaticGroups
from offload_engine.frontends._common.session import Session
from offload_engine.frontends._common.weights import may_move
from tests.adversarial import AdversarialDevice
from tests.lookups import present

WIDTH, ROWS, DEPTH = 16, 8, 6
TENSOR_BYTES = WIDTH * ROWS * 4


def make_model() -> nn.Sequential:
    """Each layer saves one tensor: the output of its Tanh, which is also the input of the next Linear."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)])


@pytest.fixture
def session(device: AdversarialDevice) -> Iterator[Session]:
    session = Session(OffloadEngine(OffloadConfig(min_tensor_bytes=0), device))
    yield session
    session.close()


@pytest.fixture
def groups(session: Session) -> AutomaticGroups:
    """Two tensors of `make_model` make a group."""
    return AutomaticGroups(session, 2 * TENSOR_BYTES)


@pytest.fixture
def forward(groups: AutomaticGroups) -> Callable[[], torch.Tensor]:
    model = make_model()

    def run() -> torch.Tensor:
        with groups.hooks():
            loss = model(torch.randn(ROWS, WIDTH)).square().mean()
        groups.end_forward()
        return loss

    return run


# -- iterations -------------------------------------------------------------------------------------------------------


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


def test_the_next_forward_joins_one_with_a_graph(session: Session, forward: Callable[[], torch.Tensor]) -> None:
    """Then the last group of the first one leaves, too."""
    first = forward()
    stats = session.stats
    copied_out = stats.copied_out_bytes
    second = forward()
    assert session.stats is stats and stats.copied_out_bytes > 2 * copied_out
    second.backward()
    assert bool(session.engine.is_in_iteration)
    first.backward()
    assert not session.engine.is_in_iteration and session.stats.num_kept_groups == 1


def test_passive_without_gradients_inside_a_backward_and_inside_a_forward(session: Session) -> None:
    with torch.no_grad():
        assert session.start_forward() is None
    x = torch.ones(2, requires_grad=True)
    seen: list[object] = []
    y = x * 2
    y.register_hook(lambda grad: seen.append(session.start_forward()))
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
        chunk.open_group("outer")
        chunk.open_group("inner")
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


# -- groups -----------------------------------------------------------------------------------------------------------


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


# -- weights ----------------------------------------------------------------------------------------------------------


def test_weights_are_known_without_the_model() -> None:
    weight, frozen = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4), requires_grad=False)
    leaf, data = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4)
    views = (weight.t(), frozen[1:], leaf.view(-1), weight.split(2)[1].view(-1))
    for stays in (weight, frozen, leaf, *views, weight.half(), weight.half().t(), weight.t()[1:].half()):
        assert not may_move(stays)
    for moves in (data, data.t(), weight * 2, (weight * 2).half(), (weight * 2).t(), frozen.half()):
        assert may_move(moves)


def test_wrappers_are_asked_for_what_they_hold() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    first, second = torch.ones(2), torch.zeros(2)
    assert [t is u for t, u in zip(with_storage([TwoTensor(first, second)]), (first, second), strict=True)] == [1, 1]
    assert not list(with_storage([torch.ones(2).to_sparse()]))
