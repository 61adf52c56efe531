# SPDX-License-Identifier: Apache-2.0
"""`ModuleHooks`: puts hooks on submodules of a chunk that open and close brackets and pauses."""

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
        handles: handles of the hooks; a caller that registers a hook itself adds its handle.
    """

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []

    def enclose(self, module: torch.nn.Module, bracket: GroupBracket) -> None:
        """Open a group before the forward of `module`, and commit it after."""

        def enter(module: torch.nn.Module, args: Any) -> None:
            bracket.enter()

        def end(module: torch.nn.Module, args: Any, output: Any) -> Any:
            return bracket.abandon() if output is None else bracket.commit(output)  # None: the forward raised

        self.handles.append(module.register_forward_pre_hook(enter))
        self.handles.append(module.register_forward_hook(end, always_call=True))

    def enter_after(self, module: torch.nn.Module, owner: torch.nn.Module, bracket: GroupBracket) -> None:
        """Open a group after the forward of `module`, a submodule of `owner`.

        No group is opened if `owner` recomputes what comes next: see `RecomputedInputs`.
        """
        weak = weakref.ref(owner)

        def enter(module: torch.nn.Module, args: Any, output: Any) -> None:
            if not getattr(weak(), "activation_recompute", False):
                bracket.enter()

        def end(module: torch.nn.Module, args: Any, output: Any) -> None:
            bracket.abandon()  # still open only if an exception was raised inside the range

        self.handles.append(module.register_forward_hook(enter))
        self.handles.append(owner.register_forward_hook(end, always_call=True))

    def commit_before(self, module: torch.nn.Module, bracket: GroupBracket) -> None:
        """Commit the group before the forward of `module`."""

        def commit(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return bracket.commit_before(args, kwargs)

        self.handles.append(module.register_forward_pre_hook(commit, with_kwargs=True))

    def pause_in(self, module: torch.nn.Module, pause: HooksPause, enter: Callable[..., None]) -> None:
        """Begin a pause by `enter` before the forward of `module`, and end it after."""
        # Innermost: begins after the commit of a range that ends at the module, ends before a range that begins there.
        self.handles.append(module.register_forward_pre_hook(enter))
        self.handles.append(module.register_forward_hook(pause.end, prepend=True, always_call=True))

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        for handle in self.handles:
            handle.remove()
