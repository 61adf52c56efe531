# SPDX-License-Identifier: Apache-2.0
"""Processes and devices: NCCL with a GPU, else gloo; megatron-core's process groups; random seeds."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
from collections.abc import Iterator
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    init_num_microbatches_calculator,
    unset_num_microbatches_calculator,
)
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from gpt_trainer.arguments import UsageError
from megatron_patches import PatchError

TIMEOUT = timedelta(minutes=10)


class ProcessError(UsageError):
    """Raised if the number of started processes does not fit the flags."""


class PatchingError(UsageError):
    """Raised if megatron-core cannot be patched: its version is not supported, or it is patched already."""


@contextlib.contextmanager
def patching() -> Iterator[None]:
    """Return a context manager for calls of `megatron_patches.apply*()` that turns their errors into `PatchingError`.

    Raises:
        PatchingError: if megatron-core cannot be patched.
    """
    try:
        yield
    except PatchError as error:
        hint = "This trainer applies the patches itself: start it without python -m megatron_patches."
        raise PatchingError(f"{error} {hint}") from error
    except RuntimeError as error:
        raise PatchingError(str(error)) from error


@contextlib.contextmanager
def environment(args: argparse.Namespace) -> Iterator[torch.device]:
    """Set up processes, groups and seeds, yield this rank's device, and destroy the groups at the end.

    After an error of one rank they stay: to destroy them waits for the other ranks, which wait for this one, and nobody
    would see the error.

    Raises:
        ProcessError: if the flags do not fit the number of processes or the batch size.
    """
    device = _init_processes()
    try:
        try:
            _init_groups(args)
            _init_microbatches(args)
        except (AssertionError, RuntimeError) as error:
            raise ProcessError(f"{dist.get_world_size()} processes: {error}") from error
        _seed(args.seed)
        yield device
    except Exception as error:
        if is_common(error):
            _destroy_groups()
        raise
    _destroy_groups()


def is_common(error: Exception) -> bool:
    """Return whether all ranks have this error, so that none waits for another one."""
    return isinstance(error, UsageError) or dist.get_world_size() == 1


def _destroy_groups() -> None:
    unset_num_microbatches_calculator()
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def _init_processes() -> torch.device:
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=TIMEOUT)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=TIMEOUT, device_id=device)
    return device


def _init_groups(args: argparse.Namespace) -> None:
    flags = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    sizes = {f"--{name.replace('_', '-')}": getattr(args, name) for name in flags}
    if dist.get_world_size() % math.prod(sizes.values()):
        given = " x ".join(f"{flag} {size}" for flag, size in sizes.items() if size > 1)
        raise RuntimeError(f"{given} needs a multiple of {math.prod(sizes.values())}; torchrun has --nproc-per-node")
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=num_virtual_stages(args),
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
        expert_tensor_parallel_size=args.expert_tensor_parallel_size,
    )


def num_virtual_stages(args: argparse.Namespace) -> int | None:
    """Return the model chunks per rank for the interleaved schedule, else None."""
    if args.pipeline_model_parallel_layout is None:
        return args.num_virtual_stages_per_pipeline_rank
    layout = PipelineParallelLayerLayout.from_str(
        args.pipeline_model_parallel_layout, args.pipeline_model_parallel_size
    )
    stages = layout.virtual_pipeline_model_parallel_size
    return stages if stages > 1 else None


def _init_microbatches(args: argparse.Namespace) -> None:
    init_num_microbatches_calculator(
        rank=dist.get_rank(),
        rampup_batch_size=args.rampup_batch_size,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        decrease_batch_size_if_needed=False,
    )
    _check_microbatches(args, get_num_microbatches())


def _check_microbatches(args: argparse.Namespace, num_microbatches: int) -> None:
    """Check the microbatches of the interleaved schedule, which runs them in groups of the pipeline's size."""
    size = args.pipeline_model_parallel_size
    if num_virtual_stages(args) is not None and num_microbatches % size != 0:
        raise ProcessError(
            f"{num_microbatches} microbatches in a step: with virtual stages it must be a multiple of "
            f"--pipeline-model-parallel-size {size}; change --global-batch-size"
        )


def _seed(seed: int) -> None:
    # Stages must not begin with equal weights; the ranks of one stage must.
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
