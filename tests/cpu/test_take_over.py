# SPDX-License-Identifier: Apache-2.0
"""Settings of megatron-core's own offload, taken over: what becomes of each, and what the log says."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402

from megatron_patches import Handle, add_offload_arguments, apply  # noqa: E402  # noqa: E402
from megatron_patches import __main__ as launcher  # noqa: E402
from megatron_patches._arguments import Settings, resolve  # noqa: E402
from megatron_patches._model.thresholds import Thresholds, parse_thresholds  # noqa: E402
from offload_engine import OffloadConfig  # noqa: E402
from offload_engine.sizes import Size  # noqa: E402
from tests.dist.programs import ROOT  # noqa: E402
from tests.lookups import present  # noqa: E402

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


@pytest.mark.parametrize("config_class", [TransformerConfig, MLATransformerConfig])
def test_a_recipe_runs_as_it_is(config_class: type, applied: Handle, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        config = make(config_class, **RECIPE, offload_engine=True, bf16=True, params_dtype=torch.bfloat16)
    assert not config.fine_grained_activation_offloading  # the model reads it
    names = ("core_attn", "attn_proj", "router_fc1")
    assert resolve(config, NO_DEFAULTS) == Settings(OffloadConfig(min_tensor_bytes=2000), names, is_taken_over=True)
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
    settings = present(resolve(arguments.core_transformer_config_from_args(args), NO_DEFAULTS))
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


def test_bad_settings_are_rejected(applied: Handle) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"offload_min_tensor_bytes": "1,2"}, "offload_min_tensor_bytes: .*two sizes for all names"),
        ({"offload_min_tensor_bytes": "moe_act=1,moe_act=2"}, "two sizes for moe_act"),
        ({"offload_min_tensor_bytes": "moe_ac=1"}, "unknown module name 'moe_ac'.*did you mean 'moe_act'"),
        ({"offload_min_tensor_bytes": ""}, "'' is not a size"),
        ({"offload_modules": ["core_attn"], "offload_min_tensor_bytes": "attn_proj=1"}, "'attn_proj' has no group"),
        ({"offload_num_layers": 0}, "offload_num_layers must be a positive number"),
        ({"offload_num_layers": 1, **FULL}, "omit one of the two"),
        ({"offload_rank_delta_bytes": "x"}, "offload_rank_delta_bytes: 'x' is not a size"),
        ({"offload_fraction": 0.5, "offload_gpu_budget": "1G"}, "omit one of --offload-gpu-budget and --offload-fr"),
    ]
    for settings, message in cases:
        with pytest.raises(ValueError, match=message):
            resolve(make(offload_activation=True, **settings), NO_DEFAULTS)


def test_fields_need_a_switch_in_the_configuration_or_in_front_of_the_script() -> None:
    for name, value in ("offload_resident_bytes", 1 << 30), ("offload_fraction", 0.5), ("offload_modules", ["moe_act"]):
        with apply(), pytest.raises(ValueError, match=f"^{name}=.* without offload_activation=True moves nothing"):
            make(**{name: value})
        with apply(modules=["core_attn"]):
            assert getattr(make(**{name: value}), name) == value
    with apply(gpu_budget="60GiB"):
        flags = add_offload_arguments(argparse.ArgumentParser()).parse_args(["--offload-gpu-budget", "60GiB"])
        assert resolve(make(), launcher._settings(flags)) is not None


def test_a_budget_in_the_engines_configuration_is_one() -> None:
    with apply(OffloadConfig(gpu_budget=60 << 30, recompute="off")) as handle:
        settings = present(resolve(make(), handle._runtime._defaults))
    assert settings.gpu_budget == Size(60 << 30)
    assert not settings.may_recompute and settings.engine.gpu_budget is None


def test_the_script_finds_what_lies_beside_it_before_what_is_installed(tmp_path: Path) -> None:
    """A checkout of Megatron-LM has its own megatron.core beside its scripts: that one is to be patched."""
    script, core = tmp_path / "train.py", tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    for file, text in ((core / "__init__.py", ""), (core / "package_info.py", "__version__ = '0.1.0'"), (script, "")):
        file.write_text(text)
    command = [sys.executable, "-m", "megatron_patches", "--offload-activation", str(script)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode and "megatron-core 0.1.0 (imported from" in ended.stderr, ended
