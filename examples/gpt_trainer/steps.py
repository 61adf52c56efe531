# SPDX-License-Identifier: Apache-2.0
"""One training step and one evaluation, through megatron-core's schedules."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.num_microbatches_calculator import (
    get_current_global_batch_size,
    get_num_microbatches,
    update_num_microbatches,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from gpt_trainer.data import Batch, Dataset, microbatches
from gpt_trainer.timeline import Spans
from offload_engine import SavedTensorTracker


@dataclass
class Progress:
    """Progress of the training, saved in checkpoints."""

    step: int = 0
    samples: int = 0


@dataclass(frozen=True)
class StepResult:
    """Results of one training step."""

    loss: float | None
    """Mean over the global batch's tokens; None except on ranks that compute the loss."""
    grad_norm: float | None
    """Before clipping; None with `--clip-grad 0`."""
    num_samples: int


class Steps:
    """Runs steps of one model: owns nothing but the wiring between model, data and optimizer.

    Args:
        tracker: counts saved tensors during each forward step; None: nothing is counted.

    Attributes:
        spans: when chunks ran forward and backward, while it is asked to record them; none under the all-to-all
            overlap, where they run together.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
        device: torch.device,
        tracker: SavedTensorTracker | None = None,
    ) -> None:
        self._args = args
        self._chunks = chunks
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._device = device
        self._tracker = tracker
        self.spans = Spans()

    def train(self, dataset: Dataset, progress: Progress) -> StepResult:
        """Run one step from `progress.samples` on; advance `progress`."""
        update_num_microbatches(progress.samples, consistency_check=False)
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        reports = self._run(dataset, progress.samples, get_num_microbatches(), forward_only=False)
        _, grad_norm, _ = self._optimizer.step()
        num_samples = get_current_global_batch_size()
        self._scheduler.step(increment=num_samples)
        progress.step += 1
        progress.samples += num_samples
        return StepResult(_mean_loss(reports), None if grad_norm is None else float(grad_norm), num_samples)

    def evaluate(self, dataset: Dataset, num_batches: int) -> float | None:
        """Return the mean loss over the first `num_batches` global batches; None on ranks without the loss."""
        for chunk in self._chunks:
            chunk.eval()
        num_microbatches = self._args.global_batch_size // (
            self._args.micro_batch_size * parallel_state.get_data_parallel_world_size()
        )
        reports = []
        for batch in range(num_batches):
            first_sample = batch * self._args.global_batch_size
            with torch.no_grad():
                reports += self._run(dataset, first_sample, num_microbatches, forward_only=True)
        for chunk in self._chunks:
            chunk.train()
        return _mean_loss(reports)

    def _run(
        self, dataset: Dataset, first_sample: int, num_microbatches: int, *, forward_only: bool
    ) -> list[dict[str, torch.Tensor]]:
        # every model chunk reads the same microbatches, each at its own time
        streams = [
            microbatches(self._args, dataset, first_sample, num_microbatches, self._device) for _ in self._chunks
        ]
        is_single = len(self._chunks) == 1
        # Under the all-to-all overlap the schedule runs forwards in pieces: all of the step is counted then.
        is_planned = self._args.overlap_moe_expert_parallel_comm and not forward_only
        with (self._tracker if is_planned else None) or contextlib.nullcontext():
            return get_forward_backward_func()(
                forward_step_func=self._forward_step,
                data_iterator=streams[0] if is_single else streams,
                model=self._chunks[0] if is_single else self._chunks,
                num_microbatches=num_microbatches,
                seq_length=self._args.seq_length,
                micro_batch_size=self._args.micro_batch_size,
                forward_only=forward_only,
            )

    def _forward_step(
        self, batches: Iterator[Batch], model: Any, return_schedule_plan: bool = False
    ) -> tuple[Any, Callable[..., Any]]:
        """Run one microbatch of one chunk; called by the schedule."""
        batch = next(batches)
        arguments = (batch["tokens"], batch["position_ids"], None)  # the causal mask is made by the attention itself
        if return_schedule_plan:  # all-to-all overlap: the schedule runs the plan's nodes later
            output = model.build_schedule_plan(*arguments, labels=batch["labels"], loss_mask=batch["loss_mask"])
        else:
            with self.spans.forward(), self._tracker or contextlib.nullcontext():
                output = model(*arguments, labels=batch["labels"])
            self.spans.watch_backward(output)
        return output, functools.partial(_loss, batch["loss_mask"])


def _loss(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the token losses, the number of tokens, and both for the report; the schedule divides."""
    mask = loss_mask.view(-1).float()
    total = (losses.view(-1).float() * mask).sum()
    num_tokens = mask.sum()
    report = torch.stack([total.detach(), num_tokens])
    return total, num_tokens.to(torch.int), {"loss": report}


def _mean_loss(reports: list[dict[str, torch.Tensor]]) -> float | None:
    """Return the mean token loss over all microbatches of all data-parallel ranks; the last stage has the reports."""
    if not reports:
        return None
    totals = torch.stack([report["loss"] for report in reports]).sum(dim=0)
    dist.all_reduce(totals, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    total, num_tokens = totals.tolist()
    return total / num_tokens
