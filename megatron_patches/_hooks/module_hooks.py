# SPDX-License-Identifier: Apache-2.0
"""`ModuleHooks`: hooks that enter and leave brackets and pauses where submodules of a chunk run."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from megatron_patches._hooks.bracket import GroupBracket, HooksPause


class ModuleHooks:
    """Owns the hooks on one list of model chunks. On one submodule, hooks run in the order of their registration.

    Attributes:
        handles: of the hooks; a caller that registers one itself adds it.
    """

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []

    def enclose(self, module: torch.nn.Module, bracket: GroupBracket) -> None:
        """Enter the bracket before the forward of `module`, and leave it after."""

        def enter(module: torch.nn.Module, args: Any) -> None:
            bracket.enter()

        def leave(module: torch.nn.Module, args: Any, output: Any) -> Any:
            return bracket.leave() if output is None else bracket.leave_with(output)  # None: the forward raised

        self.handles.append(module.register_forward_pre_hook(enter))
        self.handles.append(module.register_forward_hook(leave, always_call=True))

    def enter_after(self, module: torch.nn.Module, owner: torch.nn.Module, bracket: GroupBracket) -> None:
        """Enter the bracket after the forward of `module`, a submodule of `owner`.

        Not where `owner` recomputes what comes next: see `RecomputedInputs`.
        """
        weak = weakref.ref(owner)

        def enter(module: torch.nn.Module, args: Any, output: Any) -> None:
            if not getattr(weak(), "activation_recompute", False):
                bracket.enter()

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            bracket.leave()  # still open only if an exception was raised inside the range

        self.handles.append(module.register_forward_hook(enter))
        self.handles.append(owner.register_forward_hook(leave, always_call=True))

    def leave_before(self, module: torch.nn.Module, bracket: GroupBracket) -> None:
        """Leave the bracket before the forward of `module`."""

        def leave(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return bracket.leave_with_arguments(args, kwargs)

        self.handles.append(module.register_forward_pre_hook(leave, with_kwargs=True))

    def pause_in(self, module: torch.nn.Module, pause: HooksPause, enter: Callable[..., None]) -> None:
        """Begin a pause by `enter` before the forward of `module`, and leave it after."""
        # Innermost: entered after a range that ends at the module is left, left before a range that begins there.
        self.handles.append(module.register_forward_pre_hook(enter))
        self.handles.append(module.register_forward_hook(pause.leave, prepend=True, always_call=True))

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        for handle in self.handles:
            handle.remove()
