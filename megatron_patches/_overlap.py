"""Rows for the all-to-all overlap (combined 1F1B), where a model chunk runs as the nodes of a schedule plan.

The schedule builds the plan of a chunk's forward and then runs its nodes between those of another chunk's backward, on
two streams; the chunk itself is not called. Only one forward is under way at a time: every forward node belongs to the
plan that was built last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from megatron_patches._registry import Patch


class Runner(Protocol):
    """What the rows report to."""

    def start_plan(self, model: torch.nn.Module) -> None:
        """The forward of the model chunk `model` begins as a plan."""

    def around_node(self) -> AbstractContextManager[object]:
        """A context for the forward of one node."""


def overlap_rows(runner: Runner) -> list[Patch]:
    """The rows; without a running step with offload each passes its call on unchanged."""
    return [
        Patch(
            target="megatron.core.models.common.model_chunk_schedule_plan:TransformerModelChunkSchedulePlan.__init__",
            wrapper=functools.partial(_starting_chunk, runner=runner),
            why="the all-to-all overlap does not call the model chunk: its forward begins where its plan is built",
        ),
        Patch(
            target="megatron.core.pipeline_parallel.utils:ScheduleNode.forward",
            wrapper=functools.partial(_around_forward, runner=runner),
            why="what a chunk saves outside its groups is packed node by node: the backward of another chunk, and the "
            "building of its loss, run in between",
        ),
    ]


def _starting_chunk(original: Callable[..., None], *, runner: Runner) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        runner.start_plan(model)
        original(self, model, *args, **kwargs)

    return init


def _around_forward(original: Callable[..., Any], *, runner: Runner) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with runner.around_node():
            return original(self, *args, **kwargs)

    return forward
