# SPDX-License-Identifier: Apache-2.0
"""`GroupBracket`: opens and closes the groups of one site in the model, and marks their ends in the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from megatron_patches._model.experts import saves_only_weights_behind
from offload_engine import Action, ChunkKey, ChunkOffloadHandler, GroupTraits, OffloadEngine, group_commit
from offload_engine.schedule import backward_at_once

_Replace = Callable[[torch.Tensor], torch.Tensor]
_NO_TRAITS = GroupTraits()


class ChunksAtOnce:
    """Knows the chunks of the running step whose backward follows their forward at once."""

    def __init__(self) -> None:
        self._keys: frozenset[ChunkKey] = frozenset()

    def begin_step(self, actions: Sequence[Action], is_combined: bool) -> None:
        """Find them in the actions of a step; see `Attachment.begin_iteration`."""
        self._keys = frozenset(backward_at_once(actions, is_combined))

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self._keys


class GroupBracket:
    """Opens and closes the groups of one site in the model, one at a time.

    While the engine is passive (evaluation, recomputation) no group is opened, and a commit is a no-op.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        name: str,
        counter: Counter[str],
        keeps: ChunksAtOnce | None = None,
        traits: GroupTraits = _NO_TRAITS,
    ) -> None:
        """Make a closed bracket.

        Args:
            engine: moves the groups.
            name: name of the groups.
            counter: counts the groups opened, by name.
            keeps: the chunks in which groups of this site stay resident; None: none.
            traits: traits of the groups.
        """
        self._engine = engine
        self._name = name
        self._counter = counter
        self._keeps = keeps
        self._traits = traits
        self._chunk: ChunkOffloadHandler | None = None  # the chunk of the open group; None in captures of layers
        self._hooks: Any = None  # hooks of the chunk, or of the capture; None: the bracket is not open
        self._has_hooks = False  # False: the bracket is suspended, or not open

    def enter(self) -> bool:
        """Open a group: tensors saved from now on belong to it.

        The input gets no mark in the graph. A mark would sum the gradients of the readers inside the group before those
        of other readers are added: another order of summation, which changes the last bit.

        Returns:
            False, without opening a group, while the engine is passive, and inside a checkpoint of torch or other hooks
            that are not the chunk's.
        """
        chunk = self._engine.active_chunk
        if chunk is None:
            return self._enter_captured()
        if self._hooks is not None:
            self.abandon()  # the site is entered again before its end was reached
        if not chunk.hooks.are_innermost():
            return False  # torch's checkpoint recomputes without this group, and must see the same saves in both runs
        is_kept = self._keeps is not None and chunk.key in self._keeps
        if is_kept:
            chunk.offload_kept_groups(self._name)  # the site is called again: only its last call needs no copy
        chunk.open_group(self._name, self._traits._replace(keep=True) if is_kept else self._traits)
        self._chunk, self._hooks = chunk, chunk.hooks
        self.resume()
        self._counter[self._name] += 1
        return True

    def _enter_captured(self) -> bool:
        """Open a group in a captured layer: the saved tensors belong to its graph, and need no mark."""
        recording = self._engine.graphs.recording
        if recording is None or not recording.are_innermost():
            return False
        if self._hooks is not None:
            self.abandon()
        self._hooks = recording.group(self._traits.min_bytes)
        self.resume()
        return True

    def suspend(self) -> None:
        """Pause the open group: tensors saved until `resume` do not belong to it. Idempotent; no-op if none is open."""
        if self._hooks is not None and self._has_hooks:
            self._hooks.pop()
            self._has_hooks = False

    def resume(self) -> None:
        """Undo `suspend`: saved tensors belong to the open group again. Idempotent; no-op if none is open."""
        if self._hooks is not None and not self._has_hooks:
            self._hooks.push()
            self._has_hooks = True

    def commit_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Commit the group before a call; return the arguments with the mark of the group's end, or None."""
        chunk = self._exit_hooks()
        if chunk is None:
            return None
        marked, (args, kwargs) = _replace_in_arguments(args, kwargs, self._commit(chunk))
        if not marked:
            chunk.close_group()
        return args, kwargs

    def commit(self, output: Any) -> Any:
        """Commit the group after a call; return the output, with the mark of the group's end if it needs one."""
        chunk = self._exit_hooks()
        if chunk is None:
            return output
        marked, output = _replace_first(output, self._commit(chunk))
        if not marked:
            chunk.close_group()
        return output

    def hold(self, tensors: Iterable[torch.Tensor], needed_before: torch.Tensor) -> None:
        """Open a group, move tensors into it that are saved outside the groups, and commit it.

        Args:
            tensors: tensors saved in this forward.
            needed_before: the backward of the group begins when the gradient of this tensor arrives, before hooks that
                are registered on it later.
        """
        if (recording := self._engine.graphs.recording) is not None:
            recording.add_to_group(tensors, self._traits.min_bytes)
            return
        if not (needed_before.requires_grad and self.enter()):
            return
        chunk = self._chunk
        assert chunk is not None
        for tensor in tensors:
            chunk.hooks.pack(tensor)  # autograd has a handle of its storage already, so this one may be dropped
        self._exit_hooks()
        group = chunk.close_group()
        needed_before.register_hook(lambda _: chunk.on_group_commit_backward(group))

    def abandon(self) -> None:
        """Abandon the open group, for instance after an exception. No-op if none is open."""
        chunk = self._exit_hooks()
        if chunk is not None:
            chunk.abandon_group()

    def _commit(self, chunk: ChunkOffloadHandler) -> _Replace:
        return lambda tensor: group_commit(tensor, chunk)

    def _exit_hooks(self) -> ChunkOffloadHandler | None:
        self.suspend()
        chunk, self._chunk, self._hooks = self._chunk, None, None
        return chunk


