"""Offload under the all-to-all overlap: combined 1F1B, where nodes of two microbatches take turns inside a layer."""

from __future__ import annotations

import gc
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402

from tests.dist.launch import Pipeline, run_ranks  # noqa: E402
from tests.dist.parity import EXPERTS, Case, check_all, run_with, run_without  # noqa: E402
from tests.dist.streams import adversarial_device  # noqa: E402

SHAPES = [Pipeline(expert=2), Pipeline(2, 2, expert=2)]
MICROBATCHES = {1: [3, 1, 6, 2], 4: [2, 8, 4]}  # by number of stages in all
ATTENTION = ["layer_input", "attn_norm", "qkv_linear", "core_attn", "attn_proj", "self_attn"]
DENSE = ["mlp_fc1", "mlp_act", "mlp_fc2"]
SETTINGS: dict[str, Any] = {
    "overlap_moe_expert_parallel_comm": True,
    "expert_model_parallel_size": 2,
    "moe_shared_expert_intermediate_size": 32,
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_name_alone_and_all_together(shape: Pipeline) -> None:
    names = [*ATTENTION, "mlp_norm", *DENSE, "shared_fc1", "shared_fc2", "shared_experts", "router", *EXPERTS]
    cases = [_case("mixed", [name]) for name in names]
    cases.append(_case("mixed", [name for name in names if name not in ("self_attn", "shared_experts")]))
    cases.append(_case("moe", [name for name in names if name not in DENSE]))
    run_ranks(check_all, cases, _microbatches(shape), pipeline=shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_delayed_weight_gradients(shape: Pipeline) -> None:
    """What was copied in is read once more after autograd has dropped it."""
    delayed = {"delay_wgrad_compute": True}
    cases = [_case("mixed", [name], **delayed) for name in ("qkv_linear", "attn_proj", *DENSE, *EXPERTS)]
    cases.append(_case("mixed", ["self_attn", "mlp_norm", *DENSE, "shared_experts", *EXPERTS], **delayed))
    run_ranks(check_all, cases, _microbatches(shape)[:3], pipeline=shape)
    run_ranks(_check_delay, pipeline=shape)


def _check_delay() -> None:
    """The linear layers of the test do delay, and compute what the ones of megatron-core do."""
    cases = [_case("mixed", [], delay_wgrad_compute=is_delayed) for is_delayed in (True, False)]
    delayed, usual = (run_without(case, [4]) for case in cases)
    assert delayed == usual


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_the_schedule_holds_is_emptied(shape: Pipeline) -> None:
    """Inputs of nodes: of attention, of dense MLPs, and of the residual connection around experts."""
    run_ranks(_check_emptied, MICROBATCHES[4], pipeline=shape)


def _check_emptied(microbatches: list[int]) -> None:
    for kind, name in (("moe", "layer_input"), ("mixed", "attn_norm"), ("moe", "mlp_norm"), ("mixed", "mlp_norm")):
        case = _case(kind, [name])
        for stats in run_with(case, microbatches, run_without(case, microbatches)):
            assert stats.num_viewed_storages == 0, (case, stats)
            # The residual of a step's last layer with experts is told to nobody: no plan follows.
            num_told = stats.num_offloaded_groups - (name == "mlp_norm")
            assert num_told <= stats.num_emptied_storages <= stats.num_offloaded_groups, (case, stats)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_selective_recomputation_and_early_release(shape: Pipeline) -> None:
    """Attention's backward may run before the experts' forward."""
    selective = {"recompute_granularity": "selective"}
    early = {"ep_overlap_early_attn_memory_release": True}
    cases = [
        _case("mixed", ["core_attn", "router_fc1"], **selective, recompute_modules=["layernorm"]),
        _case("mixed", ["self_attn", "router_fc1"], **selective, recompute_modules=["mlp", "shared_experts"]),
        _case("moe", ["layer_input", "mlp_norm", "router"], **selective, recompute_modules=["core_attn"]),
        _case("moe", ["layer_input", "self_attn", "router", *EXPERTS], **early),
    ]
    run_ranks(check_all, cases, _microbatches(shape)[:3], pipeline=shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_copy_is_ordered_on_both_streams(shape: Pipeline) -> None:
    run_ranks(_check_order, _microbatches(shape)[:2], pipeline=shape)


def _check_order(microbatches: list[int]) -> None:
    gc.disable()
    names = ["layer_input", "qkv_linear", "core_attn", "mlp_norm", *DENSE, "shared_fc2", "router", *EXPERTS]
    case = _case("mixed", names, delay_wgrad_compute=True)
    expected = run_without(case, microbatches)
    for seed in (None, 1, 2):
        with adversarial_device(seed) as device:
            counters = run_with(case, microbatches, expected)
            assert device.hazards == []
            assert device.num_copies["out"] and device.num_copies["in"]
            assert all(stats.num_emptied_storages for stats in counters)


def _case(kind: str, names: list[str], **more: Any) -> Case:
    return Case(kind, names, torch.bfloat16, {**SETTINGS, **more}, wrap=True)


def _microbatches(shape: Pipeline) -> list[int]:
    return MICROBATCHES[shape.size * (shape.virtual or 1)]
