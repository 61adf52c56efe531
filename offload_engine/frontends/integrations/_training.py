# SPDX-License-Identifier: Apache-2.0
"""`TrainingOffload`: offloads the layers of a model while a trainer trains it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn

from offload_engine.config import OffloadConfig
from offload_engine.frontends._layers.find_layers import strategy_of
from offload_engine.frontends.layers import LayerOffload, enable_activation_offloading
from offload_engine.stats import StepTimes

FindLayers = Callable[[nn.Module], Sequence[nn.Module]]


def config_of(config: OffloadConfig | None, settings: dict[str, Any]) -> OffloadConfig | None:
    """Return the configuration of a callback, from an object or from settings.

    Raises:
        ValueError: if both are given, or a value is outside its range.
        TypeError: if a setting is unknown, or the configuration has another type.
    """
    if config is not None and not isinstance(config, OffloadConfig):
        raise TypeError(
            f"config must be an OffloadConfig, got {config!r}; a policy goes into OffloadConfig(policy=...)"
        )
    if not settings:
        return config
    if config is not None:
        raise ValueError(f"config and {', '.join(settings)} both say how to offload: pass one of them")
    return OffloadConfig.from_flags(**settings)


class OffloadsTraining:
    """Reports on and removes the offload of a callback, whose `TrainingOffload` is `_offload`."""

    _offload: TrainingOffload

    @property
    def handle(self) -> LayerOffload | None:
        """Return the handle of the model in training, with its engine, layers and counters; None before and after."""
        return self._offload.handle

    def __str__(self) -> str:
        """Return one line about the last step of the model in training: `print(callback)`."""
        return f"{type(self).__name__}: {self.handle or 'no model trains'}"

    def remove(self) -> None:
        """Remove the offload from the model, as the end of its training does. Idempotent.

        For use after a training that raised or was interrupted without a call of the callback. The next training begins
        as usual.
        """
        self._offload.detach()

    def record(self, file: str | os.PathLike[str] | None = None) -> None:
        """Record the next step that begins; before the training, its first step. See docs/observe.md.

        Args:
            file: path to write; `{rank}` and `{step}` in the name are replaced. None: record for `report` only.
        """
        self._offload.record(file)

    def report(self) -> str | None:
        """Return the tables of the last recorded step of this rank, or a summary of its counters.

        None before the first training.
        """
        return self._offload.report()


class TrainingOffload:
    """Shared implementation of the trainer callbacks. Offloads one model at a time.

    Args:
        config: bounds and thresholds.
        enable_ckpt: checkpoint the layers as well; see `enable_activation_offloading`.
        layers: returns the layers of the model that is about to train; None: they are found.

    Attributes:
        handle: handle of the model in training; None while none is attached.
    """

    def __init__(self, config: OffloadConfig | None, enable_ckpt: bool, layers: FindLayers | None) -> None:
        self._config = config
        self._enable_ckpt = enable_ckpt
        self._find_layers = layers
        self.handle: LayerOffload | None = None
        self._asks_for: list[str | os.PathLike[str] | None] = []  # the file of a recording, until a model is attached
        self._last_report: str | None = None
        self._is_timed = False  # a timed step has begun since the last metrics
        self._times: StepTimes | None = None

    def attach(self, model: nn.Module) -> None:
        """Offload `model`, wrapped and sharded as it will train.

        Raises:
            ValueError: if no layers are found.
            OffloadError: if the model is already offloaded.
        """
        self.detach()  # still attached if an earlier training raised and its trainer did not call the callback
        self.handle = enable_activation_offloading(
            model,
            strategy_of(model),
            self._enable_ckpt,
            config=self._config,
            layers=None if self._find_layers is None else self._find_layers(model),
        )
        while self._asks_for:
            self.handle.record(self._asks_for.pop())

    def detach(self) -> None:
        """Remove the offload from the model. Idempotent."""
        handle, self.handle = self.handle, None
        if handle is not None:
            self._last_report = handle.report()
            handle.remove()

    def forward(self) -> AbstractContextManager[None]:
        """Return a context manager for code that calls the layers directly; a no-op while no model is attached."""
        return nullcontext() if self.handle is None else self.handle.forward()

    def record(self, file: str | os.PathLike[str] | None = None) -> None:
        """Record the next step that begins, or the first one of the next model to train."""
        if self.handle is None:
            self._asks_for = [file]
        else:
            self.handle.record(file)

    def report(self) -> str | None:
        """Return `LayerOffload.report` of the model that trains or trained last; None before any."""
        return self._last_report if self.handle is None else self.handle.report()

    def time_next_step(self) -> None:
        """Time the next forward and backward, which will be logged."""
        if self.handle is not None:
            self.handle.engine.timer.ask()
            self._is_timed = True

    def metrics(self) -> dict[str, float]:
        """Return the figures of the last forward and backward by log name; empty while no model is attached.

        The times are of the last forward and backward that were timed. Blocks, once for each of them, until the device
        has finished.
        """
        if self.handle is None:
            return {}
        if self._is_timed:
            self._is_timed, self._times = False, self.handle.engine.timer.times
        found = self.handle.stats.metrics(self._times)
        return {f"offload_{name}": float(f"{value:.4g}") for name, value in found.items()}
