# SPDX-License-Identifier: Apache-2.0
"""`LayerWatch`: finds out, in ordinary steps, which layers could be checkpointed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from offload_engine._budget.module_runs import ModuleRuns
from offload_engine._compat import torch_private
from offload_engine.frontends._common.session import is_in_backward
from offload_engine.frontends._layers.caches import LayerCaches
from offload_engine.frontends._layers.find_layers import Layer, units_inside
from offload_engine.frontends._layers.layer_checkpoint import is_checkpointed
from offload_engine.frontends._layers.layer_host import LayerHost
from offload_engine.planning.choices import Slot, slots_of
from offload_engine.planning.recompute import RecomputeOption
from offload_engine.planning.shapes import GroupShape, Shapes

_Effects = tuple[int, int]


class LayerWatch:
    """Watches the forwards of layers for effects that a second run in backward would repeat.

    A layer is not offered if it

    - is checkpointed or compiled, or has a module inside that is;
    - receives a cache of keys and values, which a second run would append to;
    - has buffers that its forward writes, as batch norm does;
    - takes part in a collective: the other ranks might not run it a second time;
    - runs several times in a forward, or under a checkpoint of its caller.

    Args:
        layers: layers of the model.
        groups: groups of those layers.
        is_watching: returns whether to watch the running step.
        runs: told when layers run.
    """

    def __init__(
        self, layers: Sequence[Layer], groups: LayerHost, is_watching: Callable[[], bool], runs: ModuleRuns
    ) -> None:
        self._groups = groups
        self._runs = runs
        self._is_watching = is_watching
        self._watched = [_Watched(layer) for layer in layers]
        for watched in self._watched:
            before, after = self._hooks_of(watched)
            groups.add_hooks_inside(watched.layer, before, after)

    def offer(self, shapes: Shapes) -> tuple[RecomputeOption, ...]:
        """Return the layers that could be recomputed, with the bytes and times of a measured step."""
        found = [watched.option(shapes) for watched in self._watched]
        return tuple(option for option in found if option is not None)

    def refused(self) -> dict[str, str]:
        """Return why layers cannot be checkpointed, by name; without layers that have not run yet."""
        return {watched.layer.name: reason for watched in self._watched if (reason := watched.reason())}

    def _hooks_of(self, watched: _Watched) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._is_watching() and torch.is_grad_enabled() and not is_in_backward():
                watched.begin(self._groups.open_layer is watched.layer.module, args, kwargs)
                watched.end_run = self._runs.begin(watched.kind, (*args, *kwargs.values()))

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._is_watching():
                watched.end_run(output)
                watched.end()

        return before, after


class _Watched:
    """Watches one layer."""

    def __init__(self, layer: Layer) -> None:
        self.layer: Layer = layer
        self.kind: str = type(layer.inner).__name__
        self.end_run: Callable[[Any], None] = _ignore
        self._caches = LayerCaches(layer.inner)
        self._input_bytes = -1  # of the last forward that was watched
        self._before: _Effects | None = None
        self._reason = ""

    def begin(self, is_open: bool, args: Any, kwargs: Any) -> None:
        """Note the start of a forward; `is_open`: whether the group of this layer is open."""
        if not is_open:
            self._reason = "its caller checkpoints it"
            return
        if self._caches.are_given(args, kwargs):
            self._reason = "it fills a cache of keys and values (use_cache)"
        self._input_bytes = _moving_bytes((*args, *kwargs.values()))
        self._before = self._effects()

    def end(self) -> None:
        """Note the end of the forward."""
        before, self._before = self._before, None
        if before is None:
            return
        buffers, collectives = self._effects()
        if buffers != before[0]:
            self._reason = "its forward writes buffers"
        elif collectives != before[1]:
            self._reason = "its forward communicates with other ranks"

    def reason(self) -> str:
        """Return why the layer cannot be checkpointed; empty if it can."""
        if is_checkpointed(self.layer):
            return "it is already checkpointed"
        if any(map(_is_compiled, self.layer.module.modules())):
            return "it is compiled"
        if any(_checkpoints_itself(module) for module in self.layer.module.modules()):
            return "it checkpoints a part of itself"
        if any(unit is not self.layer.inner for unit in units_inside(self.layer)):
            return "a module inside it gathers its weights"
        return self._reason

    def option(self, shapes: Shapes) -> RecomputeOption | None:
        """Return the option to recompute this layer; None if that is impossible, or would free nothing."""
        found = self._groups_in(shapes)
        freed = sum(group.nbytes for _, group in found) - self._input_bytes
        runs_once = len({slot.layer for slot, _ in found}) == 1
        if freed <= 0 or self._input_bytes < 0 or not runs_once or self.reason():
            return None
        milliseconds = sum(group.forward_ms for _, group in found)
        return RecomputeOption(self.kind, frozenset(slot for slot, _ in found), freed, milliseconds, stops_early=True)

    def _groups_in(self, shapes: Shapes) -> list[tuple[Slot, GroupShape]]:
        return [
            (slot, group)
            for stage, shape in enumerate(shapes)
            for slot, group in zip(slots_of(stage, shape.groups), shape.groups, strict=True)
            if slot.name == self.layer.name
        ]

    def _effects(self) -> _Effects:
        buffers = sum(buffer._version for buffer in self.layer.inner.buffers() if not buffer.is_inference())
        return buffers, torch_private.num_collectives()


def _ignore(_: Any) -> None: ...


def _moving_bytes(inputs: tuple[Any, ...]) -> int:
    """Return the bytes of the inputs that a checkpoint saves and that may move: those without a gradient stay."""
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in inputs
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad
    }
    return sum(storages.values())


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"


def _checkpoints_itself(module: nn.Module) -> bool:
    return module.__dict__.get("gradient_checkpointing") is True or hasattr(module, "_checkpoint_wrapped_module")
