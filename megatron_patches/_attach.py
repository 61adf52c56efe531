"""Hooks that bracket submodules of model chunks, and the forward of each chunk, for one engine.

Everything sits on leaf submodules: the all-to-all overlap and the recomputation call these, not always the layer.
Nothing here holds a module, so that an attachment may be kept as long as its model lives.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from megatron_patches._modules import Site, find_sites
from offload_engine import Action, ChunkKey, ChunkOffloadHandler, OffloadEngine, group_commit, group_start

logger = logging.getLogger(__name__)

_Replace = Callable[[torch.Tensor], torch.Tensor]


class _Open(NamedTuple):
    """A bracket between its entry and its exit."""

    chunk: ChunkOffloadHandler
    hooks: AbstractContextManager[Any]


class Attachment:
    """Hooks on one list of model chunks, and the engine they report to."""

    def __init__(
        self,
        engine: OffloadEngine,
        chunks: Sequence[torch.nn.Module],
        names: Sequence[str],
        *,
        brackets_checkpoints: bool = False,
    ) -> None:
        """
        Args:
            engine: that moves the groups.
            chunks: this rank's model chunks, without wrappers, in the order of their virtual stages.
            names: of the table; parts of others among them must be left out.
            brackets_checkpoints: whether fully recomputed layers report to `checkpoint_bracket`.
        """
        self.engine: OffloadEngine = engine
        self.num_groups: Counter[str] = Counter()
        """Groups opened so far, by name."""

        self._is_closed: bool = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._brackets: list[GroupBracket] = []
        self._last_groups: list[frozenset[int]] = []
        self._unused_names: set[str] = set()
        self._num_forwards: list[int] = [0] * len(chunks)
        self._comes_back_at_once: frozenset[ChunkKey] = frozenset()
        submodule_names = [name for name in names if not (brackets_checkpoints and name == "layer_input")]
        for stage, chunk in enumerate(chunks):
            sites = find_sites(chunk, submodule_names)
            self._last_groups.append(last_of_each_name(sites))
            self._attach_chunk(chunk, stage)
            self._attach_sites(chunk, sites)
            self._unused_names.update(site.name for site in sites)
        self.checkpoint_bracket: GroupBracket | None = self.bracket("layer_input") if brackets_checkpoints else None

    def begin_iteration(self, actions: Sequence[Action]) -> None:
        """Starts counting this rank's forwards anew."""
        self._num_forwards = [0] * len(self._num_forwards)
        self._comes_back_at_once = backward_at_once(actions)

    def abandon_iteration(self) -> None:
        """Leaves every bracket that an exception kept open."""
        for bracket in reversed(self._brackets):
            bracket.leave()

    def warn_of_unused_names(self) -> None:
        """Says, once, which of the names found in the model's chunks here no step has called."""
        self._unused_names -= self.num_groups.keys()
        for name in sorted(self._unused_names):
            logger.warning("offload of %r: its submodules are there, but this step did not call them", name)
        self._unused_names.clear()

    def close(self) -> None:
        """Takes every hook off and closes the engine. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        for handle in self._handles:
            handle.remove()
        self.abandon_iteration()
        self.engine.close()

    def bracket(self, name: str) -> GroupBracket:
        """A new bracket that opens groups of this name."""
        bracket = GroupBracket(self.engine, name, self.num_groups)
        self._brackets.append(bracket)
        return bracket

    def _attach_chunk(self, chunk: torch.nn.Module, stage: int) -> None:
        def start_chunk(module: torch.nn.Module, args: Any) -> None:
            if not self.engine.is_active:
                return
            key = ChunkKey(stage, self._num_forwards[stage])
            self._num_forwards[stage] += 1
            at_once = key in self._comes_back_at_once
            self.engine.start_chunk(key, keep_groups=self._last_groups[stage] if at_once else frozenset())

        self._handles.append(chunk.register_forward_pre_hook(start_chunk))

    def _attach_sites(self, chunk: torch.nn.Module, sites: Sequence[Site]) -> None:
        # Hooks run in the order of registration. On one submodule a stretch that ends there ends first, then comes
        # the submodule's own bracket, and a stretch that begins there begins last.
        modules = dict(chunk.named_modules())
        stretches = [(site, self.bracket(site.name)) for site in sites if site.until]
        for site, bracket in stretches:
            self._leave_before(modules[str(site.until)], bracket)
        for site in sites:
            if site.until is None:
                self._enclose(modules[site.path], self.bracket(site.name))
        for site, bracket in stretches:
            owner = modules[site.path.rpartition(".")[0]]
            self._enter_after(modules[site.path], owner, bracket)

    def _enclose(self, module: torch.nn.Module, bracket: GroupBracket) -> None:
        def enter(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return bracket.enter_with_arguments(args, kwargs)

        def leave(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return bracket.leave_with(output)

        self._handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        self._handles.append(module.register_forward_hook(leave, with_kwargs=True, always_call=True))

    def _enter_after(self, module: torch.nn.Module, owner: torch.nn.Module, bracket: GroupBracket) -> None:
        def enter(module: torch.nn.Module, args: Any, output: Any) -> Any:
            return bracket.enter_with(output)

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            bracket.leave()  # open still only if an exception left the stretch

        self._handles.append(module.register_forward_hook(enter))
        self._handles.append(owner.register_forward_hook(leave, always_call=True))

    def _leave_before(self, module: torch.nn.Module, bracket: GroupBracket) -> None:
        def leave(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return bracket.leave_with_arguments(args, kwargs)

        self._handles.append(module.register_forward_pre_hook(leave, with_kwargs=True))


class GroupBracket:
    """Opens and closes the groups of one place in the model, one at a time.

    While the engine is passive (evaluation, recomputation) every method returns None, which changes nothing.
    """

    def __init__(self, engine: OffloadEngine, name: str, counter: Counter[str]) -> None:
        self._engine = engine
        self._name = name
        self._counter = counter
        self._open: _Open | None = None

    def enter_with_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enters in front of a call; returns its arguments with the group's mark on the first that needs it."""
        chunk = self._chunk()
        if chunk is None:
            return None
        marked, (args, kwargs) = _replace_in_arguments(args, kwargs, self._start(chunk))
        self._enter(chunk, marked)
        return args, kwargs

    def enter_with(self, output: Any) -> Any:
        """Enters behind a call; returns its output with the group's mark."""
        chunk = self._chunk()
        if chunk is None:
            return None
        marked, output = _replace_first(output, self._start(chunk))
        self._enter(chunk, marked)
        return output

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
        """Leaves without an output to mark, after an exception; nothing if it is not open."""
        chunk = self._exit_hooks()
        if chunk is not None:
            chunk.abandon_group()

    def _chunk(self) -> ChunkOffloadHandler | None:
        return self._engine.current_chunk if self._engine.is_active else None

    def _start(self, chunk: ChunkOffloadHandler) -> _Replace:
        return lambda tensor: group_start(tensor, chunk, name=self._name)

    def _commit(self, chunk: ChunkOffloadHandler) -> _Replace:
        return lambda tensor: group_commit(tensor, chunk)

    def _enter(self, chunk: ChunkOffloadHandler, is_marked: bool) -> None:
        if not is_marked:
            chunk.open_group(self._name)
        hooks = chunk.saved_tensors_hooks()
        hooks.__enter__()
        self._open = _Open(chunk, hooks)
        self._counter[self._name] += 1

    def _exit_hooks(self) -> ChunkOffloadHandler | None:
        if self._open is None:
            return None
        chunk, hooks = self._open
        self._open = None
        hooks.__exit__(None, None, None)
        return chunk


def last_of_each_name(sites: Sequence[Site]) -> frozenset[int]:
    """Ordinals, within the chunk, of the last group of every name."""
    return frozenset({site.name: ordinal for ordinal, site in enumerate(sites)}.values())


def backward_at_once(actions: Sequence[Action]) -> frozenset[ChunkKey]:
    """The chunks whose backward is the next thing after their forward."""
    pairs = zip(actions, actions[1:], strict=False)
    return frozenset(a.chunk for a, b in pairs if (a.kind, b.kind) == ("F", "B") and a.chunk == b.chunk)


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
    return isinstance(value, torch.Tensor) and value.requires_grad and not isinstance(value, torch.nn.Parameter)
