# SPDX-License-Identifier: Apache-2.0
"""`StageRehearsal`: runs one rank of a job without other ranks, a GPU, or memory for its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from megatron_patches._arguments import Settings
from megatron_patches._handle import patch_rows
from megatron_patches._model.modules import MODULES, drop_parts
from megatron_patches._model.recompute_options import RecomputeOptions
from megatron_patches._model.sites import overlaps_expert_comm, own_norms, survey
from megatron_patches._model.validate import check_conflicts, check_parts_are_called
from megatron_patches._rehearsal.building import (
    build_chunk,
    data_parallel_size,
    one_rank_of_many,
    virtual_stages,
    with_gradients,
    workspace_bytes,
)
from megatron_patches._rehearsal.job import TrainingJob
from megatron_patches._rehearsal.rows import rehearsal_rows
from megatron_patches._rows.registry import apply_patches
from megatron_patches._rows.runtime import Step
from megatron_patches._runtime import ModelRuntime
from offload_engine import Action, OffloadConfig, OffloadEngine
from offload_engine.planning.clocks import Link
from offload_engine.planning.hardware import Hardware
from offload_engine.planning.shapes import Shapes
from offload_engine.rehearsal.allocated import AllocatedBytes, Wasted
from offload_engine.rehearsal.costs import KernelCosts
from offload_engine.rehearsal.device import RehearsalDevice, StepClocks, steps_until_steady
from offload_engine.rehearsal.engine import NotedBoundary, RehearsalEngine
from offload_engine.rehearsal.failures import rehearsing
from offload_engine.rehearsal.shapes import shapes_of
from offload_engine.rehearsal.tensors import HollowTensors
from offload_engine.schedule import interleaved, no_pipelining, one_forward_one_backward


class StepOutcome(NamedTuple):
    """One rehearsed step of one rank."""

    peak_bytes: int
    """Allocated at most."""
    wasted: Wasted
    """Reserved by the allocator in vain."""
    milliseconds: float
    """Step time of this rank alone, without waits for others."""
    host_bytes: int
    """Bytes of the host tier."""
    copied_out_bytes: int
    actions: tuple[Action, ...] = ()
    shapes: Shapes = ()
    boundaries: tuple[NotedBoundary, ...] = ()


class StageSizes(NamedTuple):
    """Bytes that a rank holds permanently."""

    num_parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


class StageRehearsal:
    """Builds the chunks of one pipeline rank and runs training steps of them.

    Args:
        job: job to rehearse.
        hardware: machine whose clocks run.
        link: link of its GPU.
        rank: rank in the pipeline.
        changes: fields of the configuration to change, for instance recomputation.
    """

    def __init__(self, job: TrainingJob, hardware: Hardware, link: Link, rank: int, **changes: Any) -> None:
        self._job = job
        self._link = link
        self._hardware = hardware
        self._rank = rank
        self._changes = changes

    @contextlib.contextmanager
    def ready(self) -> Iterator[ReadyStage]:
        """Return a context manager that builds the model, and frees everything at its end.

        Raises:
            ValueError, AssertionError: if megatron-core rejects the configuration.
            RehearsalError: if the model, or a step of it, fails.
        """
        hollow = HollowTensors(KernelCosts(self._hardware, self._job.has_te), self._hardware.peer_gbps)
        device = RehearsalDevice(StepClocks(self._link), hollow.allocated)
        hollow.run = device.clocks.run
        runtime = _Runtime(device)
        rows = [*patch_rows(runtime), *rehearsal_rows(hollow, self._job.has_te)]
        with (
            rehearsing(f"stage {self._rank}"),
            apply_patches(rows),
            torch.compiler.set_stance("force_eager"),
            contextlib.closing(runtime),
            one_rank_of_many(self._job, self._rank),
            hollow,
        ):
            yield ReadyStage(self._job, self._rank, self._job.make_config(**self._changes), hollow, runtime)


class ReadyStage:
    """The model of a rank."""

    def __init__(self, job: TrainingJob, rank: int, config: Any, hollow: HollowTensors, runtime: _Runtime) -> None:
        self._job = job
        self._rank = rank
        self._hollow = hollow
        self._runtime = runtime
        bare = [build_chunk(job, config, stage) for stage in virtual_stages(config)]
        weight_bytes = hollow.allocated.nbytes
        self.config = config
        self._chunks = [with_gradients(job, config, chunk, index > 0) for index, chunk in enumerate(bare)]
        gradient_bytes = hollow.allocated.nbytes - weight_bytes
        parameters = sum(p.numel() for chunk in bare for p in chunk.parameters())
        held = job.optimizer_bytes * parameters // (data_parallel_size() if job.distributes_optimizer else 1)
        self._optimizer = torch.empty(held, dtype=torch.uint8)
        self._workspace = torch.empty(workspace_bytes(job, bare), dtype=torch.uint8)
        self.bare = bare
        self.sizes = StageSizes(parameters, weight_bytes, gradient_bytes, held)

    @property
    def steady_microbatches(self) -> int:
        """Return how many microbatches show the peak of a step; more only repeat it.

        Interleaved schedules need whole groups, of at least the pipeline's size.
        """
        size = self._job.parallel.get("pipeline_model_parallel_size", 1)
        is_interleaved = self.config.virtual_pipeline_model_parallel_size is not None
        group = self.config.microbatch_group_size_per_vp_stage if is_interleaved else size
        return min(self._job.num_microbatches, 3 * group)

    def settings_of(self, wanted: Settings) -> Settings:
        """Return the settings for this rank, with those of the wanted names that it has; all if none is wanted.

        A budget is left out: its choices are forecast from the step without one.
        """
        names = self.names()
        if wanted.modules:
            sites = survey(self.bare).sites
            names = [name for name in wanted.modules if (name in names if wanted.is_taken_over else sites[name])]
        own = tuple((name, nbytes) for name, nbytes in wanted.thresholds.by_name if name in names)
        kept_bytes = self._rank * wanted.rank_delta_bytes
        return wanted._replace(
            engine=wanted.engine.replace(kept_bytes=kept_bytes),
            modules=tuple(names),
            thresholds=wanted.thresholds._replace(by_name=own),
            rank_delta_bytes=0,
            gpu_budget=None,
        )

    def actions(self, num_microbatches: int) -> list[Action]:
        """Return the schedule of this rank's step with `num_microbatches` microbatches."""
        config, size = self.config, self._job.parallel.get("pipeline_model_parallel_size", 1)
        is_combined = overlaps_expert_comm(config)
        if size == 1:
            return no_pipelining(num_microbatches, is_combined)
        if (virtual := config.virtual_pipeline_model_parallel_size) is None:
            return one_forward_one_backward(size, self._rank, num_microbatches)
        group_size = config.microbatch_group_size_per_vp_stage
        return interleaved(size, self._rank, virtual, num_microbatches, group_size, is_combined)

    def names(self) -> list[str]:
        """Return the names on this rank that can be offloaded, without those that have parts."""
        counts: dict[str, int] = {}
        for name, number in survey(self.bare).sites.items():
            counts[name] = counts.get(name, 0) + number
        found = [row.name for row in MODULES if counts.get(row.name)]
        whole = [row.name for row in MODULES if any(part in found for part in row.parts)]
        return [name for name in found if name not in whole and self._is_possible(name)]

    def recomputations(self, settings: Settings) -> RecomputeOptions | None:
        """Return what the layers can recompute, once a step has run; None if the settings forbid it."""
        if not settings.may_recompute:
            return None
        return RecomputeOptions(self.bare, drop_parts(settings.modules)[0], lambda _: lambda _: None)

    def run(self, settings: Settings, num_microbatches: int | None = None) -> StepOutcome:
        """Run steps until they repeat; return the last.

        Args:
            settings: settings for this rank; without modules, no engine runs.
            num_microbatches: microbatches of a step; None: the job's.
        """
        number = self._job.num_microbatches if num_microbatches is None else num_microbatches
        is_moving = bool(settings.modules) and not settings.engine.dry_run
        self._runtime.use(settings)
        with rehearsing(f"a step of stage {self._rank} {self._way(is_moving)}"):
            self._free_gradients()
            allocated = self._hollow.allocated
            for _ in steps_until_steady(allocated, self._runtime.device.clocks):
                self._step(number)
            return self._runtime.outcome(allocated)

    def _way(self, is_moving: bool) -> str:
        full = " and full recomputation" if self.config.recompute_granularity == "full" else ""
        return f"{'with' if is_moving else 'without'} offload{full}"

    def _is_possible(self, name: str) -> bool:
        try:
            check_conflicts(self.config, [name], own_norms(self.bare))
            check_parts_are_called(self.config, [name], self.bare)
        except ValueError:
            return False
        return True

    def _free_gradients(self) -> None:
        for chunk, bare in zip(self._chunks, self.bare, strict=True):
            if chunk is bare:
                for parameter in chunk.parameters():
                    parameter.grad = None
            else:
                chunk.zero_grad_buffer()

    def _step(self, num_microbatches: int) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        is_single = len(self._chunks) == 1
        batch = _Batch(self._job)
        get_forward_backward_func()(
            forward_step_func=partial(_forward_step, batch),
            data_iterator=iter(()) if is_single else [iter(()) for _ in self._chunks],
            model=self._chunks[0] if is_single else self._chunks,
            num_microbatches=num_microbatches,
            seq_length=self._job.seq_length,
            micro_batch_size=self._job.micro_batch_size,
            forward_only=False,
        )
        self._free_gradients()


