# SPDX-License-Identifier: Apache-2.0
"""Runs a model chunk as the nodes of a schedule plan, for the all-to-all overlap (combined 1F1B).

The schedule builds the plan of a chunk's forward and then runs its nodes between those of another chunk's backward, on
two streams: one for computation, one for communication. The chunk itself, its layers and its MoE layers are not called.
Only one forward runs at a time: every forward node belongs to the plan that was built last.

Each node keeps its inputs until its own backward, as detached leaves, and then reads only their gradients. They are
declared to the engine (`held_elsewhere`) after their last read:

- the input of attention and of a dense MLP, when that node has run, except the input of the chunk if its caller may
  read it. The communication stream may have made it: it combines the experts' outputs and receives the output of the
  previous stage;
- the residual of a MoE layer (the input of the norm before the experts), when computation continues after the residual
  connection: at the next layer or the next plan. Earlier, computation would wait for the communication that it is
  meant to hide.

A group that spans several nodes is suspended in between, while the other chunk's backward runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_patches._hooks.bracket import GroupBracket, HooksPause
from megatron_patches._hooks.held import HeldTensors
from offload_engine import OffloadEngine

_ATTENTION = ("attn", "pre_dispatch_computation")  # up to 0.18, and since


class PlanNodes:
    """Runs the forward nodes of one model's plans. Keeps no state of a node after its forward.

    Args:
        engine: moves the groups.
        held: treats a node that runs attention as a layer.
        pause: ended after each node, because a KeyboardInterrupt may skip the hook that ends it.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        held: HeldTensors,
        pause: HooksPause,
    ) -> None:
        self._engine: OffloadEngine = engine
        self._held: HeldTensors = held
        self._ranges: list[GroupBracket] = []
        self._pause: HooksPause = pause
        self._is_input_of_others: bool = False  # the input of the forward's first attention node may be read later
        self._communication: Any = None  # the stream of dispatch, combine and the pipeline's receives
        # Residual of the last combined MoE layer. Weak: its backward may run before it is declared.
        self._residual: Callable[[], torch.Tensor | None] = _none
        self._residual_copies: int = 0  # copies of the last attention's output, saved by a recomputed norm after it

    def add_ranges(self, brackets: Iterable[GroupBracket]) -> None:
        """Add brackets that may begin in one node and end in another."""
        self._ranges += brackets

    def start_plan(self, is_input_of_others: bool) -> None:
        """Start a plan; the computation stream has waited for all nodes of the previous one."""
        from megatron.core.pipeline_parallel import utils

        self._is_input_of_others = is_input_of_others
        with utils.torch.cuda.stream(utils.get_comm_stream()):  # without a GPU its torch is a stand-in
            self._communication = self._engine.device.current_stream()
        self._declare_residual()

    def run(self, node: Any, forward: Callable[..., Any], *inputs: Any) -> Any:
        """Run the forward of one node; return its outputs."""
        chunk = self._engine.active_chunk
        if chunk is None:
            return forward(*inputs)
        is_attention = node.name in _ATTENTION
        is_read_later = is_attention and self._is_input_of_others
        if is_attention:
            self._is_input_of_others = False
            self._declare_residual()  # this stream has waited for the previous node
        is_combine = node.name == "moe_combine"
        residual = node.layer_state.residual if is_combine else None
        is_computation = is_attention or node.name == "mlp"
        if is_computation:
            self._held.begin_layer()
            self._engine.set_allocation_stream(inputs[0], self._communication)
        with chunk.hooks.around_groups(), self._open_ranges():
            outputs = forward(*inputs)
        num_copies = self._end_computation(node, is_attention, inputs[0]) if is_computation else 0
        if is_read_later or ((is_computation or is_combine) and self._held.has_other_readers):
            return outputs
        if is_computation and not node.is_mtp:  # the inputs of several MTP layers are parts of one tensor
            # One more copy: the output of the previous node.
            self._engine.held_elsewhere(inputs[0], num_copies=1 + num_copies)
        elif is_combine:
            self._residual = weakref.ref(residual)
        return outputs

    def clear(self) -> None:
        """Forget the running forward, for instance after an exception."""
        self._residual, self._residual_copies = _none, 0

    @contextmanager
    def _open_ranges(self) -> Iterator[None]:
        for bracket in self._ranges:
            bracket.resume()
        try:
            yield
        finally:
            self._pause.end()
            for bracket in self._ranges:
                bracket.suspend()  # the backward of another chunk is next

    def _end_computation(self, node: Any, is_attention: bool, node_input: torch.Tensor) -> int:
        """Declare the inputs of recomputation inside a node; return how many copies of the node's input it keeps."""
        num_copies = self._held.take_copies(node_input)
        if is_attention:  # has computed the residual that the combine node of a MoE layer reads
            self._residual_copies = self._held.take_copies(getattr(node.layer_state, "residual", None))
        self._held.end_layer()
        return num_copies

    def _declare_residual(self) -> None:
        residual, self._residual = self._residual(), _none
        num_copies, self._residual_copies = self._residual_copies, 0
        if residual is not None:
            # One more copy: the output of attention, of which this is a detached leaf.
            self._engine.held_elsewhere(residual, num_copies=1 + num_copies)


def _none() -> None:
    return None
