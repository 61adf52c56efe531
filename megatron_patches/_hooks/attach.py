# SPDX-License-Identifier: Apache-2.0
"""Puts hooks around submodules of model chunks, and around the forward of each chunk, for one engine.

Groups are on leaf submodules, because the all-to-all overlap and recomputation may call only these and not the layer
or the chunk. An attachment holds no module, so it can be kept as long as its model lives.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from megatron_patches._hooks.bracket import ChunksAtOnce, GroupBracket, HooksPause
from megatron_patches._hooks.held import HeldTensors
from megatron_patches._hooks.module_hooks import ModuleHooks
from megatron_patches._hooks.nodes import PlanNodes
from megatron_patches._hooks.recomputed import RecomputedInputs
from megatron_patches._model.experts import linears_of_experts
from megatron_patches._model.modules import inputs_of
from megatron_patches._model.sites import Site, count_layers, find_sites, last_block, layers_of, moe_layers
from megatron_patches._model.unshared import unshared_modules
from offload_engine import Action, ChunkKey, ChunkOffloadHandler, GroupTraits, OffloadEngine

logger = logging.getLogger(__name__)


class _Called(NamedTuple):
    """A chunk whose forward is running."""

    chunk: ChunkOffloadHandler
    ungrouped_hooks: AbstractContextManager[Any]
    has_begun_head: bool = False


class Attachment:
    """Owns the hooks on one list of model chunks, and the engine that the hooks call."""

    def __init__(
        self,
        engine: OffloadEngine,
        chunks: Sequence[torch.nn.Module],
        names: Sequence[str],
        *,
        layers_per_checkpoint: int | None = None,
        num_layers: int | None = None,
        min_bytes: Mapping[str, int] | None = None,
    ) -> None:
        """Put the hooks on the chunks.

        Args:
            engine: moves the groups.
            chunks: this rank's model chunks, without wrappers, in the order of their virtual stages.
            names: names of the table, without those that are parts of another one.
            layers_per_checkpoint: number of fully recomputed layers that share one input, which is a group of its own;
                None: these inputs are not offloaded.
            num_layers: number of layers of each chunk that offload, from the first on; None: all.
            min_bytes: smaller storages stay, by name and "" for the other names; None: as in `OffloadConfig`.
        """
        self.engine: OffloadEngine = engine
        self.held: HeldTensors = HeldTensors(engine)
        self._pause: HooksPause = HooksPause(engine)  # one is enough: modules without hooks are never nested
        self.nodes: PlanNodes = PlanNodes(engine, self.held, self._pause)
        self.recomputed: RecomputedInputs = RecomputedInputs()
        self.num_groups: Counter[str] = Counter()
        """Groups opened so far, by name."""
        self._weights: list[weakref.ref[torch.Tensor]] = []
        self._is_closed: bool = False
        self._hooks: ModuleHooks = ModuleHooks()
        self._brackets: list[GroupBracket] = []
        self._last_groups: list[frozenset[int]] = []
        self._unused_names: set[str] = set()
        self._called: _Called | None = None  # the chunk whose forward runs; None if it runs as the nodes of a plan
        self._num_forwards: list[int] = [0] * len(chunks)
        self._at_once: ChunksAtOnce = ChunksAtOnce()
        self._min_bytes: Mapping[str, int] = min_bytes or {}
        self.note_weights(chunks)
        try:
            for stage, chunk in enumerate(chunks):
                sites = [s for s in find_sites(chunk, names) if num_layers is None or s.layer < num_layers]
                is_in_checkpoints = not sites  # every layer is recomputed and saves only its input
                last_groups = last_checkpoint(count_layers(chunk), layers_per_checkpoint) if is_in_checkpoints else ()
                self._last_groups.append(frozenset(last_groups))
                self._attach_hooks(chunk, stage, sites, names)
        except BaseException:
            self._hooks.remove()  # the caller gets no attachment to close
            raise
        self.checkpoint_bracket: GroupBracket | None = (
            None if layers_per_checkpoint is None else self.bracket(Site("layer_input", "", None))
        )

    def note_weights(self, chunks: Sequence[torch.nn.Module]) -> None:
        """Collect the parameters and buffers of `chunks`, which are not activations.

        Call it at the end of a step, when the device still has queued work; at the start it would idle. A parameter or
        buffer replaced between two steps is known one step later. Until then a new buffer, and a tensor detached from a
        new parameter, may move like activations.

        Args:
            chunks: as in the constructor, without wrappers: `buffers` of DistributedDataParallel are other objects.
        """
        self._weights = [weakref.ref(t) for chunk in chunks for t in (*chunk.parameters(), *chunk.buffers())]

    @property
    def weights(self) -> list[torch.Tensor]:
        """Return the parameters and buffers of the chunks, as they were at the end of the last step."""
        return [tensor for weight in self._weights if (tensor := weight()) is not None]

    def begin_iteration(self, actions: Sequence[Action], *, is_combined: bool = False) -> None:
        """Start a step: reset the counts of this rank's forwards.

        Args:
            actions: schedule of this step.
            is_combined: forward and backward of two chunks run together, as in the all-to-all overlap.
        """
        self.held.begin_step()
        self._num_forwards = [0] * len(self._num_forwards)
        self._at_once.begin_step(actions, is_combined)

    def start_chunk(self, stage: int, has_head: bool = False) -> ChunkOffloadHandler | None:
        """Start the next forward of virtual stage `stage`; return its handler, or None while the engine is passive.

        Args:
            stage: virtual stage of this rank.
            has_head: `begin_head` will be called after the logits. If the backward comes at once, it releases
                copy-outs.
        """
        if not self.engine.is_active:
            return None
        key = ChunkKey(stage, self._num_forwards[stage])
        self._num_forwards[stage] += 1
        at_once = key in self._at_once
        last_groups = self._last_groups[stage] if at_once else frozenset()
        return self.engine.start_chunk(key, keep_groups=last_groups, has_head=has_head and at_once)

    @contextmanager
    def reset_after_errors(self) -> Iterator[None]:
        """Return a context manager that calls `reset` on exceptions."""
        try:
            yield
        except BaseException:
            self.reset()
            raise

    def reset(self) -> None:
        """Abandon every group that is still open after an exception."""
        self._pause.end()  # first: while hooks are paused a bracket has none to pop
        for bracket in reversed(self._brackets):
            bracket.abandon()
        self._end_called()
        self.recomputed.clear()
        self.held.clear()
        self.nodes.clear()

    def warn_of_unused_names(self) -> None:
        """Warn, once, about each name whose submodules this rank has but no step has called."""
        self._unused_names -= self.num_groups.keys()
        for name in sorted(self._unused_names):
            logger.warning("offload of %r: the model has its submodules, but this step did not call them", name)
        self._unused_names.clear()

    def close(self) -> None:
        """Remove every hook and close the engine, even if a captured step exists. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._hooks.remove()
        self.reset()
        # At the end of a process, megatron-core has not dropped its graphs.
        for step in self.engine.graphs.steps:
            step.release()
        for layers in self.engine.graphs.layers:
            layers.release()
        self.engine.close()

    def bracket(self, site: Site, is_last: bool = False) -> GroupBracket:
        """Make the bracket of a site; groups of the last site stay resident in chunks whose backward comes at once.

        By site, not by group index: a layer does not always run its modules in the order of the table.
        """
        # Not a method of self: without a reference cycle an attachment is freed together with its model.
        keeps = self._at_once if is_last else None
        least = self._min_bytes.get(site.name, self._min_bytes.get("", 0))
        traits = GroupTraits(layer=site.layer, may_delay=site.is_before_experts, min_bytes=least)
        bracket = GroupBracket(self.engine, site.name, self.num_groups, keeps, traits)
        self._brackets.append(bracket)
        return bracket

    def _attach_hooks(self, chunk: torch.nn.Module, stage: int, sites: Sequence[Site], names: Sequence[str]) -> None:
        self._attach_chunk(chunk, stage)
        self._attach_sites(chunk, sites)
        self._attach_moe_layers(chunk)
        self._attach_pauses(chunk, names)
        self._hooks.handles += self.held.attach(chunk)  # last: these hooks run after the hooks that commit groups
        self._unused_names.update(site.name for site in sites)

    def _attach_chunk(self, chunk: torch.nn.Module, stage: int) -> None:
        head = getattr(chunk, "output_layer", None)  # computes the logits; on the last stage only
        has_head = head is not None

        def enter_chunk(module: torch.nn.Module, args: Any) -> None:
            handler = self.start_chunk(stage, has_head=has_head)
            if handler is not None:
                self._called = _Called(handler, handler.hooks.around_groups())
                self._called.ungrouped_hooks.__enter__()

        def begin_last_block(module: torch.nn.Module, args: Any) -> None:
            if self._called is not None:
                self._called.chunk.begin_tail(_first_with_grad(args))

        def begin_head(module: torch.nn.Module, args: Any, output: Any) -> None:
            # Of several heads (MTP layers have their own) the first is the last in backward.
            if self._called is not None and not self._called.has_begun_head:
                self._called = self._called._replace(has_begun_head=True)
                self._called.chunk.begin_head()
                when_backward_begins(output, self._called.chunk.end_loss)

        def end_chunk(module: torch.nn.Module, args: Any, output: Any) -> None:
            handler = self._end_called()
            if handler is not None and output is not None:  # None: the forward raised
                handler.begin_head()  # needed if a fused loss reads only the head's weight and never calls the head
                handler.end_forward()
                when_backward_begins(output, handler.begin_backward)

        self._hooks.handles.append(chunk.register_forward_pre_hook(enter_chunk))
        block = last_block(chunk)
        if block is not None:
            self._hooks.handles.append(block.register_forward_pre_hook(begin_last_block))
        if head is not None:
            self._hooks.handles.append(head.register_forward_hook(begin_head))
        self._hooks.handles.append(chunk.register_forward_hook(end_chunk, always_call=True))

    def _end_called(self) -> ChunkOffloadHandler | None:
        called, self._called = self._called, None
        self._pause.end()  # still paused only after a KeyboardInterrupt, for which torch runs no forward hook
        if called is None:
            return None
        called.ungrouped_hooks.__exit__(None, None, None)
        return called.chunk

    def _attach_sites(self, chunk: torch.nn.Module, sites: Sequence[Site]) -> None:
        # Hooks run in the order of registration. On one submodule, a range that ends there is committed first, then
        # comes the submodule's own bracket, and a range that begins there is opened last.
        modules = dict(chunk.named_modules())
        last = {sites[ordinal] for ordinal in last_of_each_name(chunk, sites)}
        brackets = [self.bracket(site, site in last) for site in sites]
        for site in sites:
            # A separate bracket: the module runs inside, and the hooks of the other would end the group there.
            if inputs_of(site.name):
                self.recomputed.add(site, self.bracket(site, site in last), modules)
        ranges = [(site, bracket) for site, bracket in zip(sites, brackets, strict=True) if site.until]
        self.nodes.add_ranges(bracket for _, bracket in ranges)
        for site, bracket in ranges:
            self._hooks.commit_before(modules[str(site.until)], bracket)
        for site, bracket in zip(sites, brackets, strict=True):
            if site.until is None:
                self._hooks.enclose(modules[site.path], bracket)
        for site, bracket in ranges:
            owner = modules[site.path.rpartition(".")[0]]
            self._hooks.enter_after(modules[site.path], owner, bracket)

    def _attach_moe_layers(self, chunk: torch.nn.Module) -> None:
        # After the dispatcher has read its split sizes, the device waits until the host has launched the kernels of
        # the experts, which takes the host longer while a copy runs. So groups committed before are copied from the
        # end of the MLP on. (Not from the end of the experts: inside a checkpoint their hooks may not run.)
        engine = self.engine

        def note_launch(module: torch.nn.Module, args: Any, output: Any) -> None:
            running = engine.active_chunk
            if running is not None:
                running.note_launch()

        for layer in moe_layers(chunk):
            self._hooks.handles.append(layer.register_forward_hook(note_launch))

    def _attach_pauses(self, chunk: torch.nn.Module, names: Sequence[str]) -> None:
        # Hooks pause in modules that share no saved tensor with a group: with 32 experts in each layer they cost the
        # host a twentieth of the step. In a linear of experts they pause after the one tensor that a group may need.
        unshared = unshared_modules(chunk, names)
        for module in unshared:
            self._hooks.pause_in(module, self._pause, self._pause.enter)
        without_hooks = {part for module in unshared for part in module.modules()}
        for linear in linears_of_experts(chunk):
            if linear not in without_hooks:
                self._hooks.pause_in(linear, self._pause, self._pause.enter_linear)