class _Batch:
    """The same tokens for each microbatch."""

    def __init__(self, job: TrainingJob) -> None:
        from megatron.core import parallel_state

        length = job.seq_length // parallel_state.get_context_parallel_world_size()
        self.tokens = torch.zeros((job.micro_batch_size, length), dtype=torch.int64)
        self.positions = torch.arange(length)[None].expand(job.micro_batch_size, -1)
        self.mask = torch.ones((job.micro_batch_size, length), dtype=torch.float32)


def _forward_step(batch: _Batch, _: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    run = model.build_schedule_plan if return_schedule_plan else model
    return run(batch.tokens, batch.positions, None, labels=batch.tokens), partial(_loss, batch.mask)


def _loss(mask: torch.Tensor, losses: torch.Tensor) -> Any:
    total = (losses.reshape(-1).float() * mask.reshape(-1)).sum()
    return total, mask.sum().to(torch.int), {}


class _Runtime(ModelRuntime):
    """Runs the engine of one rank on a rehearsal's device, without other ranks to agree with."""

    def __init__(self, device: RehearsalDevice) -> None:
        super().__init__(Settings(OffloadConfig(), (), None, False), None)
        self.device = device
        self._engine: RehearsalEngine | None = None
        self._step_now: Step | None = None

    def use(self, settings: Settings) -> None:
        """Apply `settings` from the next step on."""
        self.detach_all()
        self._engine = None
        self._defaults = settings

    def step(self, step: Step) -> Any:
        """See `Runtime.step`."""
        self._step_now = step._replace(pipeline=None)
        return super().step(self._step_now)

    def outcome(self, allocated: AllocatedBytes) -> StepOutcome:
        """Return the outcome of the last step."""
        assert self._step_now is not None
        actions = tuple(self._step_now.order(self._step_now.config))
        engine, peak = self._engine, allocated.peak_bytes
        if engine is None:
            wasted = allocated.wasted_beside(peak)
            return StepOutcome(peak, wasted, self.device.clocks.now.compute, 0, 0, actions)
        noted, stats = tuple(engine.boundaries), engine.stats
        peak = max(engine.peak_bytes, peak)
        moved = engine.milliseconds, stats.host_bytes, stats.copied_out_bytes
        return StepOutcome(peak, allocated.wasted_beside(peak), *moved, actions, shapes_of(noted), noted)

    def _make_engine(self, step: Step, settings: Settings) -> OffloadEngine:
        super()._make_engine(step, settings).close()  # for its checks
        self._engine = RehearsalEngine(settings.engine, self.device)
        return self._engine
