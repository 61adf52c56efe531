# SPDX-License-Identifier: Apache-2.0
"""Offloads under the schedules of `torch.distributed.pipelining`, from which it reads the order of the chunks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    Schedule1F1B,
    ScheduleGPipe,
)

from offload_engine._compat.torch_private import of_schedule
from offload_engine.config import OffloadConfig
from offload_engine.engine import OffloadEngine
from offload_engine.frontends._common.device import device_for
from offload_engine.frontends._common.groups import GROUP_BYTES, AutomaticGroups, check_group_bytes
from offload_engine.frontends._common.recording import RecordsSteps
from offload_engine.frontends._common.session import Session
from offload_engine.frontends._common.weights import weights_of
from offload_engine.frontends._layers.group_hooks import GroupHook
from offload_engine.meter import ResidencyMeter
from offload_engine.schedule import Action, ChunkKey, backward_at_once, one_forward_one_backward
from offload_engine.stats import IterationStats

Schedule = PipelineScheduleSingle | PipelineScheduleMulti


def offload_schedule(
    schedule: Schedule,
    config: OffloadConfig | None = None,
    *,
    group_bytes: int = GROUP_BYTES,
    meter: ResidencyMeter | None = None,
) -> ScheduleOffload:
    """Offload the saved tensors of the stages of a pipeline schedule, in every later `schedule.step()`.

    The inputs and outputs of a stage stay on the device: the stage itself holds them until the backward (in torch 2.15
    only the inputs, and outputs that it did not send). Tensors saved by the loss function, which runs outside the
    stages, stay too. `schedule.eval()` moves nothing.

    Call `schedule.step(..., return_outputs=False)` if you can: returned outputs of the last stage may hold their graph,
    and its saved tensors, until the next step.

    Args:
        schedule: a schedule of `torch.distributed.pipelining`, on this rank.
        config: bounds and thresholds.
        group_bytes: saved tensors are copied out together as soon as they have this many bytes.
        meter: counts resident bytes in addition to the engine's statistics.

    Returns:
        A handle, also a context manager: `remove()` ends the offload.

    Raises:
        TypeError: if `schedule` is not a schedule, or its order is not known.
        ValueError: if the schedule is already offloaded, or `group_bytes` is below 1.
    """
    return ScheduleOffload(schedule, config, group_bytes, meter)


class ScheduleOffload(RecordsSteps):
    """Owns the offload of the stages of one schedule, until `remove()`. Made by `offload_schedule`."""

    def __init__(
        self, schedule: Schedule, config: OffloadConfig | None, group_bytes: int, meter: ResidencyMeter | None
    ) -> None:
        check_group_bytes(group_bytes)
        read_actions(schedule)  # raises its errors here rather than in the first step
        self._schedule: Schedule = schedule
        self._stages: list[Any] = stages_of(schedule)
        if "step" in vars(schedule) or any("forward_one_chunk" in vars(stage) for stage in self._stages):
            raise ValueError(f"{type(schedule).__name__} is already offloaded: call remove() on its handle first")
        config = config or OffloadConfig()
        self._modules: list[torch.nn.Module] = [stage.submod for stage in self._stages]
        device = device_for(self._modules, config)
        self._session = Session(OffloadEngine(config, device, meter), owns_iterations=False)
        self._groups = AutomaticGroups(self._session, group_bytes)
        self._comes_back_at_once: frozenset[ChunkKey] = frozenset()
        self._inputs_hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._attach()

    @property
    def engine(self) -> OffloadEngine:
        """Return the engine that moves the tensors."""
        return self._session.engine

    @property
    def stats(self) -> IterationStats:
        """Return the counters of the running step, or of the last one that trained."""
        return self._session.stats

    def remove(self) -> None:
        """Restore the methods of the schedule and its stages, and close the engine. Idempotent."""
        if not self._inputs_hooks:
            return
        del self._schedule.step
        for stage, hook in zip(self._stages, self._inputs_hooks, strict=True):
            del stage.forward_one_chunk
            hook.remove()
        self._inputs_hooks.clear()
        self._session.close()

    def __enter__(self) -> ScheduleOffload:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def _attach(self) -> None:
        # Instance attributes: schedules, and functions that users register with them, call these methods.
        self._schedule.step = self._wrap_step(self._schedule.step)  # type: ignore[method-assign]
        for stage in self._stages:
            stage.forward_one_chunk = self._wrap_forward(stage, stage.forward_one_chunk)
            self._inputs_hooks.append(
                stage.submod.register_forward_pre_hook(GroupHook(self._keep_inputs), with_kwargs=True)
            )

    def _wrap_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def run(*args: Any, **kwargs: Any) -> Any:
            engine = self._session.engine
            try:
                result = step(*args, **kwargs)
                if engine.is_in_iteration:  # otherwise no forward needed gradients
                    engine.end_iteration()
            except BaseException:
                self._groups.abandon_forward()
                engine.reset_iteration()
                raise
            return result

        return run

    def _wrap_forward(self, stage: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def run(fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
            if not stage.has_backward:
                return forward(fwd_chunk_id, *args, **kwargs)
            with self._chunk(ChunkKey(stage.stage_index, fwd_chunk_id)):
                return forward(fwd_chunk_id, *args, **kwargs)

        return run

    @contextmanager
    def _chunk(self, key: ChunkKey) -> Iterator[None]:
        if not self._session.engine.is_in_iteration:
            self._begin_step()
        with self._session.forward(key=key) as chunk, nullcontext() if chunk is None else self._groups.hooks():
            yield
        if chunk is None:  # the budget has decided that nothing leaves in this step
            return
        if key not in self._comes_back_at_once:
            self._groups.close_group()
        chunk.end_forward()

    def _begin_step(self) -> None:
        # Read again in each step, because the order of a schedule may be replaced between steps.
        actions = read_actions(self._schedule)
        self._comes_back_at_once = backward_at_once(actions)
        self._session.engine.begin_iteration(actions, weights_of(self._modules))

    def _keep_inputs(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Exclude the inputs of a stage, which holds them until the backward: a copy would free nothing."""
        if self._session.chunk is not None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor):
                    self._session.engine.exclude(value)