class HooksPause:
    """Pauses the engine's hooks while a module runs, one module at a time.

    Args:
        engine: owns the hooks.
    """

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self._chunk: ChunkOffloadHandler | None = None  # the chunk whose hooks are paused
        self._module: Any = None  # the module in which they are paused
        self._saves_original_input: bool | None = None  # the attribute's value before; None: not changed

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """Pause the hooks of the running chunk. No-op while the engine is passive, or in an open group."""
        chunk = self._engine.active_chunk
        if chunk is not None and chunk.hooks.pause_around_groups():
            self._chunk, self._module = chunk, module

    def enter_linear(self, linear: Any, args: tuple[Any, ...]) -> None:
        """Pause the hooks after the input of a linear of experts has been saved. No-op while the engine is passive."""
        chunk = self._engine.active_chunk
        if chunk is not None and saves_only_weights_behind(linear, args) and chunk.hooks.pause_behind(args[0]):
            self._chunk, self._module = chunk, linear
            self._saves_original_input, linear.save_original_input = linear.save_original_input, True

    def end(self, module: torch.nn.Module | None = None, *_: Any) -> None:
        """Resume the hooks. No-op if they are not paused, or paused in a module other than `module`."""
        if self._chunk is None or module not in (None, self._module):
            return
        self._chunk.hooks.resume()
        if self._saves_original_input is not None:
            self._module.save_original_input = self._saves_original_input
        self._chunk = self._module = self._saves_original_input = None


def _replace_in_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], replace: _Replace
) -> tuple[bool, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Replace the first tensor that requires grad, positional arguments first; return whether there was one."""
    done, new_args = _replace_first(args, replace)
    if done:
        return True, (new_args, kwargs)
    for key, value in kwargs.items():
        if _needs_grad(value):
            return True, (args, {**kwargs, key: replace(value)})
    return False, (args, kwargs)


def _replace_first(value: Any, replace: _Replace) -> tuple[bool, Any]:
    """Replace the first tensor that requires grad in a tensor, tuple or list; return whether there was one."""
    if _needs_grad(value):
        return True, replace(value)
    if isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            if _needs_grad(item):
                items = [*value[:position], replace(item), *value[position + 1 :]]
                return True, type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return False, value


def _needs_grad(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return False
    return not value.is_leaf or not isinstance(value, torch.nn.Parameter)  # the slowest test comes last
