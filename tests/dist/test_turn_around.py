"""Where a backward begins behind the forward of another chunk: what that forward copied out has left by then."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402

from megatron_patches import apply  # noqa: E402
from offload_engine import OffloadConfig  # noqa: E402
from tests.dist.launch import Pipeline, run_ranks  # noqa: E402
from tests.dist.parity import Case, actions  # noqa: E402
from tests.dist.streams import adversarial_device  # noqa: E402
from tests.dist.tiny import forward_step, make_chunks, make_config, run  # noqa: E402

NUM_MICROBATCHES = 4
BEFORE_THE_LAST_MLP = ["qkv_linear", "core_attn", "attn_proj", "mlp_norm"]


@pytest.mark.parametrize("shape", [Pipeline(2), Pipeline(2, 2)], ids=str)
def test_only_what_the_last_mlp_has_copied_out_is_left(shape: Pipeline) -> None:
    settings = {"num_layers": 2 * shape.size * (shape.virtual or 1)}
    cases = [
        (Case("dense", BEFORE_THE_LAST_MLP, settings=settings), 0),
        (Case("moe", BEFORE_THE_LAST_MLP, settings=settings), 0),
        (Case("dense", ["mlp_fc2"], settings=settings), 1),
    ]
    for case, num_left in cases:
        found = run_ranks(_groups_left, case, pipeline=shape)
        assert found[0], "on the first rank no backward comes at once"
        for left in found:
            assert set(left) <= {num_left}, (case, found)


def test_a_chunk_of_one_layer_waits_for_none_of_its_copies() -> None:
    found = run_ranks(_groups_left, Case("dense", ["qkv_linear"], settings={"num_layers": 4}), pipeline=Pipeline(2, 2))
    assert found[0] and all(number > 0 for left in found for number in left), found


def _groups_left(case: Case) -> list[int]:
    """Groups not released yet at each backward behind the forward of another chunk; a copy is done once waited for."""
    gc.disable()
    left: list[int] = []
    with adversarial_device(None) as device, apply(OffloadConfig(min_tensor_bytes=1), modules=case.names) as handle:

        def step(batches: Iterator[torch.Tensor], model: torch.nn.Module, *more: Any) -> Any:
            output, loss = forward_step(batches, model, *more)
            chunk = handle.engine.current_chunk
            assert chunk.chunk_groups.is_forward_done, "else the last of a step, and what is behind it, comes back late"
            output.register_hook(lambda grad: left.append(len(handle.engine._mover.releases._queue)))
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
