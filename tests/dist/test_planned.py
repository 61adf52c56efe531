# SPDX-License-Identifier: Apache-2.0
"""Planned steps under megatron-core's schedules: equal to the last bit, with a plan from the second step on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_patches import apply
from offload_engine.planning.plan import format_plan
from tests.dist.launch import Pipeline, run_ranks
from tests.dist.parity import Case, run_without
from tests.dist.settings import DEEP, OVERLAP
from tests.dist.tiny import ALL, engine_of, make_chunks, make_config, stats_of, step
from tests.lookups import present

NAMES = ["qkv_linear", "core_attn", "attn_proj"]
MICROBATCHES = [2, 2, 4, 2]


@pytest.mark.parametrize(
    ("shape", "kind", "settings", "resident_bytes"),
    [
        pytest.param(Pipeline(2), "dense", {}, 40_000, id="1F1B, within a budget"),
        pytest.param(Pipeline(2), "moe", {}, 40_000, id="1F1B, experts"),
        pytest.param(Pipeline(2, 2), "dense", {}, None, id="interleaved"),
        pytest.param(DEEP, "moe", OVERLAP, None, id="overlap"),
    ],
)
def test_bitwise_equal(
    shape: Pipeline, kind: str, settings: dict[str, Any], resident_bytes: int | None, tmp_path: Path
) -> None:
    names = NAMES if kind == "dense" else [*NAMES, "expert_fc1"]
    run_ranks(_check, kind, names, settings, resident_bytes, str(tmp_path / "step.json"), pipeline=shape)
    assert len(list(tmp_path.iterdir())) == shape.num_ranks, "each rank records its second step"


def _check(kind: str, names: list[str], more: dict[str, Any], resident_bytes: int | None, trace: str) -> None:
    dtype = torch.bfloat16 if more else torch.float32  # the overlap takes no other
    expected = run_without(Case(kind, names, dtype, more), MICROBATCHES)
    offload = {"offload_activation": True, "offload_modules": names, "offload_planned": True, "offload_trace": trace}
    with apply(ALL) as handle:
        chunks = make_chunks(make_config(kind, dtype, **more, **offload, offload_resident_bytes=resident_bytes))
        plans = []
        for n, wanted in zip(MICROBATCHES, expected, strict=True):
            got = step(chunks, n)
            wrong = [key for key in wanted if got[key] != wanted[key]]
            assert not wrong, f"differs at {n} microbatches: {wrong[:5]}"
            assert stats_of(handle).num_storages_left == 0
            plans.append(engine_of(handle).plan)
            # Routing makes groups larger from step to step.
            assert kind != "dense" or stats_of(handle).num_unplanned_groups == 0
        assert plans[0] is None and all(plans[1:])
        assert "OUT" in format_plan(present(plans[1])) or resident_bytes is not None
        assert kind != "dense" or plans[3] is plans[1]
