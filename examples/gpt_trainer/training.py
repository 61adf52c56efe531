# SPDX-License-Identifier: Apache-2.0
"""The training loop: steps, evaluations, checkpoints and metrics in their order."""

from __future__ import annotations

import argparse
import time

import torch

import megatron_patches
from gpt_trainer.checkpoint import Checkpoints
from gpt_trainer.data import build_datasets, vocabulary
from gpt_trainer.environment import patching
from gpt_trainer.metrics import Metrics
from gpt_trainer.model import ConfigError, build_chunks, build_optimizer, build_scheduler, transformer_config
from gpt_trainer.steps import Progress, StepResult, Steps
from offload_engine import ResidencyMeter, SavedTensorTracker


class Training:
    """Owns everything one rank needs to train; `run()` trains.

    Raises:
        UsageError: for a checkpoint, flags, data or a megatron-core that cannot be used.
    """

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self._args = args
        self._device = device
        self._num_steps = 0  # of this run
        tokenizer = vocabulary(args)
        num_valid = args.eval_iters * args.global_batch_size if self._evaluates else 0
        num_train = args.train_iters * args.global_batch_size
        self._train_set, self._valid_set = build_datasets(args, tokenizer, num_train, num_valid)
        self._meter = ResidencyMeter() if args.metrics_json or args.timeline_json else None
        is_on = args.offload_activation or args.offload_engine or args.offload_gpu_budget is not None
        self._offload = self._apply_offload() if is_on else None
        try:
            self._build(tokenizer.vocab_size)
        except BaseException:
            self.close()
            raise

    def _build(self, vocab_size: int) -> None:
        args = self._args
        config = transformer_config(args, self._device)
        self._chunks = build_chunks(args, config, self._device, vocab_size)
        optimizer = build_optimizer(args, self._chunks)
        scheduler = build_scheduler(args, optimizer)
        self._checkpoints = Checkpoints(args, self._chunks, optimizer, scheduler)
        self._progress = Progress() if args.load is None else self._checkpoints.load(args.load)
        self._steps = Steps(args, self._chunks, optimizer, scheduler, self._device, self._tracker())

    def close(self) -> None:
        """Remove the offload patches."""
        if self._offload is not None:
            self._offload.remove()

    def abandon(self) -> None:
        """Leave the patches, as this rank has failed, and others may wait for it."""
        if self._offload is not None:
            self._offload.abandon()

    def _apply_offload(self) -> megatron_patches.Handle:
        """Apply the offload patches: the only call needed, made before the configuration, which gets the flags."""
        with patching():
            return megatron_patches.apply(meter=self._meter)

    @property
    def _evaluates(self) -> bool:
        return self._args.eval_interval is not None or self._args.eval_at_start

    def _tracker(self) -> SavedTensorTracker | None:
        if self._meter is None:
            return None
        weights = [tensor for chunk in self._chunks for tensor in (*chunk.module.parameters(), *chunk.module.buffers())]
        return SavedTensorTracker(self._meter, weights)

    def run(self) -> None:
        """Train to `--train-iters`, or to the next multiple of `--exit-interval`.

        Raises:
            ConfigError: before the first step, for offload flags that do not fit the model.
        """
        args, progress = self._args, self._progress
        metrics = Metrics(args.train_iters, progress.step, args.log_interval, args.metrics_json, self._meter)
        try:
            if args.eval_at_start:
                metrics.start(self._evaluate())
            while progress.step < args.train_iters:
                self._step(metrics)
                if _is_due(args.exit_interval, progress.step):
                    break
        finally:
            metrics.close()
        if args.save is not None and not _is_due(args.save_interval, progress.step):
            self._checkpoints.save(args.save, progress)

    def _step(self, metrics: Metrics) -> None:
        args, progress = self._args, self._progress
        records_timeline = args.timeline_json is not None and progress.step + 1 == self._timeline_step()
        self._prepare_meter(records_timeline)
        is_shown = self._asks_for_times()
        begin = time.perf_counter()
        result = self._train_step()
        self._synchronize()
        step_ms = 1e3 * (time.perf_counter() - begin)
        self._num_steps += 1
        self._steps.spans.is_recording = False
        stats = None if self._offload is None else self._offload.stats
        validation_loss = self._evaluate() if _is_due(args.eval_interval, progress.step) else None
        engine = None if self._offload is None else self._offload.engine
        controller = None if engine is None else engine.budget
        times = engine.timer.times if is_shown and engine is not None else None
        metrics.step(progress.step, result, step_ms, stats, validation_loss, controller, times)
        if records_timeline:
            metrics.timeline(args.timeline_json, progress.step, begin, self._steps.spans)
        if _is_due(args.save_interval, progress.step):
            self._checkpoints.save(args.save, progress)

    def _asks_for_times(self) -> bool:
        """Have the second step, and one in each log interval, timed for a line about the offload."""
        step, interval = self._progress.step + 1, self._args.log_interval
        engine = None if self._offload is None else self._offload.engine
        if engine is None or not (self._num_steps == 1 or (interval > 1 and step % interval == 0)):
            return False
        engine.timer.ask()
        return True

    def _train_step(self) -> StepResult:
        try:
            return self._steps.train(self._train_set, self._progress)
        except Exception as error:
            if self._offload is None or error is not self._offload.mistake:
                raise
            raise ConfigError(str(error)) from error

    def _prepare_meter(self, records_timeline: bool) -> None:
        self._steps.spans.is_recording = records_timeline
        if self._meter is not None:
            self._meter.record_timeline = records_timeline
            self._meter.reset_peak()

    def _timeline_step(self) -> int:
        # the first step is not typical, because it creates buffers
        return self._args.timeline_step or min(2, self._args.train_iters)

    def _evaluate(self) -> float | None:
        return self._steps.evaluate(self._valid_set, self._args.eval_iters)

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def _is_due(interval: int | None, step: int) -> bool:
    return interval is not None and step % interval == 0
