# SPDX-License-Identifier: Apache-2.0
"""Rows that let megatron-core's GPU model run as a rehearsal, with stand-ins for code that needs a GPU or contents."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from megatron_patches._rehearsal.kernels import Rotation
from megatron_patches._rehearsal.modules import RehearsedNorm, RehearsedSpecProvider
from megatron_patches._rows.cpu import cpu_rows
from megatron_patches._rows.registry import Patch
from offload_engine.rehearsal.allocated import AllocatedBytes
from offload_engine.rehearsal.tensors import HollowTensors

_SPECS = "megatron.core.models.gpt.gpt_layer_specs"
_EMBEDDINGS = "megatron.core.models.common.embeddings"
_ROPE = f"{_EMBEDDINGS}.rope_utils"
_COMPILED = "_torchdynamo_orig_callable"  # of a function that torch.compile has turned into a kernel
_SENDS = ":_p2p_ops"
_DISCARDING = "megatron.core.tensor_parallel.random:CheckpointWithoutOutput"


def rehearsal_rows(hollow: HollowTensors, has_te: bool) -> list[Patch]:
    """Return the rows of a rehearsal.

    Args:
        hollow: the mode that is in force while the model runs.
        has_te: the model has TransformerEngine's modules.
    """
    rows = [row for row in cpu_rows() if not row.target.endswith(_SENDS)]  # nothing is sent
    own = (*_context_rows(), *_routing_rows(), *_discarding_rows(hollow), *_fused_rows(hollow))
    return [*rows, *(_te_rows() if has_te else ()), *own]


def _te_rows() -> Iterator[Patch]:
    why = "TransformerEngine's modules cannot be made without a GPU"
    specs = importlib.import_module(_SPECS)
    for name, value in {"TESpecProvider": RehearsedSpecProvider, "TENorm": RehearsedNorm, "HAVE_TE": True}.items():
        yield Patch(
            target=f"{_SPECS}:{name}",
            wrapper=functools.partial(_instead, value),
            why=why,
            is_new=not hasattr(specs, name),
        )
    yield Patch(
        target=f"{_ROPE}:fused_apply_rotary_pos_emb",
        wrapper=functools.partial(_instead, rotate),
        why="the fused rotation is TransformerEngine's kernel",
    )
    yield Patch(
        target="megatron.core.transformer.transformer_block:LayerNormImpl",
        wrapper=functools.partial(_instead, RehearsedNorm),
        why="the norm after the last layer is TransformerEngine's, too",
    )


def rotate(t: torch.Tensor, freqs: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Stand in for the fused rotation of queries or keys."""
    out: torch.Tensor = Rotation.apply(t, freqs)
    return out


def _context_rows() -> Iterator[Patch]:
    for module in ("rotary_pos_embedding", "yarn_rotary_pos_embedding"):
        yield Patch(
            target=f"{_EMBEDDINGS}.{module}:get_pos_emb_on_this_cp_rank",
            wrapper=functools.partial(_instead, own_part),
            why="without a GPU the numbers of a rank's parts cannot be copied to it",
        )


def own_part(pos_emb: torch.Tensor, seq_dim: int, cp_group: Any) -> torch.Tensor:
    """Return a tensor as large as a rank's part of the sequence."""
    return pos_emb.narrow(seq_dim, 0, pos_emb.shape[seq_dim] // cp_group.size()).contiguous()


def _routing_rows() -> Iterator[Patch]:
    yield Patch(
        target="megatron.core.transformer.moe.router:topk_routing_with_score_function",
        wrapper=balanced,
        why="without contents no expert is chosen: each gets as many tokens as any other",
    )


def balanced(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def route(logits: torch.Tensor, topk: int, *args: Any, **kwargs: Any) -> Any:
        probs, chosen, *rest = original(logits, topk, *args, **kwargs)
        return (probs, balanced_map(chosen.shape[0], chosen.shape[1], topk), *rest)

    return route


def balanced_map(num_tokens: int, num_experts: int, topk: int) -> torch.Tensor:
    """Return the experts of each token, so that all experts get equally many."""
    places = torch.arange(num_tokens * topk, dtype=torch.int64)
    chosen = torch.zeros(num_tokens, num_experts, dtype=torch.bool)
    chosen[places // topk, places % num_experts] = True
    return chosen


def _discarding_rows(hollow: HollowTensors) -> Iterator[Patch]:
    why = "no operator tells that it resizes the storages of its outputs"
    for name, wrapper in (("discard_output_and_register_recompute", _wrap_discard), ("_recompute", _wrap_recompute)):
        yield Patch(target=f"{_DISCARDING}.{name}", wrapper=functools.partial(wrapper, hollow.allocated), why=why)


def _wrap_discard(allocated: AllocatedBytes, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def discard(self: Any, hook_tensor: torch.Tensor) -> None:
        original(self, hook_tensor)
        for output in self.outputs:
            allocated.note(output.untyped_storage())

    return discard


def _wrap_recompute(allocated: AllocatedBytes, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def recompute(self: Any, grad: torch.Tensor) -> None:
        outputs, context = self.outputs, self.ctx
        original(self, grad)
        for output, again in zip(outputs or (), () if context is None else context.outputs, strict=True):
            if output.data_ptr() != again.data_ptr():  # up to 0.17 it is a copy
                allocated.note(output.untyped_storage())

    return recompute


def _fused_rows(hollow: HollowTensors) -> Iterator[Patch]:
    """Yield rows that run each function of the fusions as the one kernel that it is compiled to."""
    folder = importlib.import_module("megatron.core.fusions")
    for found in pkgutil.iter_modules(folder.__path__):
        module = _imported(f"megatron.core.fusions.{found.name}")
        for name, value in list(vars(module).items()) if module else ():
            if (function := getattr(value, _COMPILED, None)) is not None:
                yield Patch(
                    target=f"{module.__name__}:{name}",
                    wrapper=functools.partial(_instead, hollow.fused(function)),
                    why="compilers do not see hollow tensors; the kernel that they make allocates its results only",
                )


def _imported(name: str) -> Any:
    try:
        module: ModuleType = importlib.import_module(name)
    except ImportError:  # it needs a package of GPUs
        return None
    return module


def _instead(replacement: Any, original: Any) -> Any:
    return replacement
