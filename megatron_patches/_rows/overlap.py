# SPDX-License-Identifier: Apache-2.0
"""Rows for the all-to-all overlap (combined 1F1B), where a model chunk runs as the nodes of a schedule plan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches._hooks.held import is_input_of_others
from megatron_patches._rows.registry import Patch
from megatron_patches._rows.runtime import Runtime

_PLAN = "megatron.core.models.common.model_chunk_schedule_plan:TransformerModelChunkSchedulePlan"
_NODE = "megatron.core.pipeline_parallel.utils:ScheduleNode"


def overlap_rows(runtime: Runtime) -> list[Patch]:
    """Return the rows; outside a step with offload each passes its call through unchanged."""
    return [
        Patch(
            target=f"{_PLAN}.__init__",
            wrapper=functools.partial(_wrap_init, runtime=runtime),
            why="the all-to-all overlap does not call the model chunk: its forward begins when its plan is built",
        ),
        Patch(
            target=f"{_NODE}.forward",
            wrapper=functools.partial(_wrap_forward, runtime=runtime),
            why="hooks for tensors saved outside groups are entered node by node, because the backward of another "
            "chunk runs in between; and each node keeps its inputs until its backward",
        ),
    ]


def _wrap_init(original: Callable[..., None], *, runtime: Runtime) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        runtime.start_plan(model, is_input_of_others(model, args, kwargs))
        original(self, model, *args, **kwargs)

    return init


def _wrap_forward(original: Callable[..., Any], *, runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Wrap the function that the node calls, not the node: there the inputs are ready and its stream is current.
        own = self.forward_func
        self.forward_func = functools.partial(runtime.run_node, self, own)
        try:
            return original(self, *args, **kwargs)
        finally:
            self.forward_func = own

    return forward
