# SPDX-License-Identifier: Apache-2.0
"""Tokens on their way to experts: the all-to-all overlap, and the flex dispatcher. What parity alone does not show.

Under the overlap nodes of two microbatches take turns inside a layer. DeepEP's part of the flex dispatcher is done over
gloo, without kernels; megatron-core's own functions for autograd run around it, with what they keep for their backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.utils import ScheduleNode
from megatron.core.transformer.moe import fused_a2a, token_dispatcher

from megatron_patches import apply
from megatron_patches._rows.runtime import unwrap
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.models import LATENT
from tests.dist.parity import EXPERTS, SAVES_COPIES, Case, References, run_ordered, run_with, run_without
from tests.dist.settings import DEEP, ON_TWO_RANKS, OVERLAP, SHARED, selective
from tests.dist.tiny import ALL, decoder_of, engine_of, innermost_hooks, make_chunks, make_config, run, step

SHAPES = [Pipeline(expert=2), DEEP]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@on_ranks()
def test_no_group_is_entered_while_the_backward_of_another_chunk_runs(shape: Pipeline) -> None:
    """`dispatched_tokens` begins in one node and ends in another: what is recomputed in between is not its."""
    packs: list[bool] = []  # in front of each backward node with offload: whether something packs what is saved
    backward = ScheduleNode.backward

    def note_hooks(self: Any, *args: Any) -> Any:
        packs.append(innermost_hooks(True) is not None)
        return backward(self, *args)

    case = _case("moe", ["dispatched_tokens", "attn_proj"], **selective("core_attn"))
    expected = run_without(case, [4])
    with mock.patch.object(ScheduleNode, "backward", note_hooks):
        run_with(case, [4], expected)
    assert packs and not any(packs)


@pytest.mark.compat
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@on_ranks()
def test_storages_held_by_the_schedule_are_emptied(shape: Pipeline) -> None:
    """Inputs of nodes: of attention, of dense MLPs, and of the residual connection around experts."""
    references = References()
    for kind, name in (("moe", "layer_input"), ("mixed", "attn_norm"), ("moe", "mlp_norm"), ("mixed", "mlp_norm")):
        case = _case(kind, [name])
        for stats in run_with(case, [2, 4], references.of(case, [2, 4])):
            assert stats.num_viewed_storages == 0, (case, stats)
            # The residual of a step's last layer with experts is not declared: no plan follows.
            num_told = stats.num_offloaded_groups - (name == "mlp_norm")
            assert num_told <= stats.num_emptied_storages <= stats.num_offloaded_groups, (case, stats)


@on_ranks(SHAPES[0])
def test_inputs_of_recomputed_attention_are_emptied() -> None:
    """Latents, of which `CheckpointWithoutOutput` has saved detached leaves."""
    case = _case("moe", ["self_attn"], **LATENT, num_layers=2, **selective("mla_up_proj"))
    (stats,) = run_ordered(case, [2])
    assert stats.num_viewed_storages == 0 and (stats.num_emptied_storages > 0) == SAVES_COPIES


@on_ranks(SHAPES[0])
def test_the_step_after_one_that_raised() -> None:
    """In a forward node, between the nodes of another microbatch's backward.

    Without a pipeline: in one, what was sent to the stage that raised is still under way.
    """
    case = _case("moe", ["layer_input", "core_attn", "mlp_norm", "router_fc1", "moe_act"])
    (expected,) = run_without(case, [3])
    with apply(ALL, modules=case.names) as handle:
        chunks = make_chunks(make_config(case.kind, case.dtype, **case.settings), wrap=True)
        layer, declared = decoder_of(chunks[-1]).layers[-1], list[int]()
        head: Any = unwrap(chunks[-1]).output_layer
        for module in (layer.self_attention.linear_proj, layer.mlp.router, head):
            hook = module.register_forward_hook(mock.Mock(side_effect=[None, ArithmeticError("in the second call")]))
            with pytest.raises(ArithmeticError) as _:  # whose frames hold residuals
                run(chunks, 3)
            hook.remove()
            torch.distributed.barrier()
            engine = engine_of(handle)
            assert engine.pool.num_leases == 0
            with mock.patch.object(engine, "held_elsewhere", wraps=engine.held_elsewhere) as held_elsewhere:
                assert step(chunks, 3) == expected
            declared.append(held_elsewhere.call_count)
        assert len(set(declared)) == 1, f"{declared}: the last of a step that raised came in the next one"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@on_ranks()
def test_every_copy_is_ordered_on_both_streams(shape: Pipeline) -> None:
    names = ["layer_input", "qkv_linear", "core_attn", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2", "shared_fc2"]
    names += ["router", "dispatched_tokens", *EXPERTS]
    case, microbatches = _case("mixed", names, delay_wgrad_compute=True), [3, 1] if shape.size == 1 else [2, 4]
    for seed, numbers in ((None, microbatches), (1, [max(microbatches)])):
        for stats in run_ordered(case, numbers, seed):
            assert stats.copied_in_bytes and stats.num_emptied_storages


def _case(kind: str, names: list[str], **more: Any) -> Case:
    return Case(kind, names, torch.bfloat16, {**OVERLAP, **SHARED, **more}, wrap=True)


# -- the flex dispatcher -----------------------------------------------------------------------------------------------


@contextmanager
def deep_ep_over_gloo() -> Iterator[None]:
    """Put the stand-in where megatron-core looks for DeepEP."""
    functions = {"fused_dispatch": fused_a2a.FusedDispatch, "fused_combine": fused_a2a.FusedCombine}
    found: dict[str, Any] = {name: _applied(function) for name, function in functions.items()}
    events: dict[str, Any] = {"EventHandle": mock.Mock(), "EventOverlap": mock.Mock()}
    with (
        torch.compiler.set_stance("force_eager"),  # to compile the dispatcher takes longer than all steps
        mock.patch.multiple(fused_a2a, create=True, get_buffer=lambda group, hidden_bytes: Buffer(group), **events),
        mock.patch.multiple(token_dispatcher, set_deepep_num_sms=lambda number: None, **found),
    ):
        yield


Routes = tuple[torch.Tensor, int]
"""Which of the tokens of all ranks were dispatched to this one, and how many tokens all ranks have."""


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
        topk_idx: Any = None,
        topk_weights: Any = None,
        num_tokens_per_expert: Any = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        """Along new routes, or, with a handle, along those of an earlier call."""
        if handle is not None:
            return self._of_all(tokens)[handle[0]], None, None, None, None, mock.Mock()
        num_local = num_tokens_per_expert.numel() // self._group.size()
        indices = self._of_all(topk_idx) - self._group.rank() * num_local
        is_local = (indices >= 0) & (indices < num_local)
        rows = is_local.any(dim=1).nonzero().flatten()
        weights = self._of_all(topk_weights).where(is_local, 0.0)[rows]
        counts = torch.bincount(indices[is_local], minlength=num_local).tolist()
        routes = rows, len(indices)
        return self._of_all(tokens)[rows], indices.where(is_local, -1)[rows], weights, counts, routes, mock.Mock()

    def combine(
        self, tokens: torch.Tensor, handle: Routes, topk_weights: torch.Tensor | None = None, **_: Any
    ) -> tuple[Any, ...]:
        weights = None if topk_weights is None else self._sum(topk_weights, handle)
        return self._sum(tokens, handle), weights, mock.Mock()

    def _of_all(self, part: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(part) for _ in range(self._group.size())]
        dist.all_gather(parts, part.contiguous(), group=self._group)
        return torch.cat(parts)

    def _sum(self, part: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Return what all ranks return for the tokens of this one."""
        rows, num_tokens = routes
        total = part.new_zeros(num_tokens, *part.shape[1:], dtype=torch.float32)
        total[rows] = part.float()
        dist.all_reduce(total, group=self._group)
        return total.chunk(self._group.size())[self._group.rank()].to(part.dtype)


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


@pytest.mark.compat
@pytest.mark.parametrize("shape", SHAPES, ids=["alone", "pipeline, overlap"])
@on_ranks(timeout_s=240)
def test_flex_dispatcher(shape: Pipeline) -> None:
    """With the permuted tokens goes what the dispatcher keeps of its permutation."""
    if shape == DEEP:
        cases = [Case("moe", names, torch.bfloat16, {**FLEX, **OVERLAP}, wrap=True) for names in EACH]
    else:
        cases = [Case("moe", names, settings=FLEX) for names in (*EACH, ["router"], ["experts"])]
        cases.append(Case("mixed", EACH[-1], torch.bfloat16, FLEX, wrap=True))
    microbatches, references = [4] if shape == DEEP else [3, 2], References()
    with deep_ep_over_gloo():
        tokens, dispatched, total, *_ = (
            run_with(case, microbatches, references.of(case, microbatches))[-1].copied_out_bytes for case in cases
        )
    assert 0 < tokens < dispatched < total
