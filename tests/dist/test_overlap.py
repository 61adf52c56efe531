# SPDX-License-Identifier: Apache-2.0
"""The all-to-all overlap, where nodes of two microbatches take turns inside a layer: what parity does not show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.pipeline_parallel.utils import ScheduleNode

from megatron_patches import apply
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.models import LATENT
from tests.dist.parity import EXPERTS, SAVES_COPIES, Case, References, run_with, run_without
from tests.dist.saved_storages import innermost_hooks
from tests.dist.settings import DEEP, OVERLAP, SHARED, selective
from tests.dist.streams import adversarial_device
from tests.dist.tiny import ALL, decoder_of, engine_of, make_chunks, make_config, run, step

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


@on_ranks(SHAPES[1])
def test_multi_token_prediction() -> None:
    """Its layer is one more layer of the plan, whose input is one part of a tensor that is read again."""
    names = ["layer_input", "core_attn", "mlp_norm", "mtp_norm", "mtp_proj", "router_fc1"]
    case = _case("moe", names, mtp_num_layers=1)
    for stats in run_with(case, [2, 4], run_without(case, [2, 4]), is_evaluated=True):
        assert stats.num_viewed_storages == 0


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
    names = ["layer_input", "qkv_linear", "core_attn", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2", "shared_fc2"]
    names += ["router", "dispatched_tokens", *EXPERTS]
    case, microbatches = _case("mixed", names, delay_wgrad_compute=True), [3, 1] if shape.size == 1 else [2, 4]
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
