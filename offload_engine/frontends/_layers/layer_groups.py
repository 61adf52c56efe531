# SPDX-License-Identifier: Apache-2.0
"""`LayerGroups`: makes each call of a layer one group, or several if it saves much, by hooks on the model."""

from __future__ import annotations

import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload_engine._compat.own_hooks import OwnHooks, are_innermost, pop_own
from offload_engine._saved.handles import PackedTensor, StayingTensor, without_graph
from offload_engine._saved.quantized import PLAIN_TYPES, taken_apart
from offload_engine._saved.storage import TensorGroup
from offload_engine.chunk import ChunkOffloadHandler
from offload_engine.errors import OffloadError
from offload_engine.frontends._common.compiling import is_compiled, untraced
from offload_engine.frontends._common.groups import unpack_in_group
from offload_engine.frontends._common.session import Session, is_in_backward
from offload_engine.frontends._layers.exclusions import exclude_shared_inputs, exclude_weights
from offload_engine.frontends._layers.find_layers import Layer
from offload_engine.frontends._layers.group_hooks import GroupHooks
from offload_engine.traits import GroupTraits

logger = logging.getLogger(__name__)

_OUTSIDE = (
    "%s is called outside the forward of %s, so its saved tensors are not offloaded. If your own code calls "
    "the layers, wrap it in `with handle.forward():`."
)


class _Forward:
    """One offloaded forward of the model."""

    def __init__(self, chunk: ChunkOffloadHandler, is_in_context: bool) -> None:
        self.chunk: ChunkOffloadHandler = chunk
        self.is_in_context: bool = is_in_context  # begun, and ended, by a `with handle.forward()`
        self.thread: int = threading.get_ident()
        self.handled_outside: int = id(sys.exception())  # handled by the body's caller; differs from one raised inside
        self.handled_in_body: int = 0  # the same for the caller of `layer`
        self.layer: nn.Module | None = None  # the layer of the open group
        self.traits: GroupTraits = GroupTraits()  # of that layer's groups
        self.num_layers: int = 0  # called so far
        self.has_run_last: bool = False
        self.input_groups: set[TensorGroup] = set()  # of layers that an outer checkpoint runs
        self.held: Any = None  # a handle for the running layer's input, until its checkpoint holds one
        self.num_inside: int = 0  # nested calls of the body, without gradients


class _Saved(NamedTuple):
    """Kept by autograd for a saved tensor: its handle, and the group whose backward begins when it is unpacked."""

    packed: PackedTensor
    group: TensorGroup | None  # None: saved outside the layers
    forward: _Forward


