"""`manage_activations`: offload for any model, without a mark in it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextvars import Token
from functools import cached_property
from types import TracebackType

import torch
from torch import nn

from offload_engine.config import OffloadConfig
from offload_engine.engine import OffloadEngine
from offload_engine.errors import OffloadError
from offload_engine.frontends._common.compiling import refuse_when_compiled
from offload_engine.frontends._common.device import device_for
from offload_engine.frontends._common.groups import GROUP_BYTES, AutomaticGroups, check_group_bytes
from offload_engine.frontends._common.session import Session
from offload_engine.frontends._common.weights import weights_of
from offload_engine.frontends.checkpoint import Checkpoint, checkpoint_in_force, checkpoint_of_all_inputs
from offload_engine.stats import IterationStats

logger = logging.getLogger(__name__)


def manage_activations(
    model: nn.Module | Iterable[torch.Tensor] | None = None,
    config: OffloadConfig | None = None,
    *,
    group_bytes: int = GROUP_BYTES,
    engine: OffloadEngine | None = None,
) -> ManagedActivations:
    """Offload what autograd saves inside a `with` statement, around forward or around forward and backward.

    ```python
    activations = manage_activations(model)  # once
    for batch in batches:
        with activations:
            loss = model(batch)
        loss.backward()
    ```

    Host memory is kept from step to step by the returned object, so make it once and enter it in each step. Or enter
    it once, around the whole loop.

    Args:
        model: whose parameters and buffers never move, or these tensors themselves. Without it, leaves that receive a
            gradient and parameters are known as weights, and so are their views and the copies that autocast makes of
            them; buffers are not.
        config: bounds and thresholds.
        group_bytes: as soon as saved tensors have so many bytes together they leave.
        engine: to be used instead of a new one, with its own config, device and meter. Nobody else may drive it.

    Raises:
        ValueError: for `group_bytes` below 1, and for both `config` and `engine`.
    """
    if config is not None and engine is not None:
        raise ValueError("manage_activations() takes a config or an engine, which has one already; got both")
    check_group_bytes(group_bytes)
    if isinstance(model, nn.Module):
        _warn_if_compiled(model)
    parts = (model,) if isinstance(model, nn.Module) else () if model is None else tuple(model)

    def start() -> AutomaticGroups:
        settings = config if config is not None else OffloadConfig()
        driven = engine if engine is not None else OffloadEngine(settings, device_for(parts, settings))
        return AutomaticGroups(Session(driven, lambda: weights_of(parts)), group_bytes)

    return ManagedActivations(start)


class ManagedActivations:
    """What `manage_activations` returns: a context manager that may be entered again, once per step or once for all.

    Args:
        start: makes the engine and what drives it. Called when first needed, because the model may be on its way to
            its GPU before.
    """

    def __init__(self, start: Callable[[], AutomaticGroups]) -> None:
        self._start = start
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._token: Token[Checkpoint | None]

    @cached_property
    def _groups(self) -> AutomaticGroups:
        return self._start()

    @property
    def engine(self) -> OffloadEngine:
        """Moves the tensors."""
        return self._groups.session.engine

    @property
    def stats(self) -> IterationStats:
        """Counters of the running step, or of the last one. A step begins with the first tensor saved for it."""
        return self._groups.session.stats

    def __enter__(self) -> ManagedActivations:
        """Raises:
        OffloadError: if it is entered already, or inside compiled code.
        """
        refuse_when_compiled("with manage_activations()")
        if self._hooks is not None:
            raise OffloadError(
                "this manage_activations() is entered already: leave it first, or leave the inner `with` out, because "
                "the outer one covers it. A second model takes a manage_activations() of its own."
            )
        hooks = self._groups.hooks()
        hooks.__enter__()  # refused where saved tensors hooks are disabled: then nothing is entered
        self._hooks = hooks
        self._token = checkpoint_in_force.set(checkpoint_of_all_inputs)  # the hooks take charge of its inputs
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        hooks, self._hooks = self._hooks, None
        assert hooks is not None
        hooks.__exit__(exc_type, exc, traceback)
        checkpoint_in_force.reset(self._token)
        if exc is not None:
            self._groups.abandon_forward()
            return
        self._groups.end_forward()
        self._groups.session.warn_if_idle()

    def close(self) -> None:
        """Give host memory back. A graph that is still there cannot run its backward any more. Idempotent."""
        self._groups.session.close()


def _warn_if_compiled(model: nn.Module) -> None:
    if type(model).__name__ == "OptimizedModule" or model._compiled_call_impl is not None:
        logger.warning(
            "%s is compiled as a whole: one graph saves all its activations when its forward is over, and needs them "
            "all when its backward begins, so offload frees little. Compile its layers instead.",
            type(model).__name__,
        )
