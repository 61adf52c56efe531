# SPDX-License-Identifier: Apache-2.0
"""When copies leave and come back under megatron-core's schedules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_patches import apply
from offload_engine import FixedBounds
from offload_engine.planning.plan import format_plan
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.parity import Case, actions, run_without
from tests.dist.settings import DEEP, OVERLAP, selective
from tests.dist.streams import adversarial_device
from tests.dist.tiny import ALL, check_bits, engine_of, forward_step, make_chunks, make_config, run, stats_of, step
from tests.engine_state import is_in_backward
from tests.lookups import present

NUM_MICROBATCHES = 4
BEFORE_THE_LAST_MLP = ["qkv_linear", "core_attn", "attn_proj", "mlp_norm"]


@pytest.mark.parametrize("shape", [Pipeline(2), Pipeline(2, 2)], ids=str)
@on_ranks()
def test_only_copy_outs_of_the_last_mlp_are_unreleased(shape: Pipeline) -> None:
    settings = {"num_layers": 2 * shape.size * (shape.virtual or 1)}
    cases = [
        (Case("dense", BEFORE_THE_LAST_MLP, settings=settings), {0}),
        (Case("moe", BEFORE_THE_LAST_MLP, settings=settings), {0}),
        (Case("dense", ["mlp_fc2"], settings=settings), {1}),
    ]
    if shape.virtual:  # a chunk of one layer waits for none of its copies
        cases.append((Case("dense", ["qkv_linear"], settings={"num_layers": 4}), {1, 2}))
    for case, num_left in cases:
        left = _groups_left(case)
        assert left or torch.distributed.get_rank(), "on the first rank no backward comes at once"
        assert set(left) <= num_left, (case, left)


def _groups_left(case: Case) -> list[int]:
    """Groups not released yet at each backward behind the forward of another chunk; a copy is done once waited for."""
    left: list[int] = []
    with adversarial_device(None) as device, apply(ALL, modules=case.names) as handle:

        def step(batches: Iterator[torch.Tensor], model: torch.nn.Module, *more: Any) -> Any:
            output, loss = forward_step(batches, model, *more)
            # Else the last of a step, and what is behind it, comes back late.
            assert present(engine_of(handle).current_chunk).groups.progress.is_forward_done
            output.register_hook(lambda grad: left.append(len(engine_of(handle).snapshot().leaving)))
            return output, loss

        run(make_chunks(make_config(case.kind, **case.settings)), NUM_MICROBATCHES, forward_step=step)
        assert device.hazards == []
    order = actions(case, NUM_MICROBATCHES)
    pairs = [pair for pair in zip(order, order[1:], strict=False) if pair[1].kind == "B"]
    return [
        number
        for number, (before, action) in zip(left, pairs, strict=True)
        if before.kind == "F" and before.chunk != action.chunk
    ]


@pytest.mark.parametrize("shape", [Pipeline(1), Pipeline(2)], ids=str)
@on_ranks()
def test_copies_are_in_flight_up_to_the_head_and_come_back_behind_the_loss(shape: Pipeline) -> None:
    found: list[dict[str, bool]] = []  # of each microbatch: what is in flight, what does the engine know in backward?
    with adversarial_device(None), apply(ALL, modules=BEFORE_THE_LAST_MLP) as handle:
        chunks: Any = make_chunks(make_config(num_layers=2 * shape.size))

        def is_in_flight() -> bool:
            return bool(engine_of(handle).snapshot().leaving)

        def before_head(module: torch.nn.Module, args: Any) -> None:
            found.append({"before": is_in_flight()})

        def in_backward(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
            engine: Any = engine_of(handle)
            seen, chunk, window = len(found), engine.current_chunk.key, engine._executor.policy._window
            output.register_hook(lambda grad: found[seen].update({"in backward": is_in_backward(window, chunk)}))

        def looking(*arguments: Any) -> Any:
            result = forward_step(*arguments)
            if found:
                found[-1]["behind"] = is_in_flight()
            return result

        if chunks[0].post_process:  # on the last stage
            chunks[0].output_layer.register_forward_pre_hook(before_head)
            chunks[0].decoder.final_layernorm.register_forward_hook(in_backward)
        run(chunks, NUM_MICROBATCHES, forward_step=looking)
    assert len(found) == (NUM_MICROBATCHES if chunks[0].post_process else 0)
    assert all(seen == {"before": True, "behind": False, "in backward": True} for seen in found), found


# -- while a layer's dispatcher waits for the device, nothing that the layer has saved is copied out -------------------

GENEROUS = ALL.replace(policy=FixedBounds(max_inflight_bytes=1 << 30))


WAITING: list[tuple[str, dict[str, Any], list[str]]] = [
    ("mixed", {}, [*BEFORE_THE_LAST_MLP, "router"]),
    ("moe", {"moe_token_dispatcher_type": "allgather"}, [*BEFORE_THE_LAST_MLP, "router"]),
    ("moe", selective("moe"), BEFORE_THE_LAST_MLP),
    ("moe", {}, ["core_attn", "dispatched_tokens"]),  # groups in front of the experts
]


@pytest.mark.parametrize("row", range(4))
@on_ranks()
def test_copies_begin_behind_the_experts(row: int) -> None:
    """A dense layer waits for nothing."""
    kind, settings, names = WAITING[row]
    copied: list[int] = []  # out, in front of each layer, at its MLP or its experts, and behind its MLP
    with apply(GENEROUS, modules=names) as handle:
        (model,) = make_chunks(make_config(kind, **settings))
        run([model], 1)  # makes the engine

        def note(*_: Any) -> None:
            if torch.is_grad_enabled():
                copied.append(stats_of(handle).copied_out_bytes)

        layers: Any = model.decoder.layers
        for layer in layers:
            layer.register_forward_pre_hook(note)
            inner = layer.mlp.experts if "dispatched_tokens" in names else layer.mlp
            inner.register_forward_pre_hook(note)
            layer.mlp.register_forward_hook(note)
        run([model], 1)
    has_experts = [hasattr(layer.mlp, "experts") for layer in layers]
    of_layers = zip(has_experts, copied[0::3], copied[1::3], copied[2::3], strict=True)
    for waits, before, at_its_mlp, behind_its_mlp in list(of_layers)[:-1]:  # the last layer's groups stay
        assert (before == at_its_mlp) == waits and (not waits or at_its_mlp < behind_its_mlp), copied


# -- planned steps, with a plan from the second step on ----------------------------------------------------------------

OF_PLANS = ["qkv_linear", "core_attn", "attn_proj"]
MICROBATCHES = [2, 2, 4, 2]


@pytest.mark.parametrize(
    ("shape", "kind"), [(Pipeline(2), "dense"), (Pipeline(2), "moe"), (Pipeline(2, 2), "dense"), (DEEP, "moe")], ids=str
)
@on_ranks()
def test_planned_steps_are_equal_to_the_last_bit(shape: Pipeline, kind: str, tmp_path: Path) -> None:
    """Under 1F1B within a budget, and under the overlap."""
    more, resident_bytes = OVERLAP if shape == DEEP else {}, None if shape.virtual else 40_000
    names = OF_PLANS if kind == "dense" else [*OF_PLANS, "expert_fc1"]
    dtype = torch.bfloat16 if more else torch.float32  # the overlap takes no other
    expected = run_without(Case(kind, names, dtype, more), MICROBATCHES)
    offload = {"offload_activation": True, "offload_modules": names, "offload_planned": True}
    offload.update(offload_resident_bytes=resident_bytes, offload_trace=f"{tmp_path}/step.json")
    with apply(ALL) as handle:
        chunks = make_chunks(make_config(kind, dtype, **more, **offload))
        plans = []
        for n, wanted in zip(MICROBATCHES, expected, strict=True):
            check_bits(wanted, step(chunks, n), n)
            assert stats_of(handle).num_storages_left == 0
            plans.append(engine_of(handle).plan)
            # Routing makes groups larger from step to step.
            assert kind != "dense" or stats_of(handle).num_unplanned_groups == 0
        assert plans[0] is None and all(plans[1:])
        assert "OUT" in format_plan(present(plans[1])) or resident_bytes is not None
        assert kind != "dense" or plans[3] is plans[1]
    torch.distributed.barrier()
    assert len(list(tmp_path.iterdir())) == shape.num_ranks, "each rank records its second step"
