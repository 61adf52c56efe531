# SPDX-License-Identifier: Apache-2.0
"""What is recomputed: functions of megatron-core that keep its input are bracketed where that is asked for."""

from __future__ import annotations

import importlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_patches._hooks.bracket import GroupBracket  # noqa: E402
from megatron_patches._hooks.module_hooks import ModuleHooks  # noqa: E402
from megatron_patches._rows.recompute import recompute_rows  # noqa: E402
from megatron_patches._rows.registry import Patch, apply_patches  # noqa: E402
from megatron_patches._versions import installed_version, is_in_range  # noqa: E402
from offload_engine import OffloadConfig, OffloadEngine  # noqa: E402
from tests.graph_device import GraphDevice, GraphWithoutReplay  # noqa: E402

ROWS = [row for row in recompute_rows(SimpleNamespace()) if row.target.endswith((":checkpoint", ":te_checkpoint"))]


class Bracket:
    """Notes its entries and exits."""

    def __init__(self, is_active: bool) -> None:
        self.is_active = is_active
        self.seen: list[Any] = []

    def enter(self) -> bool:
        self.seen.append("enter")
        return self.is_active

    def commit(self, output: Any) -> Any:
        self.seen.append(output)
        return f"marked {output}"

    def abandon(self) -> None:
        self.seen.append("abandon")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.target)
def test_its_call_is_bracketed_and_left_after_an_exception(row: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, name = row.target.partition(":")
    if not is_in_range(installed_version(), row.versions):
        pytest.skip(f"megatron-core {installed_version()} has no such function; needed is {row.versions}")
    owner, runner = importlib.import_module(module), SimpleNamespace()
    monkeypatch.setattr(owner, name, lambda x: f"1 / {x} = {1 // x}")
    active, passive = Bracket(True), Bracket(False)
    with apply_patches([r for r in recompute_rows(runner) if r.target == row.target]):
        for bracket, expected in ((active, "marked 1 / 1 = 1"), (passive, "1 / 1 = 1"), (None, "1 / 1 = 1")):
            runner.checkpoint_bracket = lambda _, bracket=bracket: bracket
            assert getattr(owner, name)(1) == expected
        runner.checkpoint_bracket = lambda _: active
        with pytest.raises(ZeroDivisionError):
            getattr(owner, name)(0)
    assert (active.seen, passive.seen) == (["enter", "1 / 1 = 1", "enter", "abandon"], ["enter"])


def test_inside_a_capture_what_is_recomputed_returns_what_it_has_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_parallel: Any = importlib.import_module("megatron.core.tensor_parallel")
    monkeypatch.setattr(tensor_parallel, "checkpoint", lambda function, *args: function(*args))
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1), GraphDevice())
    module, hooks, owner = torch.nn.Linear(4, 4), ModuleHooks(), SimpleNamespace(CUDAGraph=GraphWithoutReplay)
    hooks.enclose(module, GroupBracket(engine, "mlp", Counter()))
    bracket = GroupBracket(engine, "layer_input", Counter())
    with engine.graphs.capture_layers(min_bytes=1, owner=owner, saves_all=False):
        graph: Any = owner.CUDAGraph()
        graph.capture_begin()
        with apply_patches(recompute_rows(SimpleNamespace(checkpoint_bracket=lambda _: bracket))):
            x = torch.ones(4, requires_grad=True)
            assert torch.equal(tensor_parallel.checkpoint(torch.sin, x), x.sin())
            with pytest.raises(ZeroDivisionError):
                tensor_parallel.checkpoint(lambda x: x // 0, 1)
        assert module(torch.ones(2, 4)).shape == (2, 4)
        with pytest.raises(RuntimeError):
            module(torch.ones(2, 3))
        assert engine.graphs.recording is not None and engine.graphs.recording.are_innermost()
        graph.capture_end()
    graph.reset()
    for layers in engine.graphs.layers:
        layers.release()
    engine.close()


def test_without_transformer_engine_its_function_stays_none(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = importlib.import_module("megatron.core.transformer.transformer_block")
    monkeypatch.setattr(owner, "te_checkpoint", None)
    with apply_patches(recompute_rows(SimpleNamespace())):
        assert owner.te_checkpoint is None
