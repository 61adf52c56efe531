# SPDX-License-Identifier: Apache-2.0
"""`manage_activations`: offloads activations of any model, without changes to the model."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from types import TracebackType
from typing import NamedTuple

import torch
from torch import nn

from offload_engine._compat.own_hooks import OwnHooks
from offload_engine.config import OffloadConfig
from offload_engine.engine import OffloadEngine
from offload_engine.frontends._common.compiling import refuse_when_compiled
from offload_engine.frontends._common.device import device_for
from offload_engine.frontends._common.groups import GROUP_BYTES, AutomaticGroups, check_group_bytes
from offload_engine.frontends._common.recording import RecordsSteps
from offload_engine.frontends._common.session import Session
from offload_engine.frontends._common.weights import weights_of
from offload_engine.frontends._layers.find_layers import Layer, body_of, find_layers
from offload_engine.frontends._layers.marked_layers import MarkedLayers
from offload_engine.frontends._layers.recompute_choice import LayerRecompute
from offload_engine.frontends.checkpoint import checkpoint_of_all_inputs, put_in_force, take_out_of_force
from offload_engine.stats import IterationStats

logger = logging.getLogger(__name__)


def manage_activations(
    model: nn.Module | Iterable[torch.Tensor] | None = None,
    config: OffloadConfig | None = None,
    *,
    group_bytes: int = GROUP_BYTES,
    engine: OffloadEngine | None = None,
) -> ManagedActivations:
    """Offload tensors that autograd saves inside a `with` statement, around forward or forward and backward.

    ```python
    activations = manage_activations(model)  # once
    for batch in batches:
        with activations:
            loss = model(batch)
        loss.backward()
    ```

    The returned object keeps host memory from step to step, so make it once and enter it in each step, or enter it
    once around the whole loop.

    Args:
        model: its parameters and buffers never move; or an iterable of these tensors. Without it, leaves that receive a
            gradient and parameters are recognized as weights, with their views and the copies that autocast makes;
            buffers are not.
        config: bounds and thresholds. With a `gpu_budget`, and a `model` whose layers are found, the engine may also
            checkpoint layers whose results stay equal, unless `recompute="off"`.
        group_bytes: saved tensors are copied out together as soon as they have this many bytes.
        engine: used instead of a new one, with its own config, device and meter. It must have no other user.

    Raises:
        ValueError: if `group_bytes` is below 1, or both `config` and `engine` are given.
        TypeError: if `model` has another type, for instance if it is a configuration.
    """
    if config is not None and engine is not None:
        raise ValueError("manage_activations() takes a config or an engine, which has one already; got both")
    check_group_bytes(group_bytes)
    if isinstance(model, nn.Module):
        _warn_if_compiled(model)
    parts = _parts_of(model)

    def start() -> _Started:
        settings = config if config is not None else OffloadConfig()
        driven = engine if engine is not None else OffloadEngine(settings, device_for(parts, settings))
        groups = AutomaticGroups(Session(driven, lambda: weights_of(parts)), group_bytes)
        return _Started(groups, _checkpoints_of(model, groups))

    return ManagedActivations(start)


class _Started(NamedTuple):
    groups: AutomaticGroups
    checkpoints: _Checkpoints | None


class _Checkpoints:
    """Lets a budget choose layers to checkpoint."""

    def __init__(self, model: nn.Module, layers: Sequence[Layer], groups: AutomaticGroups) -> None:
        self.layers: MarkedLayers = MarkedLayers(body_of(model, layers), layers, groups)
        self._recompute = LayerRecompute(layers, self.layers, groups.session.engine)

    def remove(self) -> None:
        """Restore the model. Idempotent."""
        self._recompute.remove()
        self.layers.remove()


class ManagedActivations(RecordsSteps):
    """A context manager to enter once per step or once for all steps. Made by `manage_activations`.

    Args:
        start: makes the engine and its groups. Called at the first use, because the model may move to its GPU until
            then.
    """

    def __init__(self, start: Callable[[], _Started]) -> None:
        self._start = start
        self._hooks: OwnHooks | None = None

    @cached_property
    def _started(self) -> _Started:
        return self._start()

    @property
    def _groups(self) -> AutomaticGroups:
        return self._started.groups

    @property
    def engine(self) -> OffloadEngine:
        """Return the engine that moves the tensors."""
        return self._groups.session.engine

    @property
    def stats(self) -> IterationStats:
        """Return the counters of the running step, or of the last one. A step begins with its first saved tensor."""
        return self._groups.session.stats

    def __str__(self) -> str:
        """Return one line about the last step. Does not count as a use, so it makes no engine."""
        return super().__str__() if "_started" in vars(self) else f"{type(self).__name__}: no step yet"

    def __enter__(self) -> ManagedActivations:
        """Enter the hooks. An earlier `with` of this object that has not been exited ends, with a warning.

        Raises:
            OffloadError: if it is closed, or inside compiled code.
        """
        refuse_when_compiled("with manage_activations()")
        self._groups.session.check_open("manage_activations()")
        if self._hooks is not None:  # no error: an interrupt at the entry of `__exit__` cannot be told from a mistake
            logger.warning(
                "this manage_activations() is entered again: its last `with` was interrupted, or is around this one "
                "and offloads no more. Remove the inner of two, because the outer one covers it. A second model needs "
                "its own manage_activations()."
            )
            self._leave(self._hooks)
            self._groups.abandon_forward()
        hooks = self._groups.hooks()
        if self._started.checkpoints is not None:
            self._started.checkpoints.layers.begin()
        hooks.__enter__()  # raises if saved tensors hooks are disabled: then nothing is entered
        put_in_force(self, checkpoint_of_all_inputs)  # the hooks pack the inputs of checkpoints
        self._hooks = hooks  # last: after an earlier interrupt this counts as not entered
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._hooks is None:  # a `with` inside this one has ended it
            return
        self._leave(self._hooks)
        if exc is not None:
            self._groups.abandon_forward()
            return
        self._groups.end_forward()
        self._groups.session.warn_if_idle()

    def _leave(self, hooks: OwnHooks) -> None:
        self._hooks = None
        hooks.__exit__()
        take_out_of_force(self)

    def close(self) -> None:
        """Return host memory to the system. Remaining graphs can no longer run their backward. Idempotent."""
        if self._hooks is None:
            self._groups.pop_leftover()
        if self._started.checkpoints is not None:
            self._started.checkpoints.remove()
        self._groups.session.close()


def _checkpoints_of(model: object, groups: AutomaticGroups) -> _Checkpoints | None:
    """Offer the layers of a model to a budget; None without a budget that may recompute, or without layers."""
    engine = groups.session.engine
    if engine.budget is None or engine.config.recompute != "auto" or not isinstance(model, nn.Module):
        return None
    try:
        layers = find_layers(model, None)
    except ValueError as error:
        logger.info("gpu_budget: nothing is recomputed, as no layers were found: %s", error)
        return None
    return _Checkpoints(model, layers, groups)


def _parts_of(model: nn.Module | Iterable[torch.Tensor] | None) -> tuple[nn.Module | torch.Tensor, ...]:
    if model is None:
        return ()
    if isinstance(model, nn.Module):
        return (model,)
    if isinstance(model, Iterable):
        return tuple(model)
    raise TypeError(
        f"the first argument of manage_activations() is a model, an iterable of its parameters and buffers, or None, "
        f"got {type(model).__name__}. An OffloadConfig comes second: manage_activations(model, config)"
    )


def _warn_if_compiled(model: nn.Module) -> None:
    if type(model).__name__ == "OptimizedModule" or model._compiled_call_impl is not None:
        logger.warning(
            "%s is compiled as a whole: its one graph saves all activations at the end of forward and needs them all "
            "at the start of backward, so offload frees little. Compile its layers instead.",
            type(model).__name__,
        )
