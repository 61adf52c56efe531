"""Which modules CUDA graphs capture: those cannot be offloaded, every other one can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_patches._model.modules import ModuleRow, row_of

_ATTENTION = ("input_layernorm", "self_attention", "pre_cross_attn_layernorm", "cross_attention")
_DENSE = ("pre_mlp_layernorm", "mlp.linear_fc")
_ROUTER = ("pre_mlp_layernorm", "mlp.router", "mlp.shared_experts")
_MOE = (*_ROUTER, "mlp.experts")
_MAMBA = ("mixer",)
_LAYER = (*_ATTENTION, *_DENSE, *_MOE)

# Scope -> how the paths that it captures begin, within a layer.
_CAPTURED = {
    "attn": _ATTENTION,
    "mlp": _DENSE,
    "moe": _MOE,
    "moe_router": _ROUTER,
    "moe_preprocess": _ROUTER,
    "mamba": _MAMBA,
}


def is_captured_by_te(config: Any) -> bool:
    """TransformerEngine captures layers: it refuses those with hooks, and what a graph gives out is its own memory."""
    return getattr(config, "cuda_graph_impl", None) == "transformer_engine"


def check_cuda_graphs(config: Any, names: Sequence[str]) -> None:
    """Rejects names whose modules are captured: a replay calls no module, and what it saves is the graph's own.

    Raises:
        NotImplementedError: naming both settings.
    """
    implementation = getattr(config, "cuda_graph_impl", None) or "none"
    setting, scopes = _scopes(config)
    if implementation == "none" or _is_for_inference(config, implementation, scopes):
        return
    if implementation == "local":
        raise NotImplementedError(
            f"offload_modules has {', '.join(map(repr, names))} beside cuda_graph_impl='local', which refuses layers "
            "with hooks, by which they are offloaded. Set cuda_graph_impl='transformer_engine', or drop one of them"
        )
    if implementation == "full_iteration" or "full_iteration" in scopes or not scopes:
        raise NotImplementedError(
            f"offload_modules has {', '.join(map(repr, names))} beside cuda_graph_impl={implementation!r}, which "
            f"captures all of every layer or step: a replayed graph calls no module. Name in {setting} what is to be "
            "captured instead, with cuda_graph_impl='transformer_engine', or drop one of them"
        )
    for name in names:
        captured_in = [scope for scope in scopes if _is_captured(row_of(name), scope)]
        if captured_in:
            raise NotImplementedError(
                f"offload_modules has {name!r}, which {captured_in[0]!r} in {setting} captures: a replayed graph calls "
                "no module. Drop one of them"
            )


def _is_for_inference(config: Any, implementation: str, scopes: Sequence[str]) -> bool:
    """No training step replays what is captured. Since 0.19 a setting of its own says so, and the list is empty."""
    inference = getattr(getattr(config, "inference_cuda_graph_scope", None), "name", None)
    is_block = implementation == "local" and not scopes and inference == "block"
    return is_block or list(scopes) == ["full_iteration_inference"]


def _scopes(config: Any) -> tuple[str, list[str]]:
    """The setting that says what is captured, which got another name in megatron-core 0.18, and its values."""
    setting = "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"
    return setting, [getattr(scope, "name", scope) for scope in getattr(config, setting, None) or ()]


def _is_captured(row: ModuleRow, scope: str) -> bool:
    paths = _CAPTURED.get(scope, _LAYER)
    return any(bracket.path.startswith(paths) for bracket in row.brackets)
