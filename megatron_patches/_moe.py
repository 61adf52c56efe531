"""Rows for MoE layers: what the host must read in every layer does not stand behind copies of activations."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

from megatron_patches._registry import Patch
from offload_engine import OffloadEngine


class Runner(Protocol):
    """What the rows ask."""

    @property
    def running_engine(self) -> OffloadEngine | None:
        """The engine of the running training step, if there is one."""


def moe_rows(runner: Runner) -> list[Patch]:
    """The rows; without a running step with offload each passes its call on unchanged."""
    return [
        Patch(
            target="megatron.core.transformer.moe.token_dispatcher:maybe_move_tensor_to_cpu",
            wrapper=functools.partial(_around_move, runner=runner),
            why="split sizes and token counts are read by a kernel into mapped memory: a copy would wait for the "
            "copy engine, which serves activations first in, first out (9 ms behind 512 MiB)",
        )
    ]


def _around_move(original: Callable[..., Any], *, runner: Runner) -> Callable[..., Any]:
    @functools.wraps(original)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        engine = runner.running_engine
        if engine is None or not torch.is_tensor(tensor) or not tensor.is_cuda:
            return original(tensor, as_numpy=as_numpy, record_stream=record_stream)
        # As with the original, the caller waits for the stream before it looks.
        moved = engine.host_read(tensor).tensor
        if record_stream:
            tensor.record_stream(torch.cuda.current_stream())
        return moved.numpy() if as_numpy else moved

    return move
