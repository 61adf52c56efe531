"""The nodes of the all-to-all overlap (combined 1F1B), as which a model chunk runs there.

The schedule builds the plan of a chunk's forward and then runs its nodes between those of another chunk's backward, on
two streams: one for computation, one for communication. The chunk itself, its layers and its MoE layers are not called.
Only one forward is under way at a time: every forward node belongs to the plan that was built last.

Each node keeps its inputs until its own backward, as detached leaves, and reads only their gradients then. So the
engine is told when they have been read for the last time:

- the input of attention, and that of a dense MLP, when that node has run, but for the input of the chunk where its
  caller may read it. The communication stream may have made it: it adds up the experts' outputs, and receives what the
  stage before has sent;
- what the residual connection around the experts adds (the input of the norm before them), when the computation goes on
  behind that connection: at the next layer, or at the next plan. Any sooner and computation would wait for the
  communication that it is there to hide.

A group that reaches from one node into another is suspended in between, where the other chunk's backward runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_patches._hooks.bracket import GroupBracket, HooksPause
from megatron_patches._hooks.held import HeldTensors
from offload_engine import OffloadEngine

_ATTENTION = ("attn", "pre_dispatch_computation")  # up to 0.18, and since


class PlanNodes:
    """Runs the forward nodes of one model's plans.

    Nodes are those of the running forward alone; nothing is known of a node when its forward is over.

    Args:
        engine: that moves the groups.
        held: to which a node that runs attention is a layer.
        stretches: brackets that may begin in one node and end in another; the list may grow.
        pause: that an interrupt may leave on.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        held: HeldTensors,
        stretches: Sequence[GroupBracket],
        pause: HooksPause,
    ) -> None:
        self._engine: OffloadEngine = engine
        self._held: HeldTensors = held
        self._stretches: Sequence[GroupBracket] = stretches
        self._pause: HooksPause = pause
        self._is_input_of_others: bool = False  # what the first node of the running forward that runs attention reads
        self._communication: Any = None  # the stream of dispatch, combine and the pipeline's receives
        # Of the layer whose experts' outputs were combined last; weak, because its backward may come before it is told.
        self._residual: Callable[[], torch.Tensor | None] = _none

    def start_plan(self, is_input_of_others: bool) -> None:
        """A new plan begins: the computation stream is behind all nodes of the one before."""
        from megatron.core.pipeline_parallel import utils

        self._is_input_of_others = is_input_of_others
        with utils.torch.cuda.stream(utils.get_comm_stream()):  # without a GPU its torch is a stand-in
            self._communication = self._engine.device.current_stream()
        self._tell_residual()

    def run(self, node: Any, forward: Callable[..., Any], *inputs: Any) -> Any:
        """Runs the forward of one node."""
        chunk = self._engine.active_chunk
        if chunk is None:
            return forward(*inputs)
        is_attention = node.name in _ATTENTION
        is_read_later = is_attention and self._is_input_of_others
        if is_attention:
            self._is_input_of_others = False
            self._tell_residual()  # in front of it this stream waits for the node before it
            self._held.begin_layer()
        is_combine = node.name == "moe_combine"
        residual = node.layer_state.residual if is_combine else None
        is_computation = is_attention or node.name == "mlp"
        if is_computation:
            self._engine.set_allocation_stream(inputs[0], self._communication)
        with chunk.hooks.around_groups(), self._open_stretches():
            outputs = forward(*inputs)
        if is_attention:
            self._held.end_layer()
        if is_read_later or ((is_computation or is_combine) and self._held.has_other_readers):
            return outputs
        if is_computation and not node.is_mtp:  # the inputs of several such layers are parts of one tensor
            # One copy: what the node before has given out.
            self._engine.held_elsewhere(inputs[0], num_copies=1)
        elif is_combine:
            self._residual = weakref.ref(residual)
        return outputs

    def clear(self) -> None:
        """Forgets the running forward, which raised."""
        self._residual = _none

    @contextmanager
    def _open_stretches(self) -> Iterator[None]:
        for bracket in self._stretches:
            bracket.resume()
        try:
            yield
        finally:
            self._pause.leave()
            for bracket in self._stretches:
                bracket.suspend()  # the backward of another chunk is next

    def _tell_residual(self) -> None:
        residual, self._residual = self._residual(), _none
        if residual is not None:
            # One copy: the tensor that attention has given out, of which this is a detached leaf.
            self._engine.held_elsewhere(residual, num_copies=1)


def _none() -> None:
    return None
