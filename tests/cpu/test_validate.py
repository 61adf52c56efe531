"""What a model cannot do is said with both settings named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron_patches._modules import MODULES  # noqa: E402
from megatron_patches._validate import (  # noqa: E402
    check_host_limit,
    check_recomputation,
    check_supported_features,
    hidden_bytes,
)


def config(**settings: Any) -> SimpleNamespace:
    defaults = {
        "num_layers": 8,
        "hidden_size": 64,
        "pipeline_model_parallel_size": 2,
        "virtual_pipeline_model_parallel_size": 2,
        "tensor_model_parallel_size": 1,
        "context_parallel_size": 1,
        "sequence_parallel": False,
        "bf16": False,
        "fp16": False,
        "recompute_granularity": None,
        "recompute_modules": ["core_attn"],
        "recompute_method": None,
        "recompute_num_layers": None,
    }
    return SimpleNamespace(**{**defaults, **settings})


def test_nothing_conflicts_without_recomputation() -> None:
    check_recomputation(config(), [row.name for row in MODULES])


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("core_attn", "core_attn"),
        ("moe_act", "moe_act"),
        ("router_fc2", "moe_act"),
        ("attn_norm", "layernorm"),
        ("qkv_linear", "layernorm"),
        ("mlp_fc1", "layernorm"),
        ("router", "layernorm"),
        ("mlp_act", "mlp"),
        ("router_fc1", "moe"),
        ("shared_fc1", "shared_experts"),
    ],
)
def test_recomputed_modules_are_refused(name: str, module: str) -> None:
    chosen = config(recompute_granularity="selective", recompute_modules=[module])
    with pytest.raises(ValueError, match=f"'{name}'.*'{module}'"):
        check_recomputation(chosen, ["attn_proj", name])


@pytest.mark.parametrize(
    ("name", "module"), [("self_attn", "core_attn"), ("core_attn", "layernorm"), ("mlp_norm", "mlp")]
)
def test_what_still_saves_is_accepted(name: str, module: str) -> None:
    check_recomputation(config(recompute_granularity="selective", recompute_modules=[module]), [name])


def test_full_recomputation_leaves_the_layer_input() -> None:
    full = config(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    check_recomputation(full, ["layer_input"])
    with pytest.raises(ValueError, match="recompute_granularity='full'.*'layer_input'"):
        check_recomputation(full, ["layer_input", "core_attn"])


def test_layers_beyond_the_recomputed_block_still_save() -> None:
    block = {"recompute_granularity": "full", "recompute_method": "block"}
    check_recomputation(config(**block, recompute_num_layers=1), ["core_attn"])
    with pytest.raises(ValueError, match="recompute_granularity='full'"):
        check_recomputation(config(**block, recompute_num_layers=2), ["core_attn"])


def test_bytes_of_a_hidden_activation() -> None:
    assert hidden_bytes(config(), 16, 2) == 16 * 2 * 64 * 4
    assert hidden_bytes(config(bf16=True, context_parallel_size=2), 16, 2) == 8 * 2 * 64 * 2
    assert hidden_bytes(config(sequence_parallel=True, tensor_model_parallel_size=4), 16, 2) == 4 * 2 * 64 * 4


def test_host_limit_below_one_activation() -> None:
    check_host_limit(config(), None, 16, 2)
    check_host_limit(config(), 8192, 16, 2)
    with pytest.raises(ValueError, match="offload_host_limit_bytes=8,191 cannot hold .* 8,192 bytes"):
        check_host_limit(config(), 8191, 16, 2)


@pytest.mark.parametrize("setting", [{"cuda_graph_impl": "local"}])
def test_known_limits(setting: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match=next(iter(setting))):
        check_supported_features(config(**setting))
    check_supported_features(config(cuda_graph_impl="none"))
