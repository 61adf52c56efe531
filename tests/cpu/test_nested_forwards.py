# SPDX-License-Identifier: Apache-2.0
"""`with handle.forward()` inside another one, and in several threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from offload_engine import LayerOffload, OffloadConfig, enable_activation_offloading
from offload_engine._compat import torch_private
from offload_engine.frontends.integrations._training import TrainingOffload
from tests.cpu.test_kept_graphs import DEPTH, ROWS, WIDTH, Net

CONFIG = OffloadConfig(min_tensor_bytes=1, directory="none")


@pytest.fixture
def model() -> Net:
    return Net()


@pytest.fixture
def handle(model: Net) -> Iterator[LayerOffload]:
    handle = enable_activation_offloading(model, config=CONFIG)
    yield handle
    handle.remove()


def data() -> torch.Tensor:
    return torch.ones(ROWS, WIDTH)


def test_the_outermost_one_ends_the_forward_also_behind_an_error_of_an_inner_one(
    model: Net, handle: LayerOffload, caplog: pytest.LogCaptureFixture
) -> None:
    with handle.forward():
        with handle.forward():
            x = model.layers[0](data())
        with pytest.raises(ArithmeticError), handle.forward():
            raise ArithmeticError
        assert torch_private.innermost_hooks(True) is not None
        for layer in list(model.layers)[1:]:
            x = layer(x)
    assert torch_private.innermost_hooks(True) is None
    x.sum().backward()
    assert handle.stats.num_groups == DEPTH and not handle.engine.is_in_iteration and not caplog.records


def test_one_inside_the_bracket_of_a_trainer(model: Net, caplog: pytest.LogCaptureFixture) -> None:
    offload = TrainingOffload(CONFIG, False, None)
    offload.attach(model)
    handle = offload.handle
    assert handle is not None
    with offload.forward():  # as Lightning's callback around a training step
        with handle.forward():
            hidden = model.layers[0](data())
        model.layers[1](hidden).sum().backward()
    assert handle.stats.num_groups == 2 and not caplog.records
    offload.detach()


def test_one_of_another_thread_leaves_a_forward_alone(model: Net, handle: LayerOffload) -> None:
    is_inside, may_leave = threading.Event(), threading.Event()

    def evaluate() -> None:
        with torch.no_grad(), handle.forward():
            is_inside.set()
            may_leave.wait(60)

    thread = threading.Thread(target=evaluate)

    def meanwhile(*_: object) -> None:
        thread.start()
        is_inside.wait(60)

    hook = model.layers[1].register_forward_hook(meanwhile)
    try:
        x = model(data())
        assert torch_private.innermost_hooks(True) is None
    finally:
        may_leave.set()
        hook.remove()
        thread.join()
    x.sum().backward()
    assert handle.stats.num_groups == DEPTH and not handle.engine.is_in_iteration
