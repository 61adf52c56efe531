# SPDX-License-Identifier: Apache-2.0
"""`OffloadCallback`: offloads activations in the `Trainer` of transformers."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from offload_engine.config import OffloadConfig
from offload_engine.frontends.integrations._reporters import move_before_reporters
from offload_engine.frontends.integrations._training import FindLayers, OffloadsTraining, TrainingOffload, config_of


class OffloadCallback(OffloadsTraining, TrainerCallback):
    """Offloads the saved tensors of a model's layers while the `Trainer` trains it.

    `Trainer(model, args, callbacks=[OffloadCallback()])`. The distribution of the model (FSDP, DDP or neither) is
    detected from the model as the `Trainer` has prepared it. Evaluation, gradient accumulation and
    `gradient_checkpointing` need no settings. The training logs, those of W&B and TensorBoard included, get the
    figures of the last forward and backward as `offload_*`: GiB and percent moved, peaks in GiB on the device and the
    host, time that compute waited for copies.

    Args:
        config: bounds and thresholds.
        enable_ckpt: checkpoint the layers as well, so that only their inputs are kept, and offloaded. Leave
            `TrainingArguments.gradient_checkpointing` off then.
        layers: returns the layers of the model, in the order in which they run; None: they are found.
        settings: instead of a config, those of `OffloadConfig.from_flags`: `OffloadCallback(gpu_budget="60GiB")`.

    Raises:
        ValueError, TypeError: if a setting is unknown or outside its range, or there is a config as well.
    """

    def __init__(
        self,
        config: OffloadConfig | None = None,
        *,
        enable_ckpt: bool = False,
        layers: FindLayers | None = None,
        **settings: Any,
    ) -> None:
        self._offload = TrainingOffload(config_of(config, settings), enable_ckpt, layers)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **kwargs: Any
    ) -> None:
        """Attach to the model as it will train."""
        self._offload.attach(model)
        move_before_reporters(self)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Time the steps that are logged."""
        if (state.global_step + 1) % max(1, state.logging_steps) == 0:
            self._offload.time_next_step()

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        """Add the figures to a training log, and to the history entry that the `Trainer` has already made of it."""
        if "loss" in logs or "train_runtime" in logs:  # not an evaluation; the summary, as no log may have come before
            logs.update(self._offload.metrics())
            state.log_history[-1].update(self._offload.metrics())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the offload from the model."""
        self._offload.detach()
