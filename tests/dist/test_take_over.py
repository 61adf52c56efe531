# SPDX-License-Identifier: Apache-2.0
"""Recipes with megatron-core's own offload, unchanged but for one setting: the same bits, and what they name moves."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch

from megatron_patches import apply
from megatron_patches._model.candidates import find_among, find_candidates
from megatron_patches._versions import installed_version, is_in_range
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.settings import selective
from tests.dist.tiny import ALL, NUM_LAYERS, make_chunks, make_config, messages, run, stats_of, step

pytestmark = pytest.mark.compat

NAMES = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]
RECIPE: dict[str, Any] = {"fine_grained_activation_offloading": True, "min_offloaded_tensor_size": 1}
FROM_19 = pytest.mark.skipif(
    not is_in_range(installed_version(), ">=0.19"), reason="these settings came with 0.19: runs with 0.19.2"
)


@pytest.mark.parametrize(
    ("names", "recompute"), [(NAMES, {}), (["qkv_linear", "moe_act"], selective("layernorm", "core_attn"))]
)
@on_ranks(Pipeline(2, 2))
def test_names(names: list[str], recompute: dict[str, Any]) -> None:
    """A name with nothing to move is no error, as in megatron-core, but the log says so."""
    moved, said = _train({**RECIPE, "offload_modules": names, **recompute})
    assert moved[0]
    if torch.distributed.get_rank() == 0:
        assert ("'qkv_linear' is left out" in said) == bool(recompute)


@on_ranks()
def test_names_that_a_graph_captures_stay_unless_a_budget_chooses() -> None:
    names, config = ("core_attn", "mlp_fc1"), make_config()
    chunks, captures = make_chunks(config), copy.copy(config)
    setting = "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"
    captures.cuda_graph_impl = "transformer_engine"
    setattr(captures, setting, ["attn"])
    assert find_among(captures, chunks, names, has_budget=False) == (names, {})
    found, left_out = find_among(captures, chunks, names, has_budget=True)
    assert found == ("mlp_fc1",) and "captures 'core_attn'" in left_out["core_attn"]
    found, left_out = find_among(config, chunks, ("core_attn", "router"), has_budget=False)
    assert found == ("core_attn",) and left_out["router"] == "this rank has no such module"
    for has_budget in (False, True):
        all_names, _ = find_candidates(captures, chunks, has_budget)
        assert "mlp_fc1" in all_names and ("core_attn" in all_names) is not has_budget


@FROM_19
@on_ranks(Pipeline(2, 2))
def test_a_fraction_bytes_by_rank_and_no_copy_in_flight() -> None:
    recipe = {**RECIPE, "offload_modules": NAMES}
    first, second = _train({**recipe, "activation_offload_fraction": 0.5})[0]
    assert 0.25 * first < second < 0.75 * first  # the first shows how much there is
    first, second = _train({**recipe, "delta_offload_bytes_across_pp_ranks": 20_000})[0]
    assert second == first if torch.distributed.get_rank() == 0 else 0 < second < first
    assert _train({**recipe, "fine_grained_offloading_max_inflight_offloads": 0})[0][0]


@on_ranks()
def test_layers_of_transformer_engines_offload() -> None:
    shares = []
    for number in (1, 2, NUM_LAYERS - 1):
        moved, _ = _train({"cpu_offloading": True, "cpu_offloading_num_layers": number})
        shares.append(moved[0])
    assert 0 < shares[0] < shares[1] < shares[2]


@on_ranks()
def test_nothing_to_take_over() -> None:
    said = _listen()
    with apply(replace_fine_grained=True) as handle:
        chunks = make_chunks(make_config())
        for _ in range(2):
            run(chunks, 2)
        assert handle.engine is None
    assert "\n".join(said).count("found nothing to take over") == 1


def _train(recipe: dict[str, Any]) -> tuple[list[int], str]:
    """Check two steps; return the bytes that they have copied out, and what this rank's log says."""
    kept = {name: value for name, value in recipe.items() if "recompute" in name}
    expected = step(make_chunks(make_config("moe", **kept)), 4)
    said, moved = _listen(), []
    with apply(ALL, has_report=False) as handle:
        chunks = make_chunks(make_config("moe", **recipe, offload_engine=True))
        assert not chunks[0].config.fine_grained_activation_offloading
        for _ in range(2):
            assert step(chunks, 4) == expected
            assert stats_of(handle).num_storages_left == 0
            moved.append(stats_of(handle).copied_out_bytes)
    return moved, "\n".join(said)


def _listen() -> list[str]:
    logging.getLogger("megatron_patches").setLevel(logging.INFO)
    return messages()
