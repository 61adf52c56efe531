# SPDX-License-Identifier: Apache-2.0
"""Offload under the all-to-all overlap: combined 1F1B, where nodes of two microbatches take turns inside a layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.pipeline_parallel.utils import ScheduleNode

from megatron_patches import apply
from megatron_patches._versions import installed_version, is_in_range
from tests.dist.launch import Pipeline, on_ranks, run_ranks
from tests.dist.models import LATENT
from tests.dist.parity import EXPERTS, SAVES_COPIES, Case, References, check_all, check_cases, run_with, run_without
from tests.dist.saved_storages import innermost_hooks
from tests.dist.settings import DEEP, GROUPED, OVERLAP, SHARED, leaves, selective
from tests.dist.streams import adversarial_device
from tests.dist.tiny import ALL, decoder_of, engine_of, make_chunks, make_config, run, step

SHAPES = [Pipeline(expert=2), DEEP]
MICROBATCHES = {1: [3, 1], 4: [2, 4]}  # by number of stages in all
ALONE = {1: [2], 4: [4]}
ATTENTION = ["layer_input", "attn_norm", "qkv_linear", "core_attn", "attn_proj", "self_attn"]
DENSE = ["mlp_fc1", "mlp_act", "mlp_fc2"]
SHARED_EXPERTS = ["shared_experts", "shared_fc1", "shared_fc2"]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_name_alone_and_all_together(shape: Pipeline) -> None:
    """In the pipeline, where stages change nothing about a name, those alone whose layers some chunks lack."""
    names = [*ATTENTION, "mlp_norm", *DENSE, *SHARED_EXPERTS, "router", "dispatched_tokens", "experts", *EXPERTS]
    alone = names if shape.size == 1 else ["mlp_fc1", "moe_act"]
    together = [_case("mixed", leaves(names)), _case("moe", [name for name in names if name not in DENSE])]
    _check([_case("mixed", [name]) for name in alone], together, shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_delayed_weight_gradients(shape: Pipeline) -> None:
    """What was copied in is read once more after autograd has dropped it."""
    delayed = {"delay_wgrad_compute": True}
    alone = ["qkv_linear", "attn_proj", *DENSE, "dispatched_tokens", *EXPERTS] if shape.size == 1 else []
    together = [
        _case("mixed", ["self_attn", "mlp_norm", *DENSE, "shared_experts", *EXPERTS], **delayed),
        _case("mixed", ["qkv_linear", "router", "dispatched_tokens", "experts"], **delayed),
    ]
    _check([_case("mixed", [name], **delayed) for name in alone], together, shape)


def _check(alone: list[Case], together: list[Case], shape: Pipeline) -> None:
    """Names alone see one number of microbatches: that these change is no matter of a single name."""
    numbers = [*([_microbatches(shape, ALONE)] * len(alone)), *[_microbatches(shape)] * len(together)]
    run_ranks(check_cases, [*alone, *together], numbers, pipeline=shape)


@on_ranks(SHAPES[0])
def test_linear_layers_of_the_tests_delay_and_compute_what_those_of_megatron_core_do() -> None:
    delayed, usual = (run_without(_case("mixed", [], delay_wgrad_compute=late), [4]) for late in (True, False))
    assert delayed == usual


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
    expected = run_without(case, [2])
    with adversarial_device(1) as device:
        (stats,) = run_with(case, [2], expected)
        assert device.hazards == []
    assert stats.num_viewed_storages == 0 and (stats.num_emptied_storages > 0) == SAVES_COPIES


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_selective_recomputation_and_early_release(shape: Pipeline) -> None:
    """Attention's backward may run before the experts' forward."""
    cases = [
        _case("mixed", ["core_attn", "router_fc1"], **selective("layernorm")),
        _case("mixed", ["self_attn", "router_fc1"], **selective("mlp", "shared_experts")),
        _case("moe", ["layer_input", "mlp_norm", "router"], **selective("core_attn")),
        _case("moe", ["layer_input", "self_attn", "router", *EXPERTS], ep_overlap_early_attn_memory_release=True),
    ]
    run_ranks(check_all, cases if shape.size == 1 else cases[1::2], _microbatches(shape, ALONE), pipeline=shape)


def test_latent_attention_and_grouped_experts() -> None:
    latents = ["mla_down_proj", "qk_norm", "mla_up_proj"]
    grouped = ["dispatched_tokens", "experts", *EXPERTS]
    model = {**LATENT, **GROUPED}
    run_ranks(check_all, [_case("moe", [name], **model) for name in (*latents, *grouped)], [2], pipeline=SHAPES[0])
    cases = [_case("mixed", ["layer_input", "core_attn", *latents, "mlp_act", *grouped], **model)]
    cases.append(_case("moe", ["self_attn", "router_fc1"], **model, **selective("mla_up_proj", "moe_act", "layernorm")))
    run_ranks(check_all, cases, [4], pipeline=SHAPES[1])


@on_ranks(SHAPES[1])
def test_multi_token_prediction() -> None:
    """Its layer is one more layer of the plan, whose input is one part of a tensor that is read again."""
    names = ["layer_input", "core_attn", "mlp_norm", "mtp_norm", "mtp_proj", "router_fc1"]
    case = _case("moe", names, mtp_num_layers=1)
    for stats in run_with(case, [2, 4], run_without(case, [2, 4]), is_evaluated=True):
        assert stats.num_viewed_storages == 0


@pytest.mark.skipif(
    is_in_range(installed_version(), "<0.17"),
    reason="0.16.1 frees the input of an only local expert that its backward needs, with or without offload: "
    "runs with 0.19.2",
)
def test_only_expert_of_a_rank_saves_the_received_tokens() -> None:
    run_ranks(check_all, [_case("moe", ["router_fc1"], num_moe_experts=2)], [3, 1], pipeline=SHAPES[0])


@on_ranks(SHAPES[0])
def test_the_step_after_one_that_raised() -> None:
    """In a forward node, between the nodes of another microbatch's backward.

    Without a pipeline: in one, what was sent to the stage that raised is still under way.
    """
    case = _case("moe", ["layer_input", "core_attn", "mlp_norm", "router_fc1", "moe_act"])
    (expected,) = run_without(case, [3])
    with apply(ALL, modules=case.names) as handle:
        chunks = make_chunks(make_config(case.kind, case.dtype, **case.settings), wrap=True)
        layer = decoder_of(chunks[-1]).layers[-1]
        for module in (layer.self_attention.linear_proj, layer.mlp.router):
            with _raising_in_second_call(module), pytest.raises(ArithmeticError):
                run(chunks, 3)
            torch.distributed.barrier()
            assert engine_of(handle).pool.num_leases == 0
            assert step(chunks, 3) == expected


@contextmanager
def _raising_in_second_call(module: torch.nn.Module) -> Iterator[None]:
    calls = []

    def hook(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise ArithmeticError("by the test")

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@on_ranks()
def test_every_copy_is_ordered_on_both_streams(shape: Pipeline) -> None:
    names = [
        "layer_input",
        "qkv_linear",
        "core_attn",
        "mlp_norm",
        *DENSE,
        "shared_fc2",
        "router",
        "dispatched_tokens",
        *EXPERTS,
    ]
    case, microbatches = _case("mixed", names, delay_wgrad_compute=True), _microbatches(shape)
    references = References()
    for seed, numbers in ((None, microbatches), (1, [max(microbatches)])):
        expected = references.of(case, numbers)
        with adversarial_device(seed) as device:
            counters = run_with(case, numbers, expected)
            assert device.hazards == []
            assert device.num_copies["out"] and device.num_copies["in"]
            assert all(stats.num_emptied_storages for stats in counters)


def _case(kind: str, names: list[str], **more: Any) -> Case:
    return Case(kind, names, torch.bfloat16, {**OVERLAP, **SHARED, **more}, wrap=True)


def _microbatches(shape: Pipeline, numbers: dict[int, list[int]] = MICROBATCHES) -> list[int]:
    return numbers[shape.size * (shape.virtual or 1)]
