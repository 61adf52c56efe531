"""The bracket around one place in the model: opens and closes its groups, and marks their ends in the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

import torch

from megatron_patches._model.experts import saves_only_weights_behind
from offload_engine import ChunkKey, ChunkOffloadHandler, GroupTraits, OffloadEngine, group_commit

_Replace = Callable[[torch.Tensor], torch.Tensor]
_NO_TRAITS = GroupTraits()


class GroupBracket:
    """Opens and closes the groups of one place in the model, one at a time.

    While the engine is passive (evaluation, recomputation) nothing is opened, and leaving changes nothing.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        name: str,
        counter: Counter[str],
        keeps: Collection[ChunkKey] = (),
        traits: GroupTraits = _NO_TRAITS,
    ) -> None:
        """
        Args:
            engine: that moves the groups.
            name: of the groups.
            counter: of groups opened, by name.
            keeps: the chunks whose groups of this place stay resident.
            traits: of the groups.
        """
        self._engine = engine
        self._name = name
        self._counter = counter
        self._keeps = keeps
        self._traits = traits
        self._chunk: ChunkOffloadHandler | None = None  # whose group is open
        self._has_hooks = False  # else the bracket is suspended, or not open

    def enter(self) -> bool:
        """Opens a group: what is saved from now on belongs to it.

        Returns:
            False, and no group is open, while the engine is passive, and inside a checkpoint of torch or other hooks
            that are not the chunk's.

        Nothing marks the input in the graph. A mark would gather the gradients of an input that is read more than once
        before those of its other readers are added: another order of summation, and another last bit.
        """
        chunk = self._engine.active_chunk
        if chunk is None:
            return False
        if self._chunk is not None:
            self.leave()  # the place is entered again before its end was reached
        if not chunk.hooks.are_innermost():
            return False  # torch's checkpoint recomputes without this group: it must see what is saved now, too
        is_kept = chunk.key in self._keeps
        if is_kept:
            chunk.offload_kept_groups(self._name)  # the place is called again: its last call comes back first
        chunk.open_group(self._name, self._traits._replace(keep=True) if is_kept else self._traits)
        self._chunk = chunk
        self.resume()
        self._counter[self._name] += 1
        return True

    def suspend(self) -> None:
        """Something else runs before the bracket's end is reached: what is saved belongs to no group. Idempotent."""
        if self._chunk is not None and self._has_hooks:
            self._chunk.hooks.pop()
            self._has_hooks = False

    def resume(self) -> None:
        """What is saved belongs to the open group again. Idempotent; nothing if it is not open."""
        if self._chunk is not None and not self._has_hooks:
            self._chunk.hooks.push()
            self._has_hooks = True

    def leave_with_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Leaves in front of a call; returns its arguments with the mark of the group's end."""
        chunk = self._exit_hooks()
        if chunk is None:
            return None
        marked, (args, kwargs) = _replace_in_arguments(args, kwargs, self._commit(chunk))
        if not marked:
            chunk.close_group()
        return args, kwargs

    def leave_with(self, output: Any) -> Any:
        """Leaves behind a call; returns its output with the mark of the group's end. No output: it raised."""
        if output is None:
            return self.leave()
        chunk = self._exit_hooks()
        if chunk is None:
            return None
        marked, output = _replace_first(output, self._commit(chunk))
        if not marked:
            chunk.close_group()
        return output

    def leave(self) -> None:
        """Leaves without an output to mark, as after an exception; nothing if it is not open."""
        chunk = self._exit_hooks()
        if chunk is not None:
            chunk.abandon_group()

    def _commit(self, chunk: ChunkOffloadHandler) -> _Replace:
        return lambda tensor: group_commit(tensor, chunk)

    def _exit_hooks(self) -> ChunkOffloadHandler | None:
        self.suspend()
        chunk, self._chunk = self._chunk, None
        return chunk


class HooksPause:
    """Hooks that let what a module saves past the engine, for one module at a time: not for those that it calls.

    Args:
        engine: that takes what is saved.
    """

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self._chunk: ChunkOffloadHandler | None = None  # whose hooks are off
        self._module: Any = None  # in which they are
        self._saves_original_input: bool | None = None  # what it did before; None: it was not told to

    def enter(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        """The engine takes no more of what is saved. Nothing while it is passive, or in an open group."""
        chunk = self._engine.active_chunk
        if chunk is not None and chunk.hooks.pause_around_groups():
            self._chunk, self._module = chunk, module

    def enter_linear(self, linear: Any, args: tuple[Any, ...]) -> None:
        """The engine takes the input of such a layer of experts and nothing behind it. Nothing while it is passive."""
        chunk = self._engine.active_chunk
        if chunk is not None and saves_only_weights_behind(linear, args) and chunk.hooks.pause_behind(args[0]):
            self._chunk, self._module = chunk, linear
            self._saves_original_input, linear.save_original_input = linear.save_original_input, True

    def leave(self, module: torch.nn.Module | None = None, *_: Any) -> None:
        """The engine takes what is saved again; nothing if nothing was entered, or `module` was not."""
        if self._chunk is None or module not in (None, self._module):
            return
        self._chunk.hooks.resume()
        if self._saves_original_input is not None:
            self._module.save_original_input = self._saves_original_input
        self._chunk = self._module = self._saves_original_input = None


def _replace_in_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], replace: _Replace
) -> tuple[bool, tuple[tuple[Any, ...], dict[str, Any]]]:
    """Replaces the first tensor that requires grad, in order of position, then of keywords."""
    done, new_args = _replace_first(args, replace)
    if done:
        return True, (new_args, kwargs)
    for key, value in kwargs.items():
        if _needs_grad(value):
            return True, (args, {**kwargs, key: replace(value)})
    return False, (args, kwargs)


def _replace_first(value: Any, replace: _Replace) -> tuple[bool, Any]:
    """Replaces the first tensor that requires grad in a tensor, tuple or list."""
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
    return not value.is_leaf or not isinstance(value, torch.nn.Parameter)  # the last one takes longest to ask
