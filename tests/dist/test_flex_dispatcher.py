# SPDX-License-Identifier: Apache-2.0
"""Offload with the flex dispatcher: the same bits.

DeepEP's part is done over gloo: no kernels, and the same tokens on the same ranks. Megatron-core's own functions for
autograd run around it, with what they keep for their backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.moe import fused_a2a, token_dispatcher

from tests.dist.launch import Pipeline, on_ranks, run_ranks
from tests.dist.parity import Case, References, run_with, run_without
from tests.dist.settings import DEEP, ON_TWO_RANKS, OVERLAP


@contextmanager
def deep_ep_over_gloo() -> Iterator[None]:
    """Put the stand-in where megatron-core looks for DeepEP."""
    found: dict[str, Any] = {
        "fused_dispatch": _applied(fused_a2a.FusedDispatch),
        "fused_combine": _applied(fused_a2a.FusedCombine),
    }
    events: dict[str, Any] = {"EventHandle": _Event, "EventOverlap": _Event}
    with (
        torch.compiler.set_stance("force_eager"),  # to compile the dispatcher takes longer than all steps
        mock.patch.multiple(fused_a2a, create=True, get_buffer=lambda group, hidden_bytes: Buffer(group), **events),
        mock.patch.multiple(token_dispatcher, set_deepep_num_sms=lambda number: None, **found),
    ):
        yield


class Routes(NamedTuple):
    """Which of the tokens of all ranks were dispatched to this one."""

    rows: torch.Tensor
    num_tokens: int


class Buffer:
    """In place of `deep_ep.Buffer`, whose options for streams have no meaning here."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def get_dispatch_layout(self, indices: torch.Tensor, num_experts: int, **_: Any) -> tuple[Any, ...]:
        num_tokens_per_expert = torch.bincount(indices.flatten(), minlength=num_experts)
        return None, None, num_tokens_per_expert, None, None

    def dispatch(
        self,
        tokens: torch.Tensor,
        handle: Routes | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Along new routes, or, with a handle, along those of an earlier call."""
        if handle is not None:
            return self._of_all(tokens)[handle.rows], None, None, None, None, _Event()
        assert topk_idx is not None and topk_weights is not None and num_tokens_per_expert is not None
        num_local = num_tokens_per_expert.numel() // self._group.size()
        indices = self._of_all(topk_idx) - self._group.rank() * num_local
        is_local = (indices >= 0) & (indices < num_local)
        routes = Routes(is_local.any(dim=1).nonzero().flatten(), len(indices))
        weights = self._of_all(topk_weights).where(is_local, 0.0)[routes.rows]
        counts = torch.bincount(indices[is_local], minlength=num_local).tolist()
        indices = indices.where(is_local, -1)[routes.rows]
        return self._of_all(tokens)[routes.rows], indices, weights, counts, routes, _Event()

    def combine(
        self, tokens: torch.Tensor, handle: Routes, topk_weights: torch.Tensor | None = None, **_: Any
    ) -> tuple[Any, ...]:
        weights = None if topk_weights is None else self._sum(topk_weights, handle)
        return self._sum(tokens, handle), weights, _Event()

    def _of_all(self, part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(self._group.size())]
        dist.all_gather(parts, part.contiguous(), group=self._group)
        return torch.cat(parts)

    def _sum(self, part: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Return what all ranks return for the tokens of this one."""
        total = part.new_zeros(routes.num_tokens, *part.shape[1:], dtype=torch.float32)
        total[routes.rows] = part.float()
        dist.all_reduce(total, group=self._group)
        return total.chunk(self._group.size())[self._group.rank()].to(part.dtype)


class _Event:
    def __init__(self, *_: Any) -> None: ...

    def current_stream_wait(self) -> None: ...


def _applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    def apply(
        tokens: torch.Tensor, *args: Any, async_finish: bool = False, allocate_on_comm_stream: bool = False
    ) -> Any:
        return function.apply(tokens.contiguous(), *args, async_finish, allocate_on_comm_stream)

    return apply


FLEX: dict[str, Any] = {**ON_TWO_RANKS, "moe_token_dispatcher_type": "flex", "moe_router_dtype": "fp32"}
EACH = [
    ["router_fc1"],
    ["dispatched_tokens"],
    ["layer_input", "core_attn", "mlp_norm", "router", "dispatched_tokens", "moe_act", "router_fc2"],
]


def test_without_a_pipeline() -> None:
    cases = [Case("moe", names, settings=FLEX) for names in (*EACH, ["router"], ["experts"])]
    cases.append(Case("mixed", EACH[-1], torch.bfloat16, FLEX, wrap=True))
    _check_what_moves(run_ranks(_copied_bytes, cases, [3, 2], pipeline=Pipeline(expert=2)))


def test_under_the_overlap_in_a_pipeline() -> None:
    cases = [Case("moe", names, torch.bfloat16, {**FLEX, **OVERLAP}, wrap=True) for names in EACH]
    _check_what_moves(run_ranks(_copied_bytes, cases, [4], pipeline=DEEP))


def _check_what_moves(copied: list[list[int]]) -> None:
    """With the permuted tokens goes what the dispatcher keeps of its permutation."""
    assert all(0 < tokens < dispatched < total for tokens, dispatched, total, *_ in copied), copied


def _copied_bytes(cases: list[Case], microbatches: list[int]) -> list[int]:
    """Of the last step of each case."""
    references = References()
    with deep_ep_over_gloo():
        steps = [
            run_with(case, microbatches, references.of(case, microbatches), is_evaluated=case is cases[0])
            for case in cases
        ]
    return [counters[-1].copied_out_bytes for counters in steps]


@on_ranks(Pipeline(expert=2))
def test_the_stand_in_computes_what_the_alltoall_dispatcher_does() -> None:
    flex = Case("moe", [], settings=FLEX)
    alltoall = Case("moe", [], settings={**FLEX, "moe_token_dispatcher_type": "alltoall"})
    with deep_ep_over_gloo():
        assert run_without(flex, [2]) == run_without(alltoall, [2])
