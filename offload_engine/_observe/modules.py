# SPDX-License-Identifier: Apache-2.0
"""Tracks the qualified name of the running module, for saved tensors."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


class RunningModules(threading.local):
    """Knows the innermost module whose forward runs in this thread, by hooks on every module while they are on.

    The outermost module that is called gives the names: `decoder.layers.0.mlp` is relative to it.
    """

    def __init__(self) -> None:
        self._running: list[torch.nn.Module] = []
        self._names: dict[torch.nn.Module, str] = {}

    def innermost(self) -> str:
        """Return the name of the innermost module whose forward runs; empty if none does."""
        if not self._running:
            return ""
        module = self._running[-1]
        return self._names.get(module) or type(module).__name__

    def enter(self, module: torch.nn.Module, inputs: Any) -> None:
        """Begin the forward of `module`."""
        if module not in self._names:
            self._name_all_of(module)
        self._running.append(module)

    def exit(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """End the forward of `module`, and of those inside it that raised."""
        if module in self._running:
            while self._running.pop() is not module:
                pass

    def _name_all_of(self, root: torch.nn.Module) -> None:
        above = self._names.get(self._running[-1], "") if self._running else ""
        for name, module in root.named_modules(prefix=above):
            self._names.setdefault(module, name)


class ModuleHooks:
    """Owns the hooks of `RunningModules`, from construction to `remove`."""

    def __init__(self) -> None:
        self.running: RunningModules = RunningModules()
        self._handles = [
            register_module_forward_pre_hook(self.running.enter),
            register_module_forward_hook(self.running.exit, always_call=True),
        ]

    def remove(self) -> None:
        """Remove the hooks. Idempotent."""
        while self._handles:
            self._handles.pop().remove()
