# SPDX-License-Identifier: Apache-2.0
"""Rows around megatron-core's captures of whole steps, and of layers by TransformerEngine: they announce them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from megatron_patches._rows.registry import Patch
from megatron_patches._rows.runtime import Runtime, unwrap

_WHY = "activation offload must know that a step is captured before CUDA's capture begins, and when the graph is gone"


def full_graph_rows(runtime: Runtime) -> list[Patch]:
    """Return the rows; each passes every argument through."""
    return [
        Patch(
            target="megatron.core.full_cuda_graph:FullCudaGraphWrapper.__call__",
            wrapper=functools.partial(_wrap_call, runtime=runtime),
            why=_WHY,
        ),
        Patch(
            target="megatron.core.transformer.cuda_graphs:TECudaGraphHelper.create_cudagraphs",
            wrapper=functools.partial(_wrap_create, runtime=runtime),
            why="activation offload moves what captured layers save between the replays of their graphs",
        ),
    ]


def _wrap_call(original: Callable[..., Any], *, runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_eager = self.cuda_graph["training"] is None
        if kwargs.get("forward_only") or not is_eager:
            return original(self, *args, **kwargs)
        chunk = _first_chunk(kwargs["model"])
        runtime.captures.release(chunk)  # of a graph that was reset
        captures = self.curr_iter("training") == self.cuda_graph_warmup_steps
        # Around the first replay, too: the graph must own its host memory before another step borrows it.
        with runtime.captures.of_step(chunk) if captures else nullcontext():
            return original(self, *args, **kwargs)

    return call


def _wrap_create(original: Callable[..., Any], *, runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        with runtime.captures.of_layers(_first_chunk(self.model), self.config):
            return original(self, *args, **kwargs)

    return create


def _first_chunk(model: Any) -> Any:
    return unwrap(model[0] if isinstance(model, Sequence) else model)
