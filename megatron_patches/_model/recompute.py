# SPDX-License-Identifier: Apache-2.0
"""Switches recomputations of a model on and off between two steps, layer by layer.

megatron-core reads each of these attributes in every forward, so no module has to be rebuilt. A recomputation is
offered only if the results of a step are known to be the same, to the last bit, with it and without it. It sums the
gradients of its input before those of readers outside are added. So the input may have several readers inside, or some
outside, but not both: three gradients summed in another order differ in the last bits.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron_patches._model.modules import EXPERTS, MODULES, ModuleRow
from megatron_patches._model.sites import (
    BLOCKS,
    calls_no_parts,
    is_absent,
    is_megatron_cores,
    layers_of,
    overlaps_expert_comm,
    sites_in_layer,
)
from megatron_patches._versions import installed_version, is_in_range
from offload_engine._compat.torch_private import class_behind_fsdp

_MOE_LAYER = EXPERTS.rpartition(".")[0]
_KNOWN = ("megatron.core.", "torch.nn.", "transformer_engine.")  # norms are torch's or TransformerEngine's
_FUSED_NORMS = ("megatron.core.fusions.", "transformer_engine.")  # one operation each
_NORM = "layernorm"  # in `recompute_modules`: both norms of a layer
_SORTED_LIKE_EVAL = ">=0.17"  # the router sorts its choice only if gradients are enabled


class _Kind(NamedTuple):
    """One recomputation."""

    name: str
    module: str
    """Its value in `recompute_modules`."""

    owner: str
    """Path, in the layer, of the module that reads `attribute`; "": the layer."""

    attribute: str
    around: str
    """Path, in the layer, of the module that is recomputed."""

    keeps: tuple[str, ...]


_KINDS = (
    _Kind("input_layernorm", _NORM, "", "recompute_input_layernorm", "input_layernorm", ("layer_input", "attn_norm")),
    _Kind(
        "mla_up_proj",
        "mla_up_proj",
        "self_attention",
        "recompute_up_proj",
        "self_attention.linear_kv_up_proj",
        ("mla_up_proj",),
    ),
    _Kind(
        "core_attn",
        "core_attn",
        "self_attention",
        "checkpoint_core_attention",
        "self_attention.core_attention",
        ("core_attn",),
    ),
    _Kind("pre_mlp_layernorm", _NORM, "", "recompute_pre_mlp_layernorm", "pre_mlp_layernorm", ("mlp_norm",)),
    _Kind("mlp", "mlp", "", "recompute_mlp", "mlp", ("mlp_fc1",)),
    _Kind("moe", "moe", _MOE_LAYER, "moe_layer_recompute", _MOE_LAYER, ("router",)),
    _Kind(
        "shared_experts",
        "shared_experts",
        _MOE_LAYER,
        "shared_experts_recompute",
        f"{_MOE_LAYER}.shared_experts",
        ("shared_fc1",),
    ),
    _Kind("moe_act", "moe_act", EXPERTS, "activation_recompute", EXPERTS, ("moe_act",)),
)
_OF_ATTENTION = _KINDS[:3]


class Switch:
    """Switches one recomputation of one layer. It holds no module.

    Attributes:
        layer: index of the layer in its chunk, as in `Site`.
        name: name of the recomputation: a value of `recompute_modules`, or which of the two norms.
        around: path, in the layer, of the module that is recomputed.
        frees: names of the table whose groups save less, or nothing, while it is on.
        keeps: names of the table inside it whose input stays saved, because the recomputation starts from it.
    """

    def __init__(self, layer: int, kind: _Kind, owner: torch.nn.Module, rows: _Rows) -> None:
        self.layer = layer
        self.name: str = kind.name
        self.around: str = kind.around
        self.frees: tuple[str, ...] = rows.frees
        self.keeps: tuple[str, ...] = rows.keeps
        self._owner = weakref.ref(owner)
        self._attribute = kind.attribute
        self._was_on: bool = getattr(owner, kind.attribute)

    def __repr__(self) -> str:
        return f"<Switch {self.name} of layer {self.layer}, {'on' if self.is_on else 'off'}>"

    @property
    def is_on(self) -> bool:
        """Return whether the layer recomputes this from its next forward on."""
        return bool(getattr(self._owner(), self._attribute, False))

    def set(self, on: bool) -> None:
        """Switch it on or off for the next step. Call it between two steps; no-op if the model has been freed."""
        owner = self._owner()
        if owner is not None:
            setattr(owner, self._attribute, on)

    def restore(self) -> None:
        """Restore the setting with which the model was built."""
        self.set(self._was_on)


class Refusal(NamedTuple):
    """A recomputation that a layer has, but that is not offered."""

    layer: int
    name: str
    reason: str


class Switches:
    """Owns the switches of one rank's model chunks.

    Attributes:
        by_key: (virtual stage, layer of the chunk, name) -> switch.
        refusals: of all chunks, by virtual stage.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self.by_key: dict[tuple[int, int, str], Switch] = {}
        self.refusals: list[list[Refusal]] = []
        for stage, chunk in enumerate(chunks):
            self.by_key |= {(stage, switch.layer, switch.name): switch for switch in find_switches(chunk)}
            self.refusals.append(find_refusals(chunk))

    def set(self, on: Collection[tuple[int, int, str]]) -> None:
        """Switch on the recomputations in `on`, and all others off, from the next step on.

        Raises:
            KeyError: if `on` names a recomputation that is not offered; nothing is switched then.
        """
        unknown = [key for key in on if key not in self.by_key]
        if unknown:
            raise KeyError(f"no recomputation can be switched at (stage, layer, name) {unknown}")
        for key, switch in self.by_key.items():
            switch.set(key in on)

    def restore(self) -> None:
        """Restore the settings with which the models were built. Idempotent."""
        for switch in self.by_key.values():
            switch.restore()


