# SPDX-License-Identifier: Apache-2.0
"""Rows for MoE layers: small reads of the device by the host do not queue behind copies of activations.

A copy of a few bytes waits for the copy engine, which serves activations first in, first out. On the training path of
megatron-core 0.16.1, 0.19.2 and 0.20 the host reads the device

- in the alltoall dispatcher: split sizes and token counts in `maybe_move_tensor_to_cpu`, started on a stream of their
  own as soon as they are known and waited for before the all-to-all; before 0.17 once more in an unfused `permute`
  (`masked_select` needs its number of results). A read by a kernel needs no stream of its own: it is queued on the
  stream that computes the split sizes;
- in the allgather dispatcher: `.cpu()`, `.item()` and `masked_select` in `dispatch_postprocess`;
- in the flex dispatcher: boolean masks in DeepEP's `_indices_to_multihot`; `.item()` in `_NCCLEPManager` (before 0.20)
  and, with padded inputs, in `_HybridEPManager`;
- in the experts: `.tolist()` of the token counts, which the last two leave on the device.

Each has a row. Reads of tensors already on the host (every other `.tolist()` and `.item()`) need none, and reads in the
C++ code of DeepEP and HybridEP cannot have one.

One more row for each dispatcher: it keeps the probabilities of its last forward, and with them the graph of the router.
In a layer that recomputes its experts that graph has the input of the recomputation and its gradient, so each layer
keeps both on the device until its next forward: 2 x 64 MiB for 8,192 tokens of 4,096 numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches._rows.host_reads import HostReads, read_now
from megatron_patches._rows.registry import Patch
from megatron_patches._rows.runtime import Runtime

_MOE = "megatron.core.transformer.moe"
_DISPATCHER = f"{_MOE}.token_dispatcher"
_ALLTOALL = f"{_DISPATCHER}:MoEAlltoAllTokenDispatcher"
_BEHIND = "a copy would wait for the copy engine, which serves activations first in, first out (9 ms behind 512 MiB)"


def moe_rows(runtime: Runtime) -> list[Patch]:
    """Return the rows; outside a step with offload each passes its call through unchanged."""
    return [
        Patch(
            target=f"{_DISPATCHER}:maybe_move_tensor_to_cpu",
            wrapper=functools.partial(_wrap_move, runtime=runtime),
            why=f"split sizes and token counts are read by a kernel into mapped memory: {_BEHIND}",
        ),
        Patch(
            target=f"{_ALLTOALL}._maybe_dtoh_and_synchronize",
            wrapper=functools.partial(_wrap_dtoh, runtime=runtime),
            why="these reads run on the current stream: while a kernel waits on another stream, each kernel of the "
            "current stream starts a microsecond later",
        ),
        Patch(
            target=f"{_DISPATCHER}:_DeepepManager._indices_to_multihot",
            wrapper=functools.partial(_wrap_multihot, runtime=runtime),
            why=f"replaces its boolean masks, whose number of results the host waits for, by a scatter: {_BEHIND}",
        ),
        Patch(
            target=f"{_DISPATCHER}:permute",
            wrapper=functools.partial(_wrap_permute, runtime=runtime),
            why=f"its masked_select makes the host wait for a count that the caller has passed: {_BEHIND}",
            versions="<0.17",
        ),
        *(
            Patch(
                target=f"{_DISPATCHER}:{name}",
                wrapper=functools.partial(_wrap_reads, runtime=runtime),
                why=f"it reads token counts on the host: {_BEHIND}",
                versions=versions,
            )
            for name, versions in _READERS
        ),
        *(
            Patch(
                target=f"{_MOE}.experts:{name}.forward",
                wrapper=functools.partial(_wrap_experts, runtime=runtime),
                why=f"it reads the token counts that some flex dispatchers leave on the device: {_BEHIND}",
            )
            for name in ("TEGroupedMLP", "SequentialMLP")
        ),
        *(
            Patch(
                target=f"{_DISPATCHER}:MoE{name}TokenDispatcher.combine_postprocess",
                wrapper=functools.partial(_wrap_last, runtime=runtime),
                why="it keeps the graph of its router, with the input of a recomputation and its gradient, until the "
                "next forward",
            )
            for name in ("AllGather", "AlltoAll", "Flex")
        ),
    ]


_READERS = (
    ("MoEAllGatherTokenDispatcher.dispatch_postprocess", ">=0.16"),
    ("_HybridEPManager.setup_metadata", ">=0.19"),
    ("_NCCLEPManager.get_permuted_hidden_states_by_experts", ">=0.19,<0.20"),
)

_READ_BY_THE_DEVICE = ("use_transformer_engine_op_fuser", "moe_use_grouped_tensor")
"""Settings with which the experts of TransformerEngine take the counts where they are."""


def multihot(indices: torch.Tensor, probs: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token and their probabilities, in T x E memory and without waiting for the device.

    Args:
        indices: expert of each choice, [tokens, choices]; -1: none.
        probs: of each choice, same shape.
        num_experts: E.

    Returns:
        Map (bool) and probabilities (float32), each [tokens, E].
    """
    spare = num_experts  # one more column, for choices of -1
    columns = indices.long().masked_fill(indices == -1, spare)
    shape = (indices.shape[0], num_experts + 1)
    routing_map = torch.zeros(shape, dtype=torch.bool, device=indices.device).scatter_(1, columns, True)
    zeros = torch.zeros(shape, dtype=torch.float, device=indices.device)
    return routing_map[:, :spare].contiguous(), zeros.scatter(1, columns, probs.float())[:, :spare].contiguous()


