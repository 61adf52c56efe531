# SPDX-License-Identifier: Apache-2.0
"""An engine refuses to work inside the capture of a CUDA graph, by a sentence and before it has packed a tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from offload_engine import (
    ChunkOffloadHandler,
    OffloadConfig,
    OffloadEngine,
    OffloadError,
    group_start,
)
from tests.adversarial import AdversarialDevice


class CapturingDevice(AdversarialDevice):
    """Pretends that the current stream captures, when told so."""

    captures: bool = False

    def __init__(self) -> None:
        super().__init__()
        self.graphs = self

    def record(self, is_recording: bool) -> None:
        raise AssertionError("no capture is announced here")

    def is_capturing(self) -> bool:
        return self.captures


@pytest.fixture
def device() -> CapturingDevice:
    return CapturingDevice()


def test_no_iteration_begins(device: CapturingDevice) -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1), device)
    device.captures = True
    with pytest.raises(OffloadError, match="an iteration begins inside the capture of a CUDA graph"):
        engine.begin_iteration()
    assert not engine.is_in_iteration
    engine.close()


@pytest.mark.parametrize(
    ("begin", "what"),
    [
        (lambda engine, _: engine.start_chunk(), "a forward begins"),
        (lambda _, chunk: chunk.open_group("mlp"), "group 'mlp' begins"),
        (lambda _, chunk: group_start(torch.ones(4, requires_grad=True), chunk, name="mlp"), "group 'mlp' begins"),
    ],
)
def test_nothing_is_packed(
    begin: Callable[[OffloadEngine, ChunkOffloadHandler], object], what: str, device: CapturingDevice
) -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1), device)
    engine.begin_iteration()
    chunk = engine.start_chunk()
    device.captures = True
    with pytest.raises(OffloadError, match=what):
        begin(engine, chunk)
    assert not list(chunk.groups) and engine.snapshot().num_live == 0
    device.captures = False
    engine.end_iteration()
    engine.close()
