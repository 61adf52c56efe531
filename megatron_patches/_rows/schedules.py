# SPDX-License-Identifier: Apache-2.0
"""Rows around megatron-core's three schedule functions: the order of the chunks, and the start and end of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from megatron_patches._model.sites import overlaps_expert_comm
from megatron_patches._rows.registry import Patch
from megatron_patches._rows.runtime import Runtime, Step
from offload_engine import Action
from offload_engine.schedule import interleaved, no_pipelining, one_forward_one_backward

_SCHEDULES = "megatron.core.pipeline_parallel.schedules"
_WHY = "activation offload needs the order of the chunks, and the start and end of a training step"


def schedule_rows(runtime: Runtime) -> list[Patch]:
    """Return the rows; each wraps one schedule function and passes every argument through."""
    orders = {
        "forward_backward_no_pipelining": _sequential,
        "forward_backward_pipelining_without_interleaving": _one_forward_one_backward,
        "forward_backward_pipelining_with_interleaving": _interleaved,
    }
    return [
        Patch(
            target=f"{_SCHEDULES}:{name}",
            wrapper=functools.partial(_wrap_schedule, runtime=runtime, order=order),
            why=_WHY,
        )
        for name, order in orders.items()
    ]


class _Shape(NamedTuple):
    size: int
    rank: int
    num_chunks: int
    num_microbatches: int
    config: Any


def _wrap_schedule(
    original: Callable[..., Any], *, runtime: Runtime, order: Callable[[_Shape], list[Action]]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward_backward(*args: Any, **kwargs: Any) -> Any:
        context = None if kwargs.get("forward_only") else runtime.step(_read_call(kwargs, order))
        if context is None:
            return original(*args, **kwargs)
        with context:
            return original(*args, **kwargs)

    return forward_backward


def _read_call(kwargs: dict[str, Any], order: Callable[[_Shape], list[Action]]) -> Step:
    model = kwargs["model"]
    wrapped = tuple(model) if isinstance(model, Sequence) else (model,)
    pipeline = _pipeline_group(kwargs)
    size, rank = (pipeline.size(), pipeline.rank()) if pipeline is not None else (1, 0)
    num_microbatches = kwargs["num_microbatches"]
    return Step(
        wrapped=wrapped,
        pipeline=pipeline,
        stage=_stage_groups(kwargs),
        seq_length=kwargs["seq_length"],
        micro_batch_size=kwargs["micro_batch_size"],
        order=lambda config: order(_Shape(size, rank, len(wrapped), num_microbatches, config)),
    )


def _pipeline_group(kwargs: dict[str, Any]) -> Any:
    from megatron.core import parallel_state

    collection = kwargs.get("pg_collection")
    if collection is not None and getattr(collection, "pp", None) is not None:
        return collection.pp
    return parallel_state.get_pipeline_model_parallel_group(check_initialized=False)


def _stage_groups(kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the groups of the ranks with other data, another part of the context, or of each tensor."""
    from megatron.core import parallel_state

    collection = kwargs.get("pg_collection")
    data, tensor = (getattr(collection, name, None) for name in ("dp_cp", "tp"))
    if parallel_state.is_initialized():
        data = data or parallel_state.get_data_parallel_group(with_context_parallel=True)
        tensor = tensor or parallel_state.get_tensor_model_parallel_group()
    return tuple(group for group in (data, tensor) if group is not None)


def _sequential(shape: _Shape) -> list[Action]:
    return no_pipelining(shape.num_microbatches, overlaps_expert_comm(shape.config))


def _one_forward_one_backward(shape: _Shape) -> list[Action]:
    return one_forward_one_backward(shape.size, shape.rank, shape.num_microbatches)


def _interleaved(shape: _Shape) -> list[Action]:
    group_size = shape.config.microbatch_group_size_per_vp_stage
    is_combined = overlaps_expert_comm(shape.config)
    return interleaved(shape.size, shape.rank, shape.num_chunks, shape.num_microbatches, group_size, is_combined)
