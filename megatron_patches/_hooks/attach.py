"""Hooks that bracket submodules of model chunks, and the forward of each chunk, for one engine.

Groups sit on leaf submodules: the all-to-all overlap and the recomputation call these, not always the layer or the
chunk. Nothing here holds a module, so that an attachment may be kept as long as its model lives.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from megatron_patches._hooks.bracket import GroupBracket, HooksPause
from megatron_patches._hooks.held import HeldTensors
from megatron_patches._hooks.nodes import PlanNodes
from megatron_patches._model.experts import linears_of_experts
from megatron_patches._model.sites import Site, count_layers, find_sites, last_block, layers_of, moe_layers
from megatron_patches._model.unshared import unshared_modules
from offload_engine import Action, ChunkKey, ChunkOffloadHandler, GroupTraits, OffloadEngine

logger = logging.getLogger(__name__)


class _Called(NamedTuple):
    """A chunk between the call of its forward and the return."""

    chunk: ChunkOffloadHandler
    ungrouped_hooks: AbstractContextManager[Any]
    has_begun_head: bool = False


class Attachment:
    """Hooks on one list of model chunks, and the engine they report to."""

    def __init__(
        self,
        engine: OffloadEngine,
        chunks: Sequence[torch.nn.Module],
        names: Sequence[str],
        *,
        layers_per_checkpoint: int | None = None,
    ) -> None:
        """
        Args:
            engine: that moves the groups.
            chunks: this rank's model chunks, without wrappers, in the order of their virtual stages.
            names: of the table; parts of others among them must be left out.
            layers_per_checkpoint: how many fully recomputed layers share one input, which is a group of its own; None:
                such inputs are not asked for.
        """
        self.engine: OffloadEngine = engine
        self.held: HeldTensors = HeldTensors(engine)
        self._stretches: list[GroupBracket] = []
        self._pause: HooksPause = HooksPause(engine)  # one: modules that pass by lie in no other such module
        self.nodes: PlanNodes = PlanNodes(engine, self.held, self._stretches, self._pause)
        self.num_groups: Counter[str] = Counter()
        """Groups opened so far, by name."""
        self._weights: list[weakref.ref[torch.Tensor]] = []
        self._is_closed: bool = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._brackets: list[GroupBracket] = []
        self._last_groups: list[frozenset[int]] = []
        self._unused_names: set[str] = set()
        self._called: _Called | None = None  # the chunk whose forward runs, unless it runs as the nodes of a plan
        self._num_forwards: list[int] = [0] * len(chunks)
        self._comes_back_at_once: set[ChunkKey] = set()  # of the running step; the brackets of last places look it up
        self.note_weights(chunks)
        for stage, chunk in enumerate(chunks):
            sites = find_sites(chunk, names)
            is_in_checkpoints = not sites  # every layer is recomputed, and saves its input only
            last_groups = last_checkpoint(count_layers(chunk), layers_per_checkpoint) if is_in_checkpoints else ()
            self._last_groups.append(frozenset(last_groups))
            self._attach_chunk(chunk, stage)
            self._attach_sites(chunk, sites)
            self._attach_moe_layers(chunk)
            self._attach_pauses(chunk, names)
            self._handles += self.held.attach(chunk)  # last: their hooks run behind those that commit
            self._unused_names.update(site.name for site in sites)
        self.checkpoint_bracket: GroupBracket | None = (
            None if layers_per_checkpoint is None else self.bracket(Site("layer_input", "", None))
        )

    def note_weights(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Looks up what is no activation. At the end of a step, when the device still has work: at its begin it waits.

        What takes the place of one of them between two steps is known a step later: until then a buffer, and what has
        been detached of a parameter, may be moved like activations.

        Args:
            chunks: as in the constructor; DistributedDataParallel has something else under the name `buffers`.
        """
        self._weights = [weakref.ref(t) for chunk in chunks for t in (*chunk.parameters(), *chunk.buffers())]

    @property
    def weights(self) -> list[torch.Tensor]:
        """Parameters and buffers of the chunks, as they were at the end of the last step."""
        return [tensor for weight in self._weights if (tensor := weight()) is not None]

    def begin_iteration(self, actions: Sequence[Action], *, is_combined: bool = False) -> None:
        """Starts counting this rank's forwards anew.

        Args:
            actions: of this step.
            is_combined: forward and backward of two chunks run together, as in the all-to-all overlap.
        """
        self.held.begin_step()
        self._num_forwards = [0] * len(self._num_forwards)
        self._comes_back_at_once.clear()
        self._comes_back_at_once |= backward_at_once(actions, is_combined)

    def start_chunk(self, stage: int, has_head: bool = False) -> ChunkOffloadHandler | None:
        """The next forward of virtual stage `stage` begins; None while the engine is passive.

        Args:
            stage: of this rank.
            has_head: the chunk is told when its logits are there. It waits for its copies then, if its backward comes
                at once.
        """
        if not self.engine.is_active:
            return None
        key = ChunkKey(stage, self._num_forwards[stage])
        self._num_forwards[stage] += 1
        at_once = key in self._comes_back_at_once
        last_groups = self._last_groups[stage] if at_once else frozenset()
        return self.engine.start_chunk(key, keep_groups=last_groups, has_head=has_head and at_once)

    def abandon_iteration(self) -> None:
        """Leaves every bracket that an exception kept open."""
        self._pause.leave()  # first: else there are no hooks for a bracket to take off
        for bracket in reversed(self._brackets):
            bracket.leave()
        self._leave_called()
        self.held.clear()
        self.nodes.clear()

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

    def bracket(self, site: Site, is_last: bool = False) -> GroupBracket:
        """A new bracket for the groups of a place; those of the last place stay where the backward comes at once.

        By place, not by number: the order in which a layer runs its modules is not always that of the table.
        """
        # The set, not a function of self: without a cycle an attachment goes as soon as its model does.
        keeps = self._comes_back_at_once if is_last else ()
        traits = GroupTraits(layer=site.layer, may_delay=site.is_before_experts)
        bracket = GroupBracket(self.engine, site.name, self.num_groups, keeps, traits)
        self._brackets.append(bracket)
        return bracket

    def _attach_chunk(self, chunk: torch.nn.Module, stage: int) -> None:
        head = getattr(chunk, "output_layer", None)  # makes the logits; on the last stage only
        has_head = head is not None

        def enter_chunk(module: torch.nn.Module, args: Any) -> None:
            handler = self.start_chunk(stage, has_head=has_head)
            if handler is not None:
                self._called = _Called(handler, handler.hooks.around_groups())
                self._called.ungrouped_hooks.__enter__()

        def begin_last_block(module: torch.nn.Module, args: Any) -> None:
            if self._called is not None:
                self._called.chunk.begin_tail()

        def begin_head(module: torch.nn.Module, args: Any, output: Any) -> None:
            # The first of several heads (of layers that predict further tokens) is the last in backward.
            if self._called is not None and not self._called.has_begun_head:
                self._called = self._called._replace(has_begun_head=True)
                self._called.chunk.begin_head()
                when_backward_begins(output, self._called.chunk.end_loss)

        def leave_chunk(module: torch.nn.Module, args: Any, output: Any) -> None:
            handler = self._leave_called()
            if handler is not None and output is not None:  # no output: it raised
                handler.begin_head()  # not called before by a loss that takes the weight of the head alone
                handler.end_forward()
                when_backward_begins(output, handler.begin_backward)

        self._handles.append(chunk.register_forward_pre_hook(enter_chunk))
        block = last_block(chunk)
        if block is not None:
            self._handles.append(block.register_forward_pre_hook(begin_last_block))
        if head is not None:
            self._handles.append(head.register_forward_hook(begin_head))
        self._handles.append(chunk.register_forward_hook(leave_chunk, always_call=True))

    def _leave_called(self) -> ChunkOffloadHandler | None:
        called, self._called = self._called, None
        self._pause.leave()  # on still only after an interrupt, which runs no hook behind a forward
        if called is None:
            return None
        called.ungrouped_hooks.__exit__(None, None, None)
        return called.chunk

    def _attach_sites(self, chunk: torch.nn.Module, sites: Sequence[Site]) -> None:
        # Hooks run in the order of registration. On one submodule a stretch that ends there ends first, then comes
        # the submodule's own bracket, and a stretch that begins there begins last.
        modules = dict(chunk.named_modules())
        last = {sites[ordinal] for ordinal in last_of_each_name(chunk, sites)}
        brackets = [self.bracket(site, site in last) for site in sites]
        stretches = [(site, bracket) for site, bracket in zip(sites, brackets, strict=True) if site.until]
        self._stretches += (bracket for _, bracket in stretches)
        for site, bracket in stretches:
            self._leave_before(modules[str(site.until)], bracket)
        for site, bracket in zip(sites, brackets, strict=True):
            if site.until is None:
                self._enclose(modules[site.path], bracket)
        for site, bracket in stretches:
            owner = modules[site.path.rpartition(".")[0]]
            self._enter_after(modules[site.path], owner, bracket)

    def _attach_moe_layers(self, chunk: torch.nn.Module) -> None:
        # When the dispatcher has its split sizes, the device waits until the host has launched what computes the
        # experts. The host takes longer for it while something is copied. So what the layer has committed before is
        # copied from the end of its MLP on. (Not of the experts: they may run inside a checkpoint, unseen.)
        engine = self.engine

        def pass_host_wait(module: torch.nn.Module, args: Any, output: Any) -> None:
            running = engine.active_chunk
            if running is not None:
                running.pass_host_wait()

        for layer in moe_layers(chunk):
            self._handles.append(layer.register_forward_hook(pass_host_wait))

    def _attach_pauses(self, chunk: torch.nn.Module, names: Sequence[str]) -> None:
        # Where no group can have a use for what is saved, the host does not spend its time on it: with 32 experts in
        # each layer that was a twentieth of the step. Where it has a use for one tensor of hundreds, for that one.
        unshared = unshared_modules(chunk, names)
        for module in unshared:
            self._pause_in(module, self._pause.enter)
        pass_by = {part for module in unshared for part in module.modules()}
        for linear in linears_of_experts(chunk):
            if linear not in pass_by:
                self._pause_in(linear, self._pause.enter_linear)

    def _pause_in(self, module: torch.nn.Module, enter: Callable[..., None]) -> None:
        # Innermost: behind the end of a stretch in front of the module, and in front of the one that begins there.
        self._handles.append(module.register_forward_pre_hook(enter))
        self._handles.append(module.register_forward_hook(self._pause.leave, prepend=True, always_call=True))

    def _enclose(self, module: torch.nn.Module, bracket: GroupBracket) -> None:
        def enter(module: torch.nn.Module, args: Any) -> None:
            bracket.enter()

        def leave(module: torch.nn.Module, args: Any, output: Any) -> Any:
            return bracket.leave_with(output)

        self._handles.append(module.register_forward_pre_hook(enter))
        self._handles.append(module.register_forward_hook(leave, always_call=True))

    def _enter_after(self, module: torch.nn.Module, owner: torch.nn.Module, bracket: GroupBracket) -> None:
        def enter(module: torch.nn.Module, args: Any, output: Any) -> None:
            bracket.enter()

        def leave(module: torch.nn.Module, args: Any, output: Any) -> None:
            bracket.leave()  # open still only if an exception left the stretch

        self._handles.append(module.register_forward_hook(enter))
        self._handles.append(owner.register_forward_hook(leave, always_call=True))

    def _leave_before(self, module: torch.nn.Module, bracket: GroupBracket) -> None:
        def leave(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return bracket.leave_with_arguments(args, kwargs)

        self._handles.append(module.register_forward_pre_hook(leave, with_kwargs=True))


def when_backward_begins(output: Any, do: Callable[[], None]) -> None:
    """Has `do` called when the gradient of a module's output arrives; never where it has none."""
    for tensor in output if isinstance(output, (tuple, list)) else (output,):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: do())
            return


