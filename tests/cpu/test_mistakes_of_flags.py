# SPDX-License-Identifier: Apache-2.0
"""Mistakes of settings that would move nothing, or something else than was asked for, without a word."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

from megatron_patches import __main__ as launcher  # noqa: E402
from megatron_patches import add_offload_arguments, apply  # noqa: E402
from megatron_patches._arguments import Settings, resolve  # noqa: E402
from offload_engine import OffloadConfig  # noqa: E402
from offload_engine.sizes import Size  # noqa: E402
from tests.dist.programs import ROOT  # noqa: E402

SHAPE: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


def in_front(*flags: str) -> Settings:
    """Return the settings of the launcher with these flags in front of the script."""
    return launcher._settings(add_offload_arguments(argparse.ArgumentParser()).parse_args(flags))


def test_layers_in_front_of_the_script_beside_full_recomputation() -> None:
    config = TransformerConfig(
        **SHAPE, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )
    with pytest.raises(ValueError, match="offload_num_layers=1 selects layers"):
        resolve(config, in_front("--offload-activation", "--offload-num-layers", "1"))


@pytest.mark.parametrize(
    "field",
    [{"offload_resident_bytes": 1 << 30}, {"offload_fraction": 0.5}, {"offload_modules": ["moe_act"]}],
    ids=lambda field: next(iter(field)),
)
def test_fields_need_a_switch_in_the_configuration_or_in_front_of_the_script(field: dict[str, Any]) -> None:
    [name] = field
    with apply(), pytest.raises(ValueError, match=f"^{name}=.* without offload_activation=True moves nothing"):
        TransformerConfig(**SHAPE, **field)
    with apply(modules=["core_attn"]):
        assert getattr(TransformerConfig(**SHAPE, **field), name) == field[name]
    with apply(gpu_budget="60GiB"):
        assert resolve(TransformerConfig(**SHAPE), in_front("--offload-gpu-budget", "60GiB")) is not None


def test_a_budget_in_the_engines_configuration_is_one() -> None:
    config = OffloadConfig(gpu_budget=60 << 30, recompute="off")
    with apply(config) as handle:
        settings = resolve(TransformerConfig(**SHAPE), handle._runtime._defaults)
    assert settings is not None and settings.gpu_budget == Size(60 << 30)
    assert not settings.may_recompute and settings.engine.gpu_budget is None


def test_the_script_finds_what_lies_beside_it_before_what_is_installed(tmp_path: Path) -> None:
    """A checkout of Megatron-LM has its own megatron.core beside its scripts: that one is to be patched."""
    script, core = tmp_path / "train.py", tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("__version__ = '0.1.0'\n")
    script.write_text("print('never runs')\n")
    command = [sys.executable, "-m", "megatron_patches", "--offload-activation", str(script)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode and "megatron-core 0.1.0 (imported from" in ended.stderr, ended
