# SPDX-License-Identifier: Apache-2.0
"""`GroupHooks`: puts hooks on modules that torch.compile does not trace and that copies of the modules do not run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from offload_engine.frontends._common.compiling import is_compiler_loaded, untraced
from offload_engine.frontends._layers.find_layers import Layer, units_inside


class GroupHook:
    """A hook on a module; a no-op on a copy of that module or one loaded from a file."""

    def __init__(self, function: Callable[..., None] | None) -> None:
        self.function: Callable[..., None] | None = function

    def __call__(self, *args: Any) -> None:
        if self.function is not None:
            self.function(*args)

    def __reduce__(self) -> Any:
        return GroupHook, (None,)


class GroupHooks:
    """Owns the hooks on the modules of one model."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._traceable: list[GroupHook] = []  # on modules that may be compiled

    def enclose_body(self, body: nn.Module, enter: Callable[..., None], exit: Callable[..., None]) -> None:
        """Call `enter` before the forward of the module that runs the layers, and `exit` after it."""
        self._handles += [
            body.register_forward_pre_hook(GroupHook(enter), prepend=True),
            body.register_forward_hook(GroupHook(exit), always_call=True),
        ]

    def enclose_layer(
        self, layer: Layer, enter: Callable[..., None], exit: Callable[..., None], enter_unit: Callable[..., None]
    ) -> None:
        """Call `enter` before the forward of a layer, `exit` after it, and `enter_unit` before its units of FSDP."""
        unit_hook = self._never_compiled(enter_unit)
        self._handles += [
            # Before FSDP2's hook, which casts, because a checkpoint around the layer saves the inputs before the cast.
            layer.module.register_forward_pre_hook(self._never_compiled(enter), prepend=True, with_kwargs=True),
            layer.module.register_forward_hook(self._never_compiled(exit), always_call=True),
            *(unit.register_forward_pre_hook(unit_hook) for unit in units_inside(layer)),
        ]

    def enclose_inner(self, layer: Layer, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Call `before` and `after` around the forward of a layer, inside its existing hooks."""
        self._handles += [
            layer.inner.register_forward_pre_hook(self._never_compiled(before), with_kwargs=True),
            layer.inner.register_forward_hook(self._never_compiled(after), prepend=True),
        ]

    def add(self, layer: nn.Module, function: Callable[..., None]) -> RemovableHandle:
        """Call `function` before the forward of `layer`, after its existing hooks; the caller removes the hook."""
        return layer.register_forward_pre_hook(self._never_compiled(function), with_kwargs=True)

    def untrace(self) -> bool:
        """Exclude the hooks from torch.compile, in case layers have been compiled since; return whether any was new."""
        if not self._traceable or not is_compiler_loaded():
            return False
        for hook in self._traceable:
            if hook.function is not None:
                hook.function = untraced(hook.function)
        self._traceable = []
        return True

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _never_compiled(self, function: Callable[..., None]) -> GroupHook:
        hook = GroupHook(function)
        self._traceable.append(hook)
        return hook