def find_switches(chunk: torch.nn.Module) -> list[Switch]:
    """Return the recomputations of a model chunk that can be switched between two steps, layer by layer."""
    return [
        Switch(found.layer, found.kind, found.owner, _rows(found.kind, found.modules))
        for found in _candidates(chunk)
        if _why_not(chunk, found) is None
    ]


def find_refusals(chunk: torch.nn.Module) -> list[Refusal]:
    """Return the recomputations of a model chunk that are not offered, with the reason."""
    reasons = [(found, _why_not(chunk, found)) for found in _candidates(chunk)]
    return [Refusal(found.layer, found.kind.name, reason) for found, reason in reasons if reason is not None]


def refusal_lines(refusals: Sequence[Sequence[Refusal]]) -> list[str]:
    """Return a line for each recomputation and reason of these chunks, with the number of layers."""
    counts = Counter((refusal.name, refusal.reason) for of_chunk in refusals for refusal in of_chunk)
    return [f"{name} of {count} {'layer' if count == 1 else 'layers'}: {why}" for (name, why), count in counts.items()]


class _Rows(NamedTuple):
    frees: tuple[str, ...]
    keeps: tuple[str, ...]


class _Candidate(NamedTuple):
    layer: int
    kind: _Kind
    owner: torch.nn.Module
    modules: dict[str, torch.nn.Module]
    """Modules of the layer, by path."""