def _wrap_multihot(original: Callable[..., Any], *, runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def indices_to_multihot(self: Any, indices: torch.Tensor, probs: torch.Tensor) -> Any:
        if runtime.running_engine is None:
            return original(self, indices, probs)
        return multihot(indices, probs, self.num_local_experts)

    return indices_to_multihot


def _wrap_move(original: Callable[..., Any], *, runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def move(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        engine = runtime.running_engine
        if engine is None or not torch.is_tensor(tensor) or not tensor.is_cuda:
            return original(tensor, as_numpy=as_numpy, record_stream=record_stream)
        # As with the original, the caller waits for the stream before it reads the result.
        moved = engine.device.host_read(tensor).tensor
        if record_stream:
            tensor.record_stream(torch.cuda.current_stream())
        return moved.numpy() if as_numpy else moved

    return move


def _wrap_dtoh(original: Callable[..., Any], *, runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def start_or_wait(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        reads = torch.is_tensor(tokens_per_expert) and tokens_per_expert.is_cuda
        if runtime.running_engine is None or not reads:
            return original(self, point, tokens_per_expert)
        self.cuda_dtoh_stream = torch.cuda.current_stream()  # hides the class attribute; also gets the event
        try:
            return original(self, point, tokens_per_expert)
        finally:
            del self.cuda_dtoh_stream

    return start_or_wait


def _wrap_permute(original: Callable[..., Any], *, runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def permute(tokens: Any, routing_map: Any, probs: Any = None, num_out_tokens: Any = None, **options: Any) -> Any:
        engine = runtime.running_engine
        if engine is None:
            return original(tokens, routing_map, probs=probs, num_out_tokens=num_out_tokens, **options)
        # an int, or a tensor, which is on the host if it was waited for already
        count = None if num_out_tokens is None else int(read_now(num_out_tokens, engine))
        with HostReads(engine, num_selected=count):
            return original(tokens, routing_map, probs=probs, num_out_tokens=num_out_tokens, **options)

    return permute


def _wrap_reads(original: Callable[..., Any], *, runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        engine = runtime.running_engine
        if engine is None:
            return original(*args, **kwargs)
        with HostReads(engine):
            return original(*args, **kwargs)

    return call


def _wrap_experts(original: Callable[..., Any], *, runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def forward(self: Any, hidden: Any, tokens_per_expert: Any, *args: Any, **kwargs: Any) -> Any:
        engine = runtime.running_engine
        if engine is not None and not any(getattr(self.config, name, False) for name in _READ_BY_THE_DEVICE):
            tokens_per_expert = read_now(tokens_per_expert, engine)
        return original(self, hidden, tokens_per_expert, *args, **kwargs)

    return forward


def _wrap_last(original: Callable[..., Any], *, runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def combine_postprocess(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        if runtime.running_engine is not None:
            for owner in (self, getattr(self, "_comm_manager", None)):
                _drop_graphs(owner)
        return out

    return combine_postprocess


def _drop_graphs(owner: Any) -> None:
    """Keep the numbers of the tensors that an object has, without their graphs."""
    for name, value in list(vars(owner).items()) if owner is not None else ():
        if torch.is_tensor(value) and value.grad_fn is not None:
            setattr(owner, name, value.detach())
