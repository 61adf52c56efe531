# SPDX-License-Identifier: Apache-2.0
"""`OffloadCallback`: offloads activations in the `Trainer` of Lightning, under either name of its package."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ModuleNotFoundError:  # the same classes under their older name; a callback serves the trainers of both
    from pytorch_lightning import Callback, LightningModule, Trainer

from offload_engine.config import OffloadConfig
from offload_engine.frontends.integrations._training import FindLayers, OffloadsTraining, TrainingOffload, config_of


class OffloadCallback(OffloadsTraining, Callback):
    """Offloads the saved tensors of a model's layers while `Trainer.fit` runs.

    `Trainer(callbacks=[OffloadCallback()])`. The distribution of the model (FSDP, DDP or neither) is detected from the
    model as the trainer's strategy has set it up. Validation, gradient accumulation and resuming need no settings. The
    figures of the last forward and backward are logged as `offload_*`, as often as the trainer logs: GiB and percent
    moved, peaks in GiB on the device and the host, time that compute waited for copies.

    Args:
        config: bounds and thresholds.
        enable_ckpt: checkpoint the layers as well, so that only their inputs are kept, and offloaded.
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
        self._bracketed: _Bracketed | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the model as it will train."""
        self.remove()  # still attached if an earlier training raised and its trainer did not call the callback
        self._offload.attach(trainer.strategy.model)
        if trainer.strategy.model is pl_module:  # otherwise the wrapper's forward runs `training_step`
            self._bracket_training_step(pl_module)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        """Time the steps that are logged."""
        if (trainer.global_step + 1) % max(1, trainer.log_every_n_steps) == 0:
            self._offload.time_next_step()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Log the figures."""
        pl_module.log_dict(self._offload.metrics())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remove the offload from the model."""
        self.remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Remove the offload from the model: `on_train_end` will not be called."""
        self.remove()

    def remove(self) -> None:
        """Remove the offload from the model, as the end of its training does. Idempotent."""
        super().remove()
        bracketed, self._bracketed = self._bracketed, None
        if bracketed is not None:
            del bracketed.module.training_step
            vars(bracketed.module).update(bracketed.replaced)

    def _bracket_training_step(self, pl_module: LightningModule) -> None:
        """Wrap `training_step`, which may call the layers without calling the module's forward."""
        self._bracketed = _Bracketed(
            pl_module, {name: own for name, own in vars(pl_module).items() if name == "training_step"}
        )
        pl_module.training_step = _TrainingStep(pl_module.training_step, self._offload)


class _Bracketed(NamedTuple):
    """A module whose `training_step` is replaced."""

    module: LightningModule
    replaced: dict[str, Any]  # its own attributes; mostly none, because `training_step` is a method of the class


class _TrainingStep:
    """A `training_step` with offload; on a copied or unpickled module it calls the original one without."""

    def __init__(self, training_step: Callable[..., Any], offload: TrainingOffload) -> None:
        functools.update_wrapper(self, training_step)  # Lightning reads the signature
        self._training_step = training_step
        self._offload: TrainingOffload | None = offload

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._offload.forward() if self._offload is not None else nullcontext():
            return self._training_step(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_offload": None}
