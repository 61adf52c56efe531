# SPDX-License-Identifier: Apache-2.0
"""`enable_activation_offloading`: offloads a model with one group per layer, under FSDP, DDP or neither."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import nn

from offload_engine.config import OffloadConfig
from offload_engine.engine import OffloadEngine
from offload_engine.errors import OffloadError
from offload_engine.frontends._common.device import device_for
from offload_engine.frontends._common.groups import GROUP_BYTES
from offload_engine.frontends._common.recording import RecordsSteps
from offload_engine.frontends._common.session import Session
from offload_engine.frontends._common.weights import weights_of
from offload_engine.frontends._layers.find_layers import Layer, body_of, check_strategy, find_layers
from offload_engine.frontends._layers.group_hooks import GroupHook
from offload_engine.frontends._layers.layer_checkpoint import LayerCheckpoints
from offload_engine.frontends._layers.layer_groups import LayerGroups
from offload_engine.frontends._layers.recompute_choice import LayerRecompute
from offload_engine.meter import ResidencyMeter
from offload_engine.policies import GroupWindow, PrefetchWindow, ResidentLayers
from offload_engine.stats import IterationStats

logger = logging.getLogger(__name__)


class LayerOffload(RecordsSteps):
    """Offloads the activations of one model until `remove`. Made by `enable_activation_offloading`.

    Attributes:
        layers: names of the layers, in order; the last one stays on the device.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer], engine: OffloadEngine, enable_ckpt: bool) -> None:
        self.layers: tuple[str, ...] = tuple(layer.name for layer in layers)
        self._session = Session(engine, lambda: weights_of((model,)))
        self._groups = LayerGroups(
            body_of(model, layers),
            layers,
            self._session,
            group_bytes=None if isinstance(engine.config.policy, (GroupWindow, PrefetchWindow)) else GROUP_BYTES,
        )
        self._checkpoints = LayerCheckpoints(model, layers, self._groups) if enable_ckpt else None
        may_recompute = engine.budget is not None and engine.config.recompute == "auto" and not enable_ckpt
        self._recompute = LayerRecompute(layers, self._groups, engine) if may_recompute else None
        # On the model, to warn even if it never calls the module that runs the layers.
        self._end_of_forward = model.register_forward_hook(GroupHook(lambda *_: self._session.warn_if_idle()))

    @property
    def engine(self) -> OffloadEngine:
        """Return the engine that moves the saved tensors of all layers but the last."""
        return self._session.engine

    @property
    def stats(self) -> IterationStats:
        """Return the counters of the running or last iteration: from a forward to the backward that ends it."""
        return self._session.stats

    def __str__(self) -> str:
        """Return one line about the offloaded layers and the last step: `print(handle)`."""
        which = f"{len(self.layers)} layers, {self.layers[0]} to {self.layers[-1]}"
        return f"offload of {which}: {self.engine}"

    def forward(self) -> AbstractContextManager[None]:
        """Return a context manager for code that calls the layers one by one, outside the forward of their module.

        Not needed for the forward of the module that contains the layers. No-op inside another one of the same thread:
        the outermost one is the forward.
        """
        self._session.check_open("enable_activation_offloading()")
        return self._groups.forward()

    def remove(self) -> None:
        """Remove all hooks, restore the forward of each layer, and close the engine. Idempotent.

        Call it between steps: a graph whose backward has not run raises `OffloadError` in backward.
        """
        if self._checkpoints is not None:
            self._checkpoints.remove()
        if self._recompute is not None:
            self._recompute.remove()
        self._groups.remove()
        self._end_of_forward.remove()
        self._session.close()


def enable_activation_offloading(
    model: nn.Module,
    strategy: str | None = None,
    enable_ckpt: bool = False,
    *,
    config: OffloadConfig | None = None,
    layers: Sequence[nn.Module] | None = None,
    meter: ResidencyMeter | None = None,
) -> LayerOffload:
    """Offload the saved tensors of all layers of `model` except the last to host memory.

    The copy-out of a layer overlaps the forward of the next one, its copy-in overlaps the backward of the next one, and
    at most two layers have their activations on the device. Train, evaluate and accumulate gradients as before.

    Arguments and grouping are those of verl's function of this name (verl/utils/activation_offload.py).

    Args:
        model: already wrapped or sharded.
        strategy: "fsdp" (FullyShardedDataParallel), "fsdp2" (`fully_shard`), "ddp" or "none", which is checked; None:
            detected from the model.
        enable_ckpt: checkpoint each layer as well, so that only its input is kept, and offloaded. Switches the model's
            own checkpointing off. With False, a model's own checkpointing stays on, and the inputs of its layers are
            offloaded.
        config: bounds and thresholds. The default policy is `policies.ResidentLayers(2)`. With a `gpu_budget`, the
            engine chooses what stays, and may checkpoint layers whose results stay equal, unless `recompute="off"`.
        layers: the modules to group by, in the order in which they run; None: they are found.
        meter: counts resident bytes as well.

    Raises:
        ValueError: if the strategy is unknown or not that of the model, or the layers are not found or are lists, which
            are never called.
        TypeError: if the strategy is a configuration.
        OffloadError: if the model, or a part of it, is already offloaded.
    """
    if isinstance(strategy, OffloadConfig):
        raise TypeError("enable_activation_offloading() got an OffloadConfig as strategy: pass it as config=...")
    if strategy is not None:
        check_strategy(model, strategy)
    found = find_layers(model, layers)
    _check_not_offloaded(model)
    config = (config or OffloadConfig()).with_default(ResidentLayers())
    engine = OffloadEngine(config, device_for((model,), config), meter)
    handle = LayerOffload(model, found, engine, enable_ckpt)
    logger.info(
        "%s: %d layers, %s to %s, of which the last stays on the device",
        type(model).__name__,
        len(found),
        found[0].name,
        found[-1].name,
    )
    return handle


def _check_not_offloaded(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if any(isinstance(hook, GroupHook) and hook.function for hook in module._forward_hooks.values()):
            where = f", in {name}" if name else ""
            raise OffloadError(
                f"this {type(model).__name__} is already offloaded{where}: call remove() on the handle that "
                "enable_activation_offloading() returned. Pass all layers to offload in one call, as layers=[...]"
            )
