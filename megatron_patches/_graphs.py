"""Which modules CUDA graphs capture: those cannot be offloaded, every other one can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_patches._modules import ModuleRow, row_of

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
# megatron-core's own implementation captures a layer as a whole as soon as one of these is asked for.
_WHOLE_LAYER_IF_LOCAL = ("attn", "mlp", "moe")


def check_cuda_graphs(config: Any, names: Sequence[str]) -> None:
    """Rejects names whose modules are captured: a replay calls no module, and what it saves is the graph's own.

    Raises:
        NotImplementedError: naming both settings.
    """
    implementation = getattr(config, "cuda_graph_impl", None) or "none"
    if implementation == "none":
        return
    setting, scopes = _scopes(config)
    if scopes == ["full_iteration_inference"]:
        return
    for name in names:
        if implementation == "full_iteration" or not scopes or _is_captured(row_of(name), implementation, scopes):
            what = f"{setting}=[{', '.join(scopes)}]" if scopes else "the whole of every layer, or of every step"
            raise NotImplementedError(
                f"offload_modules has {name!r}, which cuda_graph_impl={implementation!r} with {what} captures: a "
                f"replayed graph calls no module. Drop {name!r} from offload_modules, or leave it out of {setting}"
            )


def _scopes(config: Any) -> tuple[str, list[str]]:
    """The setting that says what is captured, which got another name in megatron-core 0.18, and its values."""
    setting = "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"
    return setting, [getattr(scope, "name", scope) for scope in getattr(config, setting, None) or ()]


def _is_captured(row: ModuleRow, implementation: str, scopes: Sequence[str]) -> bool:
    is_local = implementation == "local"
    beginnings = [_LAYER if is_local and s in _WHOLE_LAYER_IF_LOCAL else _CAPTURED.get(s, _LAYER) for s in scopes]
    return any(bracket.path.startswith(paths) for bracket in row.brackets for paths in beginnings)
