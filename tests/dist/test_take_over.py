# SPDX-License-Identifier: Apache-2.0
"""Recipes with megatron-core's own offload, unchanged but for one setting: the same bits, and what they name moves."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from megatron_patches import apply
from megatron_patches._rows.runtime import unwrap
from megatron_patches._versions import installed_version, is_in_range
from offload_engine import OffloadConfig
from tests.dist.launch import Pipeline, run_ranks
from tests.dist.tiny import NUM_LAYERS, make_chunks, make_config, run, step

NAMES = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]
RECIPE: dict[str, Any] = {"fine_grained_activation_offloading": True, "min_offloaded_tensor_size": 1}
SHAPES = [Pipeline(), Pipeline(2, 2)]
FROM_19 = pytest.mark.skipif(
    not is_in_range(installed_version(), ">=0.19"), reason="these settings came with 0.19: runs with 0.19.2"
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {"offload_modules": NAMES},
        {"offload_modules": ["core_attn", "attn_proj"]},
        {"offload_modules": ["qkv_linear", "moe_act"], "recompute_modules": ["layernorm", "core_attn"]},
    ],
    ids=["all", "two", "one of them discarded"],
)
def test_names(settings: dict[str, Any], shape: Pipeline) -> None:
    """A name with nothing to move is no error, as in megatron-core, but the log says so."""
    recompute = {"recompute_granularity": "selective"} if "recompute_modules" in settings else {}
    moved = run_ranks(_check_recipe, {**RECIPE, **settings, **recompute}, pipeline=shape)
    assert all(stats[0] for stats, _ in moved)
    said = moved[0][1]
    assert f"becomes offload_activation, of {', '.join(settings['offload_modules'])}" in said
    assert ("'qkv_linear' is left out" in said) == bool(recompute)


@FROM_19
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_fraction(shape: Pipeline) -> None:
    recipe = {**RECIPE, "offload_modules": NAMES, "activation_offload_fraction": 0.5}
    for (first, second), _ in run_ranks(_check_recipe, recipe, pipeline=shape):
        assert 0.25 * first < second < 0.75 * first  # the first shows how much there is


@FROM_19
def test_bytes_by_rank() -> None:
    recipe = {**RECIPE, "offload_modules": NAMES, "delta_offload_bytes_across_pp_ranks": 20_000}
    ((first, second), _), ((first_of_1, second_of_1), _) = run_ranks(_check_recipe, recipe, pipeline=Pipeline(2, 2))
    assert second == first and 0 < second_of_1 < first_of_1


@FROM_19
def test_no_copy_in_flight() -> None:
    recipe = {**RECIPE, "offload_modules": NAMES, "fine_grained_offloading_max_inflight_offloads": 0}
    assert all(moved[0] for moved, _ in run_ranks(_check_recipe, recipe))


def test_layers_of_transformer_engines_offload() -> None:
    shares = {}
    for number in (1, 2, NUM_LAYERS - 1):
        recipe = {"cpu_offloading": True, "cpu_offloading_num_layers": number}
        (((moved, _), said),) = run_ranks(_check_recipe, recipe)
        assert f"offload_num_layers={number}, of all names" in said
        shares[number] = moved
    assert 0 < shares[1] < shares[2] < shares[NUM_LAYERS - 1]


def test_a_threshold_of_one_name() -> None:
    """Where one is above all sizes, the others are as they were without it."""
    rest = [name for name in NAMES if name != "moe_act"]
    cases = ({"offload_modules": NAMES, "offload_min_tensor_bytes": "1,moe_act=1GiB"}, {"offload_modules": rest})
    with_all, without_one = (run_ranks(_check_recipe, {**RECIPE, **case})[0][0] for case in cases)
    assert with_all == without_one


def test_nothing_to_take_over() -> None:
    (said,) = run_ranks(_check_nothing)
    assert said.count("found nothing to take over") == 1


def _check_nothing() -> str:
    said = _listen()
    with apply(replace_fine_grained=True) as handle:
        chunks = make_chunks(make_config())
        for _ in range(2):
            run(chunks, 2)
        assert handle.engine is None
    return "\n".join(said.messages)


def _check_recipe(recipe: dict[str, Any]) -> tuple[list[int], str]:
    """Return the bytes that two steps have copied out, and what this rank's log says."""
    kept = {name: value for name, value in recipe.items() if "recompute" in name}
    chunks = make_chunks(make_config("moe", **kept))
    expected = [step(chunks, n) for n in (4, 4)]
    said, moved = _listen(), []
    with apply(OffloadConfig(directory="none", min_tensor_bytes=1)) as handle:
        chunks = make_chunks(make_config("moe", **recipe, offload_engine=True))
        assert not unwrap(chunks[0]).config.fine_grained_activation_offloading
        for wanted in expected:
            assert step(chunks, 4) == wanted
            assert handle.stats is not None and handle.stats.num_storages_left == 0
            moved.append(handle.stats.copied_out_bytes)
    return moved, "\n".join(said.messages)


def _listen() -> _Said:
    said, logger = _Said(), logging.getLogger("megatron_patches")
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    return said


class _Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
