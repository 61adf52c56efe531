# SPDX-License-Identifier: Apache-2.0
"""Settings of megatron-core's own offload, taken over: what becomes of each, and what the log says."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402

from megatron_patches import Handle, apply  # noqa: E402
from megatron_patches._arguments import Settings, resolve  # noqa: E402
from megatron_patches._model.thresholds import Thresholds, parse_thresholds  # noqa: E402
from offload_engine import OffloadConfig  # noqa: E402

NO_DEFAULTS = Settings(OffloadConfig(), ())
RECIPE: dict[str, Any] = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["core_attn", "attn_proj", "expert_fc1"],
    "min_offloaded_tensor_size": 1000,
}
HAS_NEW = "delay_offload_until_cuda_graph" in {field.name for field in dataclasses.fields(TransformerConfig)}


@pytest.fixture
def applied(caplog: pytest.LogCaptureFixture) -> Iterator[Handle]:
    with apply() as handle, caplog.at_level(logging.INFO, logger="megatron_patches"):
        yield handle


def make(config_class: type = TransformerConfig, /, **settings: Any) -> Any:
    return config_class(num_layers=4, hidden_size=8, num_attention_heads=2, **settings)


def settings_of(config: Any) -> Settings:
    settings = resolve(config, NO_DEFAULTS)
    assert settings is not None
    return settings


@pytest.mark.parametrize("config_class", [TransformerConfig, MLATransformerConfig])
def test_a_recipe_runs_as_it_is(config_class: type, applied: Handle, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        config = make(config_class, **RECIPE, offload_engine=True, bf16=True, params_dtype=torch.bfloat16)
    assert not config.fine_grained_activation_offloading  # the model reads it
    names = ("core_attn", "attn_proj", "router_fc1")
    assert settings_of(config) == Settings(OffloadConfig(min_tensor_bytes=2000), names, is_taken_over=True)
    modules, size = caplog.messages  # once
    assert "becomes offload_activation, of core_attn, attn_proj, expert_fc1" in modules
    assert "min_offloaded_tensor_size=1,000 elements of megatron-core becomes offload_min_tensor_bytes=2,000" in size


def test_apply_takes_over_from_all() -> None:
    before = make(**RECIPE)
    with apply(replace_fine_grained=True):
        config = make(**RECIPE)
        assert config.offload_engine and not config.fine_grained_activation_offloading
        assert resolve(make(), NO_DEFAULTS) is None
        for again in (dataclasses.replace(config), copy.deepcopy(config)):
            assert resolve(again, NO_DEFAULTS) == resolve(config, NO_DEFAULTS)
        config.fine_grained_activation_offloading = True  # as a recipe's overrides before it is finalized again
        config.__post_init__()
        assert not config.fine_grained_activation_offloading
    with apply(modules=["core_attn"]) as handle:
        assert make(**RECIPE).fine_grained_activation_offloading
        with pytest.raises(ValueError, match="or set offload_engine=True .--offload-engine. instead"):
            resolve(before, handle._runtime._defaults)
        with pytest.raises(ValueError, match="offload_engine=True takes over megatron-core's own offload, which"):
            make(offload_engine=True)


@pytest.mark.skipif(not HAS_NEW, reason="not all of these flags are there: runs with megatron-core 0.19.2")
def test_the_flags_of_a_recipe_on_a_command_line(applied: Handle) -> None:
    arguments = pytest.importorskip("megatron.training.arguments")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    size = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --no-rope-fusion --bf16"
    flags = (
        "--fine-grained-activation-offloading --offload-modules core_attn attn_proj --min-offloaded-tensor-size 1024 "
        "--activation-offload-fraction 0.75 --delta-offload-bytes-across-pp-ranks 4096 "
        "--fine-grained-offloading-max-inflight-offloads 2 --delay-offload-until-cuda-graph --offload-engine "
        "--offload-min-tensor-bytes 1KiB,core_attn=1MiB"
    )
    args = parser.parse_args(f"{size} {flags}".split())
    args.params_dtype = torch.bfloat16
    settings = settings_of(arguments.core_transformer_config_from_args(args))
    assert settings.modules == ("core_attn", "attn_proj")
    assert settings.engine == OffloadConfig(min_tensor_bytes=1024, fraction=0.75)
    assert (settings.rank_delta_bytes, settings.thresholds.by_name) == (4096, (("core_attn", 1 << 20),))


def test_thresholds() -> None:
    assert parse_thresholds("5") == Thresholds(5)
    assert parse_thresholds("1KiB,expert_fc1=2KiB") == Thresholds(1024, (("router_fc1", 2048),))
    own = parse_thresholds("moe_act=5,attn_proj = 9MB")
    assert (own.least_bytes(7), own._replace(of_all=3).least_bytes(7)) == (5, 3)
    assert own.with_default(7).of_groups() == {"": 7, "moe_act": 5, "attn_proj": 9_000_000}
    assert Thresholds(3).with_default(7).of_groups() == {}


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offload_min_tensor_bytes": "1,2"}, "offload_min_tensor_bytes: .*two sizes for all names"),
        ({"offload_min_tensor_bytes": "moe_act=1,moe_act=2"}, "two sizes for moe_act"),
        ({"offload_min_tensor_bytes": "moe_ac=1"}, "unknown module name 'moe_ac'.*did you mean 'moe_act'"),
        ({"offload_min_tensor_bytes": ""}, "'' is not a size"),
        ({"offload_modules": ["core_attn"], "offload_min_tensor_bytes": "attn_proj=1"}, "'attn_proj' has no group"),
        ({"offload_num_layers": 0}, "offload_num_layers must be a positive number"),
        ({"offload_num_layers": 1, **FULL}, "omit one of the two"),
        ({"offload_rank_delta_bytes": "x"}, "offload_rank_delta_bytes: 'x' is not a size"),
        ({"offload_fraction": 0.5, "offload_gpu_budget": "1G"}, "omit one of --offload-gpu-budget and --offload-fr"),
    ],
)
def test_bad_settings_are_rejected(settings: dict[str, Any], message: str, applied: Handle) -> None:
    with pytest.raises(ValueError, match=message):
        resolve(make(offload_activation=True, **settings), NO_DEFAULTS)