def when_backward_begins(output: Any, do: Callable[[], None]) -> None:
    """Register `do` to be called when the gradient of a module's output arrives; no-op if no output requires grad."""
    tensor = _first_with_grad(output)
    if tensor is not None:
        tensor.register_hook(lambda _: do())


def _first_with_grad(values: Any) -> torch.Tensor | None:
    for tensor in values if isinstance(values, (tuple, list)) else (values,):
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            return tensor
    return None


def last_of_each_name(chunk: torch.nn.Module, sites: Sequence[Site]) -> frozenset[int]:
    """Return the index, in `sites`, of the last site of every name, if it is in the last two layers of the chunk.

    A backward that comes at once needs these groups before a copy could be out and back. Two layers, because a layer
    may be only an attention or only an MLP.
    """
    first_layer = sum(1 for _ in layers_of(chunk)) - 2
    last = {site.name: ordinal for ordinal, site in enumerate(sites)}
    return frozenset(ordinal for ordinal in last.values() if sites[ordinal].layer >= first_layer)


def last_checkpoint(num_layers: int, layers_per_checkpoint: int | None) -> frozenset[int]:
    """Return the index, in the chunk, of the last group of recomputed layers."""
    if not layers_per_checkpoint or not num_layers:
        return frozenset()
    return frozenset({(num_layers - 1) // layers_per_checkpoint})
