# SPDX-License-Identifier: Apache-2.0
"""`RecomputedInputs`: puts the inputs of selective recomputation into groups of their own.

A recomputed module saves nothing in the forward and runs without gradients, so no bracket opens in it. Its input is
saved around it, by one of two functions of megatron-core, identified by the function that it runs again:

1. `checkpoint` saves inputs and returns outputs like any module. Its backward reads the inputs first, so the end of the
   group is marked on its output.
2. `CheckpointWithoutOutput` recomputes from a hook on a later tensor: the output of the attention or MLP after a norm.
   There the backward needs the input before all tensors saved in between. So the group opens and ends where that hook
   is registered, and its backward begins with a hook before that one. Until then the input is saved outside the groups.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from megatron_patches._hooks.bracket import GroupBracket
from megatron_patches._model.modules import EXPERTS, inputs_of
from megatron_patches._model.sites import Site


class RecomputedInputs:
    """Finds the bracket of a recomputation's input. It holds no module."""

    def __init__(self) -> None:
        self._of_checkpoints: _ByModule = weakref.WeakKeyDictionary()
        self._of_discarding: _ByModule = weakref.WeakKeyDictionary()
        self._of_projections: _ByModule = weakref.WeakKeyDictionary()  # of mixers that discard more than their output
        self._inputs: weakref.WeakKeyDictionary[object, _Noted] = weakref.WeakKeyDictionary()
        """The inputs of each `CheckpointWithoutOutput` object in the running forward."""

    def add(self, site: Site, bracket: GroupBracket, modules: Mapping[str, torch.nn.Module]) -> None:
        """Add the bracket of a site, if its groups hold the input of a recomputation.

        Args:
            site: a site in the model chunk.
            bracket: bracket of the site.
            modules: modules of the chunk, by path.
        """
        owner, last = site.path.rpartition(".")[::2]
        for value in inputs_of(site.name):
            if value == "layernorm":
                self._of_discarding[modules[site.path]] = bracket
            elif value == "mla_up_proj" and last.endswith("_up_proj"):
                self._of_discarding[modules[owner]] = bracket
            elif value == "moe_act" and f".{owner}".endswith(f".{EXPERTS}"):
                self._of_discarding[modules[owner]] = bracket
            elif value == "gdp_in_proj":
                self._of_projections[modules[owner]] = bracket
            elif value in ("core_attn", "mlp", "moe"):
                self._of_checkpoints[modules[owner]] = bracket
            elif value == "shared_experts":
                path = site.path if last == "shared_experts" else owner
                self._of_checkpoints[modules[path]] = bracket

    def of_checkpoint(self, function: Any) -> GroupBracket | None:
        """Return the bracket for the inputs of `checkpoint`, which runs `function` again; None: they stay."""
        return self._find(self._of_checkpoints, function)

    def note(self, checkpoint: object, function: Any, inputs: Iterable[Any]) -> None:
        """Note the inputs that a `CheckpointWithoutOutput` object has saved; it runs `function` again."""
        is_projection = _name_of(function) == _PROJECTION
        bracket = self._find(self._of_projections if is_projection else self._of_discarding, function)
        if bracket is not None:
            self._inputs[checkpoint] = bracket, [t for t in inputs if isinstance(t, torch.Tensor)]

    def offload(self, checkpoint: object, recomputed_behind: torch.Tensor) -> None:
        """Put the noted inputs into a group: from now on they may leave.

        Args:
            checkpoint: as noted; no-op for others.
            recomputed_behind: tensor whose gradient starts the recomputation.
        """
        noted = self._inputs.pop(checkpoint, None)
        if noted is not None:
            bracket, inputs = noted
            bracket.hold(inputs, recomputed_behind)

    def clear(self) -> None:
        """Forget the running forward, for instance after an exception."""
        self._inputs.clear()

    def _find(self, brackets: _ByModule, function: Any) -> GroupBracket | None:
        owner = _module_of(function) if brackets else None
        return None if owner is None else brackets.get(owner)


_PROJECTION = "_in_proj_preprocess"
"""The method of a GatedDeltaProduct mixer that is recomputed. What it recomputes later is another method."""

_ByModule = weakref.WeakKeyDictionary[torch.nn.Module, GroupBracket]
_Noted = tuple[GroupBracket, list[torch.Tensor]]


def _name_of(function: Any) -> str:
    return getattr(_without_arguments(function), "__name__", "")


def _without_arguments(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _module_of(function: Any) -> torch.nn.Module | None:
    """Return the module that a function is, or whose method or closure it is."""
    function = _without_arguments(function)
    owner = function if isinstance(function, torch.nn.Module) else getattr(function, "__self__", None)
    if owner is None and (closure := getattr(function, "__closure__", None)):
        names = function.__code__.co_freevars
        owner = closure[names.index("self")].cell_contents if "self" in names else None
    return owner if isinstance(owner, torch.nn.Module) else None