def last_of_each_name(chunk: torch.nn.Module, sites: Sequence[Site]) -> frozenset[int]:
    """Ordinals, among the places of a chunk, of the last one of every name, where that is in the last two layers.

    A backward that comes at once needs these before a copy could be out and back. Two, because a layer may be an
    attention or an MLP alone.
    """
    first_layer = sum(1 for _ in layers_of(chunk)) - 2
    last = {site.name: ordinal for ordinal, site in enumerate(sites)}
    return frozenset(ordinal for ordinal in last.values() if sites[ordinal].layer >= first_layer)


def last_checkpoint(num_layers: int, layers_per_checkpoint: int | None) -> frozenset[int]:
    """Ordinal, within the chunk, of the last group of recomputed layers."""
    if not layers_per_checkpoint or not num_layers:
        return frozenset()
    return frozenset({(num_layers - 1) // layers_per_checkpoint})


def backward_at_once(actions: Sequence[Action], is_combined: bool = False) -> frozenset[ChunkKey]:
    """The chunks whose backward is the next thing after their forward.

    Args:
        actions: of one rank.
        is_combined: a forward and the backward behind it run together, unless they are of the same chunk. (A pipeline
            so short that it combines nothing is treated alike: it keeps the last groups of one chunk more.)
    """
    steps: list[list[Action]] = []
    for action in actions:
        is_behind_forward = bool(steps) and steps[-1][0].kind == "F" and len(steps[-1]) == 1
        if is_combined and action.kind == "B" and is_behind_forward and steps[-1][0].chunk != action.chunk:
            steps[-1].append(action)
        else:
            steps.append([action])
    pairs = zip(steps, steps[1:], strict=False)
    return frozenset(a.chunk for step, following in pairs for a in step if Action("B", a.chunk) in following)
