# SPDX-License-Identifier: Apache-2.0
"""Lists the storages that autograd saves in groups, and those that bypass the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from megatron_patches import apply
from megatron_patches._hooks.bracket import HooksPause
from megatron_patches._model.modules import MODULES
from offload_engine import OffloadConfig
from offload_engine._saved.storage import TensorGroup
from offload_engine._saved.store import ActivationStore

innermost_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def num_passing(run: Callable[[dict[str, Any]], object]) -> int:
    """How many storages pass the engine by, over all names of the table; each name alone. Not with the compiled core.

    Args:
        run: a few microbatches of a new model, with these settings of its configuration.

    Raises:
        AssertionError: if a group of that name saves one of them, too.
    """
    num_passed = 0
    directory = None if torch.cuda.is_available() else "none"
    for row in MODULES:
        recorder = SavedStorages()
        try:
            with apply(OffloadConfig(min_tensor_bytes=1, directory=directory), has_report=False), recorder.recording():
                run({"offload_activation": True, "offload_modules": [row.name]})
        except ValueError as error:
            if "offload_modules" not in str(error):  # this model has it not, or recomputes it
                raise
            continue
        assert recorder.grouped and not recorder.passed.keys() & recorder.grouped.keys(), row.name
        num_passed += len(recorder.passed)
    return num_passed


class SavedStorages:
    """The storages that autograd saves in groups, and those that it saves in pauses; alive, so that none is another."""

    def __init__(self) -> None:
        self.grouped: dict[int, torch.UntypedStorage] = {}
        self.passed: dict[int, torch.UntypedStorage] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        pack, enter, leave = ActivationStore.pack, HooksPause.enter, HooksPause.end
        hooks = torch.autograd.graph.saved_tensors_hooks(self._note_passed, lambda tensor: tensor)
        is_on = []

        def noting_pack(store: ActivationStore, tensor: torch.Tensor, group: TensorGroup) -> Any:
            if not group.is_ungrouped:
                _note(tensor, self.grouped)
            return pack(store, tensor, group)

        def noting_enter(pause: HooksPause, *args: Any) -> None:
            enter(pause, *args)
            if innermost_hooks(True) is None and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1:
                hooks.__enter__()
                is_on.append(True)

        def noting_leave(pause: HooksPause, *args: Any) -> None:
            if is_on:
                is_on.pop()
                hooks.__exit__()
            leave(pause, *args)

        with (
            mock.patch.object(ActivationStore, "pack", noting_pack),
            mock.patch.object(HooksPause, "enter", noting_enter),
            mock.patch.object(HooksPause, "end", noting_leave),
        ):
            yield

    def _note_passed(self, tensor: torch.Tensor) -> torch.Tensor:
        _note(tensor, self.passed)
        return tensor.detach() if tensor.grad_fn is not None else tensor


def _note(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> None:
    if not isinstance(tensor, torch.nn.Parameter) and tensor.numel() > 1:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage
