"""`OffloadCallback`: activation offload in the `Trainer` of transformers."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from offload_engine.config import OffloadConfig
from offload_engine.frontends.integrations._training import FindLayers, RecordsTraining, TrainingOffload


class OffloadCallback(RecordsTraining, TrainerCallback):
    """Offloads the saved tensors of a model's layers while the `Trainer` trains it.

    `Trainer(model, args, callbacks=[OffloadCallback()])`. The distribution of the model (FSDP, DDP or neither) is
    detected from the model as the `Trainer` has prepared it. Evaluation, gradient accumulation and
    `gradient_checkpointing` need no settings. The training logs get the bytes moved in the last forward and backward,
    as `offload_*`.

    Args:
        config: bounds and thresholds.
        enable_ckpt: checkpoint the layers as well, so that only their inputs are kept, and offloaded. Leave
            `TrainingArguments.gradient_checkpointing` off then.
        layers: returns the layers of the model, in the order in which they run; None: they are found.
    """

    def __init__(
        self, config: OffloadConfig | None = None, *, enable_ckpt: bool = False, layers: FindLayers | None = None
    ) -> None:
        self._offload = TrainingOffload(config, enable_ckpt, layers)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, *, model: nn.Module, **kwargs: Any
    ) -> None:
        """Attach to the model as it will train."""
        self._offload.attach(model)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        """Add the counters to a training log, and to the history entry that the `Trainer` has already made of it."""
        if "loss" in logs:  # not an evaluation, nor the summary at the end
            logs.update(self._offload.metrics())
            state.log_history[-1].update(self._offload.metrics())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the offload from the model."""
        self._offload.detach()