class LayerGroups:
    """Opens a group when a layer is called and closes it, with its copy-out, when the layer returns.

    A group that has saved `group_bytes` is closed at the next storage and another one is opened: its copy-out need not
    wait for the end of a large layer, nor the backward of that layer for all of its bytes.

    One pair of saved tensors hooks is around the forward of the body, the module that runs the layers. A tensor saved
    in a layer belongs to the layer's group. A tensor saved between layers moves with a group that saves it too.

    If other hooks are on top of these when a layer is called, or gradients are off although they were on when the body
    was called, a checkpoint runs the layer: it intercepts the tensors that the layer saves and keeps only the layer's
    input. Then the group holds only this input.

    Inputs and outputs of a layer get no mark in the graph: the backward of a group begins when the first of its tensors
    is unpacked.

    Args:
        body: the module that runs all `layers`.
        layers: the layers, in order; the last one stays on the device, unless another forward comes before a backward.
        session: session of the model.
        group_bytes: see above; None: one group per layer.
    """

    def __init__(
        self,
        body: nn.Module,
        layers: Sequence[Layer],
        session: Session,
        *,
        group_bytes: int | None = None,
    ) -> None:
        self.session: Session = session
        self._group_bytes = group_bytes
        self._forward: _Forward | None = None
        self._last_chunk: ChunkOffloadHandler | None = None  # of a forward that is over, until a backward begins
        self._checkpointed: set[nn.Module] = set()
        self._body_name = type(body).__name__
        self._has_warned = False
        self._hooks = OwnHooks(self._pack, self._unpack)
        self._module_hooks = GroupHooks()
        self._module_hooks.enclose_body(body, self._before_body, self._after_body)
        for layer in layers:
            enter = partial(self._enter_layer, name=layer.name, is_last=layer is layers[-1])
            self._module_hooks.enclose_layer(layer, enter, self._exit_layer, self._keep_weights)

    @property
    def open_layer(self) -> nn.Module | None:
        """Return the running layer if its saved tensors go into its group; None if an outer checkpoint runs it."""
        forward = self._own_forward
        return None if forward is None or forward.num_inside else forward.layer

    @property
    def _own_forward(self) -> _Forward | None:
        """Return the offloaded forward if it runs in this thread, otherwise None."""
        forward = self._forward
        return forward if forward is not None and forward.thread == threading.get_ident() else None

    @property
    def _is_in_context(self) -> bool:
        """Return whether this thread is inside the `with handle.forward()` of an offloaded forward."""
        forward = self._own_forward
        return forward is not None and forward.is_in_context

    def note_checkpointed(self, layer: nn.Module, is_checkpointed: bool) -> None:
        """Declare whether the forward of a layer is checkpointed, so that its group holds only the inputs."""
        (self._checkpointed.add if is_checkpointed else self._checkpointed.discard)(layer)

    def add_hook(self, layer: nn.Module, function: Callable[..., None]) -> RemovableHandle:
        """Call `function` before the forward of `layer` and after the hook that opens its group, never compiled."""
        return self._module_hooks.add(layer, function)

    def add_hooks_inside(self, layer: Layer, before: Callable[..., None], after: Callable[..., None]) -> None:
        """Call `before` and `after` around the forward of a layer, inside FSDP's hooks, never compiled."""
        self._module_hooks.enclose_inner(layer, before, after)

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Return a context manager for code that runs the layers: one forward of the body, or part of an outer one."""
        if self._is_in_context:
            yield
            return
        try:
            self._enter_body(is_in_context=True)
            yield
        except BaseException:
            self._exit_body(has_raised=True)
            raise
        self._exit_body()

    def remove(self) -> None:
        """Remove every hook, also those of an interrupted forward. Idempotent."""
        if self._own_forward is not None and self._is_on_top():
            self._abandon()
        self._pop_leftover()
        self._module_hooks.remove()

    def _untrace(self) -> None:
        """Exclude all hooks from torch.compile, in case layers have been compiled since. Idempotent."""
        if self._module_hooks.untrace():
            self._hooks = OwnHooks(untraced(self._pack), untraced(self._unpack))

    # -- hooks on modules --------------------------------------------------------------------------------------------

    def _before_body(self, body: nn.Module, args: Any) -> None:
        if is_compiled() and torch.is_grad_enabled():
            raise OffloadError(
                f"the {type(body).__name__} that runs the offloaded layers is compiled as a whole: groups would break "
                "its graph into pieces. Compile the layers instead: for layer in layers: layer.compile()"
            )
        if not self._is_in_context:
            self._enter_body()

    def _after_body(self, body: nn.Module, args: Any, output: Any) -> None:
        forward = self._own_forward
        if forward is not None and not forward.is_in_context:
            self._exit_body(has_raised=id(sys.exception()) != forward.handled_outside)

    def _enter_body(self, is_in_context: bool = False) -> None:
        if self._forward is not None and not is_in_backward():
            if self._own_forward is None:
                return  # if several threads run the model, one forward at a time is offloaded
            if not torch.is_grad_enabled():
                self._forward.num_inside += 1  # the model calls itself, for instance on its own output
                return
            self._abandon()  # torch runs no forward hook after a KeyboardInterrupt
        self._pop_leftover()
        try:
            chunk = self.session.start_forward()
            if chunk is not None:
                self._enter_forward(chunk, is_in_context)
        except BaseException:
            self.session.abandon_forward()
            raise

    def _enter_forward(self, chunk: ChunkOffloadHandler, is_in_context: bool) -> None:
        last, self._last_chunk = self._last_chunk, None
        if last is not None:
            last.offload_kept_groups()
        self._untrace()
        self._hooks.__enter__()
        self._forward = _Forward(chunk, is_in_context)

    def _pop_leftover(self) -> None:
        """Pop hooks that an interrupt has left on the stack, before or after a forward."""
        if self._forward is None:
            pop_own(lambda unpack: inspect.unwrap(unpack) == self._unpack)

    def _exit_body(self, has_raised: bool = False) -> None:
        if self._own_forward is None or is_in_backward():
            return
        if self._own_forward.num_inside:
            self._own_forward.num_inside -= 1
            return
        if has_raised:
            self._abandon()
        else:
            self._last_chunk = self._own_forward.chunk
            self.session.end_forward()
            self._close()  # behind it: after an interrupt in between, the next forward abandons this one
            self.session.warn_if_idle()

    def _abandon(self) -> None:
        self.session.abandon_forward()
        self._close()

    def _close(self) -> None:
        assert self._forward is not None
        self._hooks.__exit__()
        self._forward.held = None  # handles in the graph keep this forward alive, so it must not keep the input
        self._forward = None

    def _enter_layer(self, layer: nn.Module, args: Any, kwargs: Any, *, name: str, is_last: bool) -> None:
        forward = self._own_forward
        if forward is None:
            if self._forward is None:  # otherwise another thread's forward is offloaded
                self._warn_if_outside(name)
            return
        if forward.layer is not None or forward.num_inside or is_in_backward():
            return
        if is_last and forward.has_run_last:  # a shared module runs again: only the backward of its last call is next
            forward.chunk.offload_kept_groups()
        forward.has_run_last |= is_last
        is_saving = torch.is_grad_enabled() and self._is_on_top()
        is_read_once = not is_saving or layer in self._checkpointed
        traits = GroupTraits(keep=is_last, layer=forward.num_layers, read_once=is_read_once)
        forward.num_layers += 1
        group = forward.chunk.open_group(name, traits)
        exclude_shared_inputs(self.session.engine, args, kwargs)
        if is_saving:
            forward.layer, forward.traits, forward.handled_in_body = layer, traits, id(sys.exception())
            return
        source = next((t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and t.requires_grad), None)
        forward.input_groups.add(group)
        # Non-reentrant checkpointing has saved the input already; reentrant checkpointing saves it after the layer.
        forward.held = forward.chunk.tensor_push(source) if source is not None else None
        forward.chunk.close_group(ends_layer=True)

    def _warn_if_outside(self, name: str) -> None:
        if self._has_warned or self.session.engine.is_idle or not torch.is_grad_enabled() or is_in_backward():
            return
        self._has_warned = True
        logger.warning(_OUTSIDE, name, self._body_name)

    def _exit_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        forward = self._own_forward
        if forward is None or forward.layer is not layer or forward.num_inside or is_in_backward():
            return
        forward.layer = None
        if id(sys.exception()) != forward.handled_in_body:  # it raised
            forward.chunk.abandon_group()
        else:
            forward.chunk.close_group(ends_layer=True)

    def _is_full(self, group: TensorGroup) -> bool:
        return self._group_bytes is not None and group.own_bytes >= self._group_bytes

    def _keep_weights(self, unit: nn.Module, args: Any) -> None:
        if self._own_forward is not None and not is_in_backward():
            exclude_weights(self.session.engine, unit)

    # -- hooks on saved tensors --------------------------------------------------------------------------------------

    def _is_on_top(self) -> bool:
        return are_innermost(self._hooks.unpack_hook)

    def _pack(self, tensor: torch.Tensor) -> _Saved | StayingTensor:
        forward = self._forward
        if forward is None or is_in_backward():
            return StayingTensor(without_graph(tensor))
        if type(tensor) not in PLAIN_TYPES and (parts := taken_apart(tensor, self._pack, self._unpack)) is not None:
            return parts
        group = forward.chunk.groups.innermost
        hooks = forward.chunk.hooks
        if group is not None and self._is_full(group) and hooks.would_start_storage(tensor):
            forward.chunk.close_group()  # not before, because views of the last storage may still be written
            group = forward.chunk.open_group(group.name, forward.traits)
        packed = hooks.pack_plain(tensor, group) if group is not None else hooks.pack_ungrouped(tensor)
        return _Saved(packed, group, forward) if isinstance(packed, PackedTensor) else packed

    def _unpack(self, saved: _Saved | StayingTensor) -> torch.Tensor:
        if isinstance(saved, StayingTensor):
            return saved.unpack()
        if is_in_backward():
            self._last_chunk = None
            self.session.note_backward(saved.forward.chunk)
        group = saved.group
        if group is None and saved.packed.storage.group in saved.forward.input_groups:
            group = saved.packed.storage.group
        return unpack_in_group(saved.packed, group, saved.forward.chunk)
