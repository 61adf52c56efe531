# SPDX-License-Identifier: Apache-2.0
"""A backward behind the forward of another chunk finds that forward's copy-outs released."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_patches import apply
from offload_engine import OffloadConfig
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.parity import Case, actions
from tests.dist.streams import adversarial_device
from tests.dist.tiny import engine_of, forward_step, make_chunks, make_config, run
from tests.engine_state import is_in_backward

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
    with adversarial_device(None) as device, apply(OffloadConfig(min_tensor_bytes=1), modules=case.names) as handle:

        def step(batches: Iterator[torch.Tensor], model: torch.nn.Module, *more: Any) -> Any:
            output, loss = forward_step(batches, model, *more)
            chunk = engine_of(handle).current_chunk
            assert chunk is not None and chunk.groups.progress.is_forward_done, (
                "else the last of a step, and what is behind it, comes back late"
            )
            output.register_hook(lambda grad: left.append(len(engine_of(handle).snapshot().leaving)))
            return output, loss

        run(make_chunks(make_config(case.kind, **case.settings)), NUM_MICROBATCHES, forward_step=step)
        assert device.hazards == []
    order = actions(case, NUM_MICROBATCHES)
    backwards = [(before, action) for before, action in zip(order, order[1:], strict=False) if action.kind == "B"]
    assert len(backwards) == len(left)
    return [
        number
        for number, (before, action) in zip(left, backwards, strict=True)
        if before.kind == "F" and before.chunk != action.chunk
    ]


@pytest.mark.parametrize("shape", [Pipeline(1), Pipeline(2)], ids=str)
@on_ranks()
def test_copies_are_in_flight_up_to_the_head_and_come_back_behind_the_loss(shape: Pipeline) -> None:
    found: list[dict[str, bool]] = []  # of each microbatch: what is in flight, what does the engine know in backward?
    with adversarial_device(None), apply(OffloadConfig(min_tensor_bytes=1), modules=BEFORE_THE_LAST_MLP) as handle:
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
            output, loss = forward_step(*arguments)
            if chunks[0].post_process:
                found[-1]["behind"] = is_in_flight()
            return output, loss

        if chunks[0].post_process:  # on the last stage
            chunks[0].output_layer.register_forward_pre_hook(before_head)
            chunks[0].decoder.final_layernorm.register_forward_hook(in_backward)
        run(chunks, NUM_MICROBATCHES, forward_step=looking)
    assert len(found) == (NUM_MICROBATCHES if chunks[0].post_process else 0)
    assert all(seen == {"before": True, "behind": False, "in backward": True} for seen in found), found
