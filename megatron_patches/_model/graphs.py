# SPDX-License-Identifier: Apache-2.0
"""Finds the modules that CUDA graphs capture, and those that are compiled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megatron_patches._model.modules import ModuleRow, row_of
from megatron_patches._model.whole_steps import check_whole_step

_ATTENTION = ("input_layernorm", "self_attention", "pre_cross_attn_layernorm", "cross_attention")
_DENSE = ("pre_mlp_layernorm", "mlp.linear_fc")
_ROUTER = ("pre_mlp_layernorm", "mlp.router", "mlp.shared_experts")
_MOE = (*_ROUTER, "mlp.experts")
_MAMBA = ("mixer",)
_LAYER = (*_ATTENTION, *_DENSE, *_MOE)

# Scope -> prefixes of the paths that it captures, relative to a layer.
_CAPTURED = {
    "attn": _ATTENTION,
    "mlp": _DENSE,
    "moe": _MOE,
    "moe_router": _ROUTER,
    "moe_preprocess": _ROUTER,
    "mamba": _MAMBA,
}


def is_captured_by_te(config: Any) -> bool:
    """Return whether TransformerEngine captures layers: it rejects hooks on them, and outputs are graph memory."""
    return getattr(config, "cuda_graph_impl", None) == "transformer_engine"


def may_be_recorded(modules: Iterable[torch.nn.Module], config: Any) -> bool:
    """Return whether a step can be recorded by default: that must not recompile modules, nor happen in a capture.

    Args:
        modules: a model's chunks, with their wrappers.
        config: the model's.
    """
    has_graphs = (getattr(config, "cuda_graph_impl", None) or "none") != "none"
    return not has_graphs and not any(_is_compiled(part) for module in modules for part in module.modules())


def _is_compiled(module: torch.nn.Module) -> bool:
    is_wrapper = type(module).__name__ == "OptimizedModule"
    # torch.compile keeps the original of a compiled forward in this attribute.
    has_compiled_forward = hasattr(vars(module).get("forward"), "_torchdynamo_orig_callable")
    return is_wrapper or module._compiled_call_impl is not None or has_compiled_forward


def check_cuda_graphs(config: Any, names: Sequence[str], has_budget: bool = False) -> None:
    """Reject names that cannot be offloaded with the CUDA graphs of a configuration.

    If whole steps are captured, all names are in the graph, with their copies. If TransformerEngine captures layers,
    tensors that they save are copied between their replays. See docs/graphs.md.

    Args:
        config: the model's.
        names: names to offload.
        has_budget: a budget chooses what stays.

    Raises:
        NotImplementedError: if there is such a name; names both settings.
    """
    implementation = getattr(config, "cuda_graph_impl", None) or "none"
    setting, scopes = _scopes(config)
    if implementation == "none" or _is_for_inference(config, implementation, scopes):
        return
    if implementation == "full_iteration" or "full_iteration" in scopes:
        check_whole_step(config, has_budget)
        return
    if implementation == "local":
        raise NotImplementedError(
            f"offload_modules has {', '.join(map(repr, names))} beside cuda_graph_impl='local', which rejects layers "
            "with hooks, and offload needs hooks. Set cuda_graph_impl='transformer_engine', or omit one of the two"
        )
    captured = captured_names(config, names)
    if captured and getattr(config, "cuda_graph_warmup_steps", 1) < 1:
        raise NotImplementedError(
            f"offload_modules has {', '.join(map(repr, captured))}, which {setting} captures, beside "
            "cuda_graph_warmup_steps=0: the first step attaches offload, so it must come before the captures. "
            "Set it to 1 or more"
        )
    if captured and has_budget:
        raise NotImplementedError(
            f"offload_gpu_budget beside {setting}, which captures {', '.join(map(repr, captured))}: a budget changes "
            "what stays, and a graph cannot change. Name the offload_modules instead, or omit one of the two"
        )


def captured_names(config: Any, names: Sequence[str]) -> list[str]:
    """Return the names whose modules, or parts of them, TransformerEngine captures."""
    if not is_captured_by_te(config):
        return []
    _, scopes = _scopes(config)
    return [name for name in names if not scopes or any(_is_captured(row_of(name), scope) for scope in scopes)]


def num_graphs_beside_copies(config: Any) -> int:
    """Return how many captured graphs a copy must overlap: none if a part of each layer runs eagerly."""
    _, scopes = _scopes(config)
    whole = not scopes or "mamba" in scopes or ("attn" in scopes and not {"mlp", "moe"}.isdisjoint(scopes))
    return int(whole)


def _is_for_inference(config: Any, implementation: str, scopes: Sequence[str]) -> bool:
    """Return whether graphs are for inference only. Since 0.19 a separate setting says so and the scopes are empty."""
    inference = getattr(getattr(config, "inference_cuda_graph_scope", None), "name", None)
    is_block = implementation == "local" and not scopes and inference == "block"
    return is_block or list(scopes) == ["full_iteration_inference"]


def _scopes(config: Any) -> tuple[str, list[str]]:
    """Return the name of the setting that selects what is captured, renamed in megatron-core 0.18, and its values."""
    setting = "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"
    return setting, [getattr(scope, "name", scope) for scope in getattr(config, setting, None) or ()]


def _is_captured(row: ModuleRow, scope: str) -> bool:
    paths = _CAPTURED.get(scope, _LAYER)
    return any(span.path.startswith(paths) for span in row.spans)
