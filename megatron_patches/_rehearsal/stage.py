"""`StageRehearsal`: one rank of a job in this process, with no other ranks, no GPU, and no memory for its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_patches._arguments import Settings
from megatron_patches._handle import patch_rows
from megatron_patches._model.modules import MODULES
from megatron_patches._model.sites import overlaps_expert_comm, own_norms, survey
from megatron_patches._model.validate import check_conflicts, check_parts_are_called
from megatron_patches._rehearsal.job import TrainingJob
from megatron_patches._rehearsal.rows import rehearsal_rows
from megatron_patches._rows.registry import apply_patches
from megatron_patches._rows.runtime import Step
from megatron_patches._runtime import ModelRuntime
from offload_engine import Action, OffloadConfig, OffloadEngine
from offload_engine.planning.clocks import Link
from offload_engine.planning.hardware import Hardware
from offload_engine.planning.shapes import Shapes
from offload_engine.rehearsal.costs import KernelCosts
from offload_engine.rehearsal.device import RehearsalDevice
from offload_engine.rehearsal.engine import NotedBoundary, RehearsalEngine
from offload_engine.rehearsal.shapes import shapes_of
from offload_engine.rehearsal.tensors import HollowTensors
from offload_engine.schedule import interleaved, no_pipelining, one_forward_one_backward

WORKSPACE_BYTES = 32 << 20
"""Of cuBLAS, on Hopper."""


class StepOutcome(NamedTuple):
    """One rehearsed step of one rank."""

    peak_bytes: int
    """Allocated at most."""
    milliseconds: float
    """Of this rank alone, without waiting for others."""
    host_bytes: int
    """Of the host tier."""
    copied_out_bytes: int
    actions: tuple[Action, ...] = ()
    shapes: Shapes = ()
    boundaries: tuple[NotedBoundary, ...] = ()


class StageSizes(NamedTuple):
    """What a rank holds all the time."""

    num_parameters: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


class StageRehearsal:
    """Builds the chunks of one pipeline rank and runs training steps of them.

    Args:
        job: to rehearse.
        hardware: whose clocks run.
        link: of its GPU.
        rank: of the pipeline.
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
        """Build the model, and give everything back at the end.

        Raises:
            ValueError, AssertionError: if megatron-core rejects the configuration.
        """
        hollow = HollowTensors(KernelCosts(self._hardware, self._job.has_te), self._hardware.peer_gbps)
        device = RehearsalDevice(self._link, hollow.allocated)
        hollow.run = device.run
        runtime = _Runtime(device)
        rows = [*patch_rows(runtime), *rehearsal_rows(hollow, self._job.has_te)]
        with (
            apply_patches(rows),
            torch.compiler.set_stance("force_eager"),
            contextlib.closing(runtime),
            _one_rank_of_many(self._job, self._rank),
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
        bare = [build_chunk(job, config, stage) for stage in _virtual_stages(config)]
        weight_bytes = hollow.allocated.nbytes
        self.config = config
        self._chunks = [_with_gradients(job, config, chunk, index > 0) for index, chunk in enumerate(bare)]
        gradient_bytes = hollow.allocated.nbytes - weight_bytes
        parameters = sum(p.numel() for chunk in bare for p in chunk.parameters())
        held = job.optimizer_bytes * parameters // (_data_parallel_size() if job.distributes_optimizer else 1)
        self._optimizer = torch.empty(held, dtype=torch.uint8)
        self._workspace = torch.empty(_workspace_bytes(job, bare), dtype=torch.uint8)
        self.bare = bare
        self.sizes = StageSizes(parameters, weight_bytes, gradient_bytes, held)

    def names_of(self, wanted: Sequence[str]) -> list[str]:
        """Return the names that this rank has of those wanted; none wanted: all of them."""
        names = self.names()
        return names if not wanted else [name for name in wanted if name in names]

    def actions(self, num_microbatches: int) -> list[Action]:
        """Return the order of this rank's step with so many microbatches."""
        config, size = self.config, self._job.parallel.get("pipeline_model_parallel_size", 1)
        is_combined = overlaps_expert_comm(config)
        if size == 1:
            return no_pipelining(num_microbatches, is_combined)
        if (virtual := config.virtual_pipeline_model_parallel_size) is None:
            return one_forward_one_backward(size, self._rank, num_microbatches)
        group_size = config.microbatch_group_size_per_vp_stage
        return interleaved(size, self._rank, virtual, num_microbatches, group_size, is_combined)

    def names(self) -> list[str]:
        """Return the names that this rank has and that can be offloaded, without those that have parts."""
        counts: dict[str, int] = {}
        for name, number in survey(self.bare).sites.items():
            counts[name] = counts.get(name, 0) + number
        found = [row.name for row in MODULES if counts.get(row.name)]
        whole = [row.name for row in MODULES if any(part in found for part in row.parts)]
        return [name for name in found if name not in whole and self._is_possible(name)]

    def run(self, names: Sequence[str], settings: OffloadConfig, num_microbatches: int | None = None) -> StepOutcome:
        """Run a step; where something moves two, and return the second: the policy learns sizes from the first.

        Args:
            names: to offload, of those that this rank has; none: no engine, and what the whole step allocates.
            settings: of the engine.
            num_microbatches: of a step; None: the job's.
        """
        number = self._job.num_microbatches if num_microbatches is None else num_microbatches
        self._runtime.use(names, settings)
        for _ in range(2 if names and not settings.dry_run else 1):
            self._hollow.allocated.reset_peak()
            self._runtime.device.begin_step()
            self._step(number)
        return self._runtime.outcome(self._hollow.allocated.peak_bytes)

    def _is_possible(self, name: str) -> bool:
        try:
            check_conflicts(self.config, [name], own_norms(self.bare))
            check_parts_are_called(self.config, [name], self.bare)
        except ValueError:
            return False
        return True

    def _step(self, num_microbatches: int) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk, bare in zip(self._chunks, self.bare, strict=True):
            if chunk is bare:
                for parameter in chunk.parameters():
                    parameter.grad = None
            else:
                chunk.zero_grad_buffer()
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
    """Runs the engine of one rank on a rehearsal's device; there are no others to agree with."""

    def __init__(self, device: RehearsalDevice) -> None:
        super().__init__(Settings(OffloadConfig(), (), None, False), None)
        self.device = device
        self._engine: RehearsalEngine | None = None
        self._step_now: Step | None = None

    def use(self, names: Sequence[str], settings: OffloadConfig) -> None:
        """Offload `names` from the next step on."""
        self.close()
        self._engine = None
        self._defaults = Settings(settings, tuple(names), None, False)

    def step(self, step: Step) -> Any:
        """See `Runtime.step`."""
        self._step_now = step._replace(pipeline=None)
        return super().step(self._step_now)

    def outcome(self, peak_bytes: int) -> StepOutcome:
        """Return what the last step has shown."""
        assert self._step_now is not None
        actions = tuple(self._step_now.order(self._step_now.config))
        if self._engine is None:
            return StepOutcome(peak_bytes, self.device.clocks.compute, 0, 0, actions)
        engine = self._engine
        noted, stats = tuple(engine.boundaries), engine.stats
        peak = max(engine.peak_bytes, peak_bytes)
        return StepOutcome(
            peak, engine.milliseconds, stats.host_bytes, stats.copied_out_bytes, actions, shapes_of(noted), noted
        )

    def _make_engine(self, step: Step, settings: Settings) -> OffloadEngine:
        super()._make_engine(step, settings).close()  # for its checks
        self._engine = RehearsalEngine(settings.engine, self.device)
        return self._engine


def build_chunk(job: TrainingJob, config: Any, vp_stage: int | None) -> torch.nn.Module:
    """Build a chunk of the model."""
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.models.gpt.gpt_model import GPTModel

    ends = {"ignore_virtual": False, "vp_stage": vp_stage}
    chunk = GPTModel(
        config,
        _layer_spec(job, config, vp_stage),
        vocab_size=job.vocab_size,
        max_sequence_length=job.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(**ends),
        post_process=parallel_state.is_pipeline_last_stage(**ends),
        vp_stage=vp_stage,
        **job.model,
    )
    chunk.model_type = ModelType.encoder_or_decoder
    return chunk.to(config.params_dtype)


def _layer_spec(job: TrainingJob, config: Any, vp_stage: int | None) -> Any:
    from megatron.core.models.gpt import gpt_layer_specs as specs

    if config.num_moe_experts is not None:
        return specs.get_gpt_decoder_block_spec(
            config, job.has_te, normalization=config.normalization, vp_stage=vp_stage
        )
    if job.has_te:
        return specs.get_gpt_layer_with_transformer_engine_spec(**job.spec)
    return specs.get_gpt_layer_local_spec(normalization=config.normalization, **job.spec)


def _with_gradients(job: TrainingJob, config: Any, chunk: torch.nn.Module, is_behind: bool) -> Any:
    if not job.has_data_parallelism:
        return chunk
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=job.keeps_fp32_gradients, use_distributed_optimizer=job.distributes_optimizer
    )
    inner = Float16Module(config, chunk) if config.bf16 or config.fp16 else chunk
    return DistributedDataParallel(config, settings, inner, disable_bucketing=is_behind)


def _workspace_bytes(job: TrainingJob, chunks: Sequence[Any]) -> int:
    """Return what matrix products hold for good: TransformerEngine for its own, torch for the logits'."""
    has_logits = any(chunk.post_process for chunk in chunks)
    return WORKSPACE_BYTES * (int(job.has_te) + (2 if has_logits or not job.has_te else 0))


def _virtual_stages(config: Any) -> list[int | None]:
    number = config.virtual_pipeline_model_parallel_size
    return [None] if number is None else list(range(number))


def _data_parallel_size() -> int:
    from megatron.core import parallel_state

    return int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))


@contextlib.contextmanager
def _one_rank_of_many(job: TrainingJob, rank: int) -> Iterator[None]:
    """Set up parallel state as the first process of a pipeline rank sees it; all others are imagined."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    size = job.parallel.get("pipeline_model_parallel_size", 1)
    dist.init_process_group("fake", store=FakeStore(), rank=rank * (job.world_size // size), world_size=job.world_size)
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **job.parallel)
        model_parallel_cuda_manual_seed(1)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
