# SPDX-License-Identifier: Apache-2.0
"""What bypasses the engine, with TransformerEngine's kernels on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from offload_engine import IS_COMPILED
from tests.gpu.ranks import GpuRanks

pytestmark = pytest.mark.skipif(IS_COMPILED, reason="counts by replacing methods, which compiled classes refuse")


@pytest.mark.parametrize(
    "settings", [{}, {"num_moe_experts": 4}, {"qk_layernorm": True}], ids=["dense", "experts", "norms of query and key"]
)
def test_tensors_that_bypass_the_engine_are_in_no_group(
    settings: dict[str, Any], ranks_of: Callable[[int], GpuRanks]
) -> None:
    (num_passed,) = ranks_of(1).run(_count_passing, settings)
    assert num_passed > 0


def _count_passing(settings: dict[str, Any]) -> int:
    from tests.dist.test_bypass import num_passing
    from tests.gpu.small_gpt import make_chunks, make_config, run

    return num_passing(lambda offload: run(make_chunks(make_config(**settings, **offload)), 2))


# -- of what the linear layer of all experts saves, the engine packs the input alone; quantised, all -------------------

NUM_EXPERTS = 4


@pytest.mark.parametrize("settings", [{}, {"fp8": "hybrid", "fp8_recipe": "tensorwise"}], ids=["", "in FP8"])
def test_the_input_alone_goes_through_hooks(settings: dict[str, str], ranks_of: Callable[[int], GpuRanks]) -> None:
    ((num_groups, num_calls, are_as_before),) = ranks_of(1).run(_count, settings)
    assert num_groups > 0 and are_as_before
    assert num_calls >= NUM_EXPERTS * num_groups if settings else num_calls == num_groups


def _count(settings: dict[str, Any]) -> tuple[int, int, bool]:
    """Groups, tensors packed in them, and whether the layers are as they were."""
    from megatron_patches import apply
    from megatron_patches._model.experts import linears_of_experts
    from offload_engine._saved.store import ActivationStore
    from tests.gpu.parity import RELEASED_AT_ONCE
    from tests.gpu.small_gpt import make_chunks, make_config, run

    pack, packed = ActivationStore.pack, list[bool]()

    def counting(store: ActivationStore, tensor: Any, group: Any) -> Any:
        packed.append(not group.is_ungrouped)
        return pack(store, tensor, group)

    chunks = make_chunks(make_config(num_moe_experts=NUM_EXPERTS, **settings))
    with apply(RELEASED_AT_ONCE, modules=["expert_fc1"]) as handle:
        with mock.patch.object(ActivationStore, "pack", counting):
            run(chunks, 2)
        assert handle.stats is not None and handle.stats.copied_out_bytes > 0
        num_groups = handle.stats.num_groups
    linears: list[Any] = [linear for chunk in chunks for linear in linears_of_experts(chunk)]
    return num_groups, sum(packed), not any(linear.save_original_input for linear in linears)
