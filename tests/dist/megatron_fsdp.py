# SPDX-License-Identifier: Apache-2.0
"""Tiny models under Megatron-FSDP, and training steps of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
from megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer import DataParallelBuffer
from megatron.core.transformer.module import Float16Module

from megatron_patches import apply
from megatron_patches._model.fsdp import gathered_weights
from offload_engine import IterationStats, OffloadConfig
from offload_engine._saved.eligibility import with_storage
from tests.dist.tiny import check_bits, engine_of, fingerprint, make_chunks, make_config, run, stats_of

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
SHARDED = "optim_grads_params"


class Sharding(NamedTuple):
    """How a model is sharded, beside what the parallel state says."""

    strategy: str = SHARDED
    options: Mapping[str, Any] = {}  # noqa: RUF012
    """Of `DistributedDataParallelConfig`."""
    units: tuple[type, ...] | None = None
    """Classes of the modules that are gathered as a whole; None: megatron-core's choice."""


class Job(NamedTuple):
    """One model and its steps."""

    kind: str
    sharding: Sharding = Sharding()
    settings: Mapping[str, Any] = {}  # noqa: RUF012
    microbatches: Sequence[int] = (1, 3)
    change: Callable[[torch.nn.Module], None] | None = None


def shard(config: Any, chunks: Sequence[torch.nn.Module], sharding: Sharding) -> list[FullyShardedDataParallel]:
    """Wrap the chunks as Megatron's training loop does."""
    ddp_config = DistributedDataParallelConfig(
        use_megatron_fsdp=True,
        use_distributed_optimizer=True,
        data_parallel_sharding_strategy=sharding.strategy,
        **sharding.options,
    )
    units = None if sharding.units is None else list(sharding.units)
    wrapped = [FullyShardedDataParallel(config, ddp_config, Float16Module(config, chunk), units) for chunk in chunks]
    config.finalize_model_grads_func = _finish
    config.no_sync_func = wrapped[0].no_sync if len(wrapped) == 1 else [chunk.no_sync for chunk in wrapped]
    return wrapped


def _finish(chunks: Sequence[FullyShardedDataParallel], *args: Any, **kwargs: Any) -> None:
    for chunk in chunks:
        chunk.finish_grad_sync()


def make_job(job: Job) -> list[FullyShardedDataParallel]:
    """Return the chunks of this rank."""
    config = make_config(job.kind, torch.bfloat16, **job.settings)
    return shard(config, make_chunks(config, change=job.change), job.sharding)


def train(job: Job) -> list[dict[str, str]]:
    """Return a digest of losses and of this rank's shares of the gradients, of each step; weights change in between."""
    chunks = make_job(job)
    return [step(chunks, num_microbatches) for num_microbatches in job.microbatches]


def step(
    chunks: list[Any], num_microbatches: int, run: Callable[[list[Any], int], list[float]] = run
) -> dict[str, str]:
    """Run one step and change the weights by its gradients; return the digest."""
    losses = run(chunks, num_microbatches)
    local: list[torch.nn.Module] = [_Gradients(chunk) for chunk in chunks]
    digest = fingerprint(local, losses)
    assert len(digest) > 10
    with torch.no_grad():
        for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
            if parameter.grad is not None:
                parameter.to_local().sub_(parameter.grad.to_local(), alpha=0.1)
    for chunk in chunks:
        chunk.module.install_optimized_model_weights()
    return digest


class _Gradients(torch.nn.Module):
    """The shares of gradients that this rank has, as gradients of parameters without names of their own."""

    def __init__(self, chunk: torch.nn.Module) -> None:
        super().__init__()
        for name, parameter in chunk.named_parameters():
            own: Any = torch.nn.Parameter(torch.empty(0), requires_grad=False)
            grad: Any = parameter.grad
            own.main_grad = None if grad is None else grad.to_local()
            self.register_parameter(name.replace(".", "/"), own)


def check_parity(job: Job, names: Sequence[str], *, has_report: bool = False) -> IterationStats:
    """Compare the job with offload and without, to the last bit; return the counters of its last step."""
    expected = train(job)
    config = OffloadConfig(min_tensor_bytes=1, directory="none")
    with apply(config, modules=names, has_report=has_report) as handle:
        chunks = make_job(job)
        for num_microbatches, wanted in zip(job.microbatches, expected, strict=True):
            check_bits(wanted, step(chunks, num_microbatches), job, num_microbatches)
            assert stats_of(handle).num_storages_left == 0
        assert engine_of(handle).pool.num_leases == 0
        stats = stats_of(handle)
    assert stats.copied_in_bytes > 0
    return stats


@contextmanager
def noting_moved_weights(device_class: type[Any], chunks: Sequence[torch.nn.Module]) -> Iterator[list[int]]:
    """Collect the sizes of weights that devices of this class copy out, and of buffers that weights are gathered into.

    `device_class` may be that of a runtime, whose methods a device takes over. Told by the identity of their storages,
    at the copy, when both are alive.
    """
    buckets: dict[int, torch.UntypedStorage] = {}
    moved: list[int] = []
    fetch, issue = DataParallelBuffer.fetch_bucket, device_class.copy_out

    def noting_fetch(buffer: Any, *args: Any, **kwargs: Any) -> Any:
        bucket = fetch(buffer, *args, **kwargs)
        if kwargs.get("set_param_data"):
            storage = bucket.data.untyped_storage()
            buckets[storage._cdata] = storage
        return bucket

    def noting_copies(device: Any, stream: Any, copies: Any) -> Any:
        weights = {part.untyped_storage()._cdata for part in with_storage(gathered_weights(chunks))}
        sources = [source.untyped_storage() for source, _ in copies]
        moved.extend(storage.nbytes() for storage in sources if storage._cdata in weights | buckets.keys())
        return issue(device, stream, copies)

    with (
        mock.patch.object(DataParallelBuffer, "fetch_bucket", noting_fetch),
        mock.patch.object(device_class, "copy_out", noting_copies),
    ):
        yield moved