def read_actions(schedule: Schedule) -> list[Action]:
    """Return the forwards and backwards of this rank's stages in one step of `schedule`, in order.

    A chunk's stage is the pipeline stage, counted over all ranks. A backward that is split in two (zero-bubble) begins
    with the part that reads the activations first: the part for the inputs or, on a stage whose inputs need no
    gradient, the part for the weights.

    Raises:
        TypeError: if the schedule has no order to read.
    """
    stages = stages_of(schedule)
    if isinstance(schedule, PipelineScheduleMulti):
        # The runtime of these schedules executes this order; older classes have only the one without communication.
        orders = getattr(schedule, "pipeline_order_with_comms", None) or schedule.pipeline_order
        return _translate(orders[schedule.rank], stages)
    # Their `pipeline_order` is for display: on the last rank of 1F1B it omits the first forward (torch 2.13).
    (stage,), num_microbatches = stages, of_schedule(schedule, "_n_microbatches")
    if isinstance(schedule, Schedule1F1B):
        actions = one_forward_one_backward(stage.num_stages, stage.stage_index, num_microbatches)
        return [Action(kind, ChunkKey(stage.stage_index, chunk.microbatch)) for kind, chunk in actions]
    if isinstance(schedule, ScheduleGPipe):
        chunks = [ChunkKey(stage.stage_index, microbatch) for microbatch in range(num_microbatches)]
        return [*(Action("F", chunk) for chunk in chunks), *(Action("B", chunk) for chunk in chunks)]
    raise TypeError(
        f"{type(schedule).__name__} does not declare in which order it runs; expected ScheduleGPipe, Schedule1F1B or "
        "a schedule with several stages per rank (PipelineScheduleMulti)"
    )


def stages_of(schedule: Schedule) -> list[Any]:
    """Return the stages that `schedule` runs on this rank."""
    if isinstance(schedule, PipelineScheduleMulti):
        return list(of_schedule(schedule, "_stages"))
    if isinstance(schedule, PipelineScheduleSingle):
        return [of_schedule(schedule, "_stage")]
    raise TypeError(f"expected a schedule of torch.distributed.pipelining, got {type(schedule).__name__}")


def _translate(order: Iterable[Any], stages: Sequence[Any]) -> list[Action]:
    """Return the actions of a schedule that save or read activations; the others communicate, or wait (None)."""
    begins_backward = {stage.stage_index: _begins_backward(stage) for stage in stages}
    actions = []
    for step in _flatten(order):
        kind, chunk = step.computation_type.value, ChunkKey(step.stage_index, step.microbatch_index)
        if kind == "F":
            actions.append(Action("F", chunk))
        elif kind in begins_backward[step.stage_index]:
            actions.append(Action("B", chunk))
    return actions


def _flatten(order: Iterable[Any]) -> Iterator[Any]:
    """Split overlapped actions: a forward and a backward, which the schedule starts in this order."""
    for step in order:
        if step is not None:
            yield from getattr(step, "sub_actions", None) or (step,)


def _begins_backward(stage: Any) -> tuple[str, str]:
    """Return the kinds of action that begin a backward: the whole one ("B"), or its first part that computes."""
    # If no input needs a gradient, the part for the inputs ("I") does nothing, and that for the weights ("W") all.
    return ("B", "W" if stage.is_first and stage.dw_builder is None else "I")
