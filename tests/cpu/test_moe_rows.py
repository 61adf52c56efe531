"""The rows for MoE layers: what the dispatcher reads goes through the engine of the running step, and only then."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import numpy  # noqa: E402
import torch  # noqa: E402
from megatron.core.transformer.moe import token_dispatcher  # noqa: E402

from megatron_patches._moe import moe_rows  # noqa: E402
from megatron_patches._registry import apply_patches  # noqa: E402


class DeviceTensor(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


class Engine:
    """Notes what is read, and gives back other values than a plain copy would."""

    def __init__(self) -> None:
        self.reads: list[torch.Tensor] = []

    def host_read(self, tensor: torch.Tensor) -> Any:
        self.reads.append(tensor)
        return SimpleNamespace(tensor=torch.full(tensor.shape, 7))


def test_a_running_step_reads_through_its_engine() -> None:
    runner, splits = SimpleNamespace(running_engine=Engine()), torch.arange(4).as_subclass(DeviceTensor)
    applied = apply_patches(moe_rows(runner))
    try:
        assert token_dispatcher.maybe_move_tensor_to_cpu(splits).tolist() == [7] * 4
        moved = token_dispatcher.maybe_move_tensor_to_cpu(splits, as_numpy=True)
        assert isinstance(moved, numpy.ndarray) and moved.tolist() == [7] * 4
        assert all(read is splits for read in runner.running_engine.reads)
    finally:
        applied.remove()


def test_what_is_on_the_host_or_no_tensor_passes_unchanged() -> None:
    runner, splits = SimpleNamespace(running_engine=Engine()), torch.arange(4)
    applied = apply_patches(moe_rows(runner))
    try:
        assert token_dispatcher.maybe_move_tensor_to_cpu(splits) is splits
        assert token_dispatcher.maybe_move_tensor_to_cpu(None) is None
        assert runner.running_engine.reads == []
    finally:
        applied.remove()


def test_without_a_running_step_the_original_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def original(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return "original", as_numpy, record_stream

    monkeypatch.setattr(token_dispatcher, "maybe_move_tensor_to_cpu", original)
    applied = apply_patches(moe_rows(SimpleNamespace(running_engine=None)))
    try:
        splits = torch.arange(4).as_subclass(DeviceTensor)
        moved = token_dispatcher.maybe_move_tensor_to_cpu(splits, as_numpy=True, record_stream=True)
        assert moved == ("original", True, True)
    finally:
        applied.remove()
