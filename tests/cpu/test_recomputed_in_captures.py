# SPDX-License-Identifier: Apache-2.0
"""Inside the capture of a layer, what is recomputed returns what it has computed."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_patches._hooks.bracket import GroupBracket  # noqa: E402
from megatron_patches._hooks.module_hooks import ModuleHooks  # noqa: E402
from megatron_patches._rows.recompute import recompute_rows  # noqa: E402
from megatron_patches._rows.registry import apply_patches  # noqa: E402
from offload_engine import OffloadConfig, OffloadEngine  # noqa: E402
from tests.graph_device import GraphDevice, GraphWithoutReplay  # noqa: E402


@pytest.fixture
def capturing() -> Iterator[OffloadEngine]:
    """An engine while a layer is captured."""
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1), GraphDevice())
    owner = SimpleNamespace(CUDAGraph=GraphWithoutReplay)
    with engine.graphs.capture_layers(min_bytes=1, owner=owner, saves_all=False):
        graph: Any = owner.CUDAGraph()
        graph.capture_begin()
        yield engine
        graph.capture_end()
    graph.reset()
    for layers in engine.graphs.layers:
        layers.release()
    engine.close()


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def test_a_checkpoint_returns_its_output(capturing: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = importlib.import_module("megatron.core.tensor_parallel")
    monkeypatch.setattr(owner, "checkpoint", checkpoint)
    opened: Counter[str] = Counter()
    bracket = GroupBracket(capturing, "layer_input", opened)
    with apply_patches(recompute_rows(SimpleNamespace(checkpoint_bracket=lambda _: bracket))):
        x = torch.ones(4, requires_grad=True)
        out = owner.checkpoint(torch.sin, x)
        assert torch.equal(out, x.sin())
        with pytest.raises(ZeroDivisionError):
            owner.checkpoint(lambda x: x // 0, 1)
        assert capturing.graphs.recording is not None and capturing.graphs.recording.are_innermost()


def test_a_module_keeps_its_output(capturing: OffloadEngine) -> None:
    module, hooks = torch.nn.Linear(4, 4), ModuleHooks()
    hooks.enclose(module, GroupBracket(capturing, "mlp", Counter()))
    assert module(torch.ones(2, 4)).shape == (2, 4)
    with pytest.raises(RuntimeError):
        module(torch.ones(2, 3))
    assert capturing.graphs.recording is not None and capturing.graphs.recording.are_innermost()