def _candidates(chunk: torch.nn.Module) -> Iterator[_Candidate]:
    """Yield the recomputations of each layer, safe or not, in the order in which the layer runs them."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    for index, (_, layer) in enumerate(layers_of(chunk)):
        modules = dict(layer.named_modules())
        is_moe = isinstance(modules.get(_MOE_LAYER), MoELayer)
        for kind in _KINDS:
            owner = modules.get(kind.owner)
            has_it = hasattr(owner, kind.attribute) and not is_absent(modules.get(kind.around))
            if owner is not None and has_it and not (kind.name == "mlp" and is_moe):
                yield _Candidate(index, kind, owner, modules)


def _rows(kind: _Kind, modules: dict[str, torch.nn.Module]) -> _Rows:
    """Return the rows of the table that this recomputation changes in a layer."""
    names = [row.name for row in MODULES if _is_inside(row, kind) and any(sites_in_layer(row, modules))]
    keeps = tuple(name for name in names if name in kind.keeps)
    # All inputs of norms, projections and activations stay. A kernel, a router, or a projection with a norm in front of
    # it saves more than its input.
    is_freed_in_part = kind.name in ("core_attn", "mlp", "moe")
    return _Rows(tuple(name for name in names if is_freed_in_part or name not in keeps), keeps)


def _is_inside(row: ModuleRow, kind: _Kind) -> bool:
    if kind.name == "mla_up_proj" and row.name == "core_attn":
        return True  # query, key and value are what it discards
    if kind.module not in (*row.recomputed_by, *row.discarded_by):
        return False
    block = row.spans[0].path.partition(".")[0]
    return kind.module != _NORM or kind.around in (block, BLOCKS.get(block))


def _why_not(chunk: torch.nn.Module, found: _Candidate) -> str | None:
    """Return why a recomputation is not offered, or None if it is."""
    config = getattr(chunk, "config", None)
    kind, modules = found.kind, found.modules
    return (
        _why_none(config)
        or _why_not_others(modules, kind)
        or (_why_not_mlp(config, kind, modules) if f"{kind.around}.".startswith("mlp.") else None)
        or (_why_not_attention(config) if kind in _OF_ATTENTION else None)
        or (_why_not_norm(config, modules[kind.around]) if kind.module == _NORM else None)
    )


def _why_none(config: Any) -> str | None:
    """Return why nothing can be switched in a model of this configuration."""
    if getattr(config, "recompute_granularity", None) == "full":
        return "recompute_granularity='full' already recomputes whole layers"
    if getattr(config, "fp8", None) or getattr(config, "fp4", None):
        return "layers in FP8 or FP4 are prepared for recomputation when they are built"
    if (getattr(config, "cuda_graph_impl", None) or "none") != "none":
        return "a CUDA graph repeats what was captured"
    if overlaps_expert_comm(config):
        return "the overlap of the experts' all-to-all calls the parts of a layer itself"
    if getattr(config, "delay_wgrad_compute", False) or getattr(
        config, "overlap_dispatch_backward_with_experts_wgrad", False
    ):
        return "delayed weight gradients are computed from tensors that recomputation would make twice"
    return None


def _why_not_others(modules: dict[str, torch.nn.Module], kind: _Kind) -> str | None:
    is_known = class_behind_fsdp(modules[kind.around]).__module__.startswith(_KNOWN)
    if is_known and is_megatron_cores(modules[""], modules[kind.owner]):
        return None
    return "the layer or the module is not megatron-core's, and may not repeat its result"


def _why_not_norm(config: Any, norm: torch.nn.Module) -> str | None:
    if getattr(config, "fused_residual_rmsnorm", False):
        return "fused_residual_rmsnorm runs the norm together with the residual connection"
    if isinstance(norm, torch.nn.LayerNorm) or class_behind_fsdp(norm).__module__.startswith(_FUSED_NORMS):
        return None
    return "the norm reads its input in several operations, and the residual connection reads it, too"


def _why_not_attention(config: Any) -> str | None:
    variant = getattr(config, "experimental_attention_variant", None)
    return None if variant is None else f"experimental_attention_variant={variant!r} reads more than its inputs"


def _why_not_mlp(config: Any, kind: _Kind, modules: dict[str, torch.nn.Module]) -> str | None:
    inside = [module for path, module in modules.items() if f"{path}.".startswith(f"{kind.around}.")]
    if any(map(calls_no_parts, inside)):
        return "TransformerEngine's fused operations are made once, with or without it"
    if kind.name == "mlp" and config.add_bias_linear:
        return "add_bias_linear makes the MLP return a weight, which its checkpoint would turn into an activation"
    if kind.name == "mlp" and getattr(config, "mlp_chunks_for_training", 1) > 1:
        return "mlp_chunks_for_training computes the MLP in parts, and recomputation the whole"
    if kind.name in ("moe", "shared_experts") and getattr(config, "moe_shared_expert_overlap", False):
        return "moe_shared_expert_overlap runs the shared experts between the steps of the dispatcher"
    if kind.name == "shared_experts" and getattr(config, "moe_shared_expert_gate", False):
        return "moe_shared_expert_gate reads the input, which the router outside reads, too"
    return _why_not_moe(config, modules) if kind.name == "moe" else None


def _why_not_moe(config: Any, modules: dict[str, torch.nn.Module]) -> str | None:
    if is_absent(modules.get("pre_mlp_layernorm")):
        return "without a norm the residual connection reads the input that router and dispatcher read"
    for setting in ("moe_paged_stash", "moe_enable_routing_replay"):
        if getattr(config, setting, False):
            return f"{setting} keeps something in each forward of the experts"
    if config.moe_router_topk > 2 and is_in_range(installed_version(), _SORTED_LIKE_EVAL):
        return "without gradients the router does not sort its choice, and a sum of more than two depends on the order"
    return None
