# SPDX-License-Identifier: Apache-2.0
"""Finds the submodules of a model that the table of names lists."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron_patches._model.modules import DISPATCH, EXPERTS, MODULES, ModuleRow
from offload_engine._compat.torch_private import class_behind_fsdp

_DISPATCH_RANK = [row.name for row in MODULES].index(DISPATCH)
# Block -> the norm before it, in the order in which a layer runs its blocks.
BLOCKS = {
    "self_attention": "input_layernorm",
    "cross_attention": "pre_cross_attn_layernorm",
    "mlp": "pre_mlp_layernorm",
    "mixer": "norm",
}


class Site(NamedTuple):
    """One span found in a model chunk."""

    name: str
    path: str
    until: str | None
    layer: int = -1
    """Index of the layer in the chunk, from 0; -1: not in a layer."""

    is_before_experts: bool = False
    """Ends before the experts of its layer, where the host waits for the device, and then the device for the host."""


class Survey(NamedTuple):
    """What a model chunk, or a whole model, can offload."""

    sites: dict[str, int]
    """Name -> number of sites."""

    identities: frozenset[str]
    """Names whose submodule is an identity."""

    classes: frozenset[str]
    """Class names of the layers' submodules, as "mlp: MoELayer", for error messages."""


def find_sites(chunk: torch.nn.Module, names: Sequence[str]) -> list[Site]:
    """Return the sites of `names` in a model chunk, in the order in which the chunk runs them."""
    found = []
    for depth, (prefix, layer) in enumerate(layers_of(chunk)):
        modules = dict(layer.named_modules())
        has_experts = EXPERTS in modules
        for rank, row in enumerate(MODULES):
            if row.name in names:
                for site, expert in sites_in_layer(row, modules):
                    is_before = has_experts and (rank < _DISPATCH_RANK or site.until == EXPERTS)
                    site = _under(prefix, site)._replace(layer=depth, is_before_experts=is_before)
                    found.append(((depth, expert, rank), site))
    return [site for _, site in sorted(found, key=lambda entry: entry[0])]


def moe_layers(chunk: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the MLP of each layer that has experts."""
    layers = [dict(layer.named_modules()) for _, layer in layers_of(chunk)]
    return [modules[EXPERTS.rpartition(".")[0]] for modules in layers if EXPERTS in modules]


def last_block(chunk: torch.nn.Module) -> torch.nn.Module | None:
    """Return the attention, MLP or mixer that a chunk runs last; None for a chunk with at most one layer.

    Copy-outs that the last layer issues before this block are complete when it ends. In the first layer they may take
    longer: they write host bytes that copy-ins for the next backward, issued when this forward begins, may still be
    reading.
    """
    found = None
    for _, layer in layers_of(chunk) if count_layers(chunk) > 1 else ():
        for name in BLOCKS:
            block = getattr(layer, name, None)
            if not is_absent(block):
                found = block
    return found


def own_norms(chunks: Iterable[torch.nn.Module]) -> frozenset[str]:
    """Return the norms that are separate modules in some layer; the others are fused into the next module."""
    layers = [layer for chunk in chunks for _, layer in layers_of(chunk)]
    return frozenset(
        norm for norm in BLOCKS.values() if not all(is_absent(getattr(layer, norm, None)) for layer in layers)
    )


def count_layers(chunk: torch.nn.Module) -> int:
    """Count the layers of a model chunk that full recomputation would run again."""
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    mtp = [f"{path}." for path, layer in layers_of(chunk) if isinstance(layer, MultiTokenPredictionLayer)]
    return sum(1 for path, _ in layers_of(chunk) if not path.startswith(tuple(mtp)))


def survey(chunks: Iterable[torch.nn.Module]) -> Survey:
    """Count the sites of every name of the table in these chunks."""
    sites = {row.name: 0 for row in MODULES}
    identities, classes = set(), set()
    for _, layer in (entry for chunk in chunks for entry in layers_of(chunk)):
        modules = dict(layer.named_modules())
        classes |= {f"{name}: {type(child).__name__}" for name, child in layer.named_children()}
        for row in MODULES:
            sites[row.name] += sum(1 for _ in sites_in_layer(row, modules))
            if any(_is_identity(modules.get(span.path)) for span in row.spans):
                identities.add(row.name)
    return Survey(sites, frozenset(identities), frozenset(classes))


def merge_surveys(surveys: Iterable[Survey]) -> Survey:
    """Merge the surveys of several ranks into that of the whole model."""
    parts = list(surveys)
    sites = {row.name: sum(part.sites[row.name] for part in parts) for row in MODULES}
    identities = frozenset[str]().union(*(part.identities for part in parts))
    return Survey(sites, identities, frozenset[str]().union(*(part.classes for part in parts)))


def layers_of(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the layers that the table's paths are relative to; an MTP layer before the layers it contains."""
    from megatron.core.ssm.mamba_layer import MambaLayer
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    for path, module in chunk.named_modules():
        if isinstance(module, (TransformerLayer, MambaLayer, MultiTokenPredictionLayer)):
            yield path, module


def is_megatron_cores(*modules: torch.nn.Module) -> bool:
    """Return whether all are of classes of megatron-core, or classes that torch's `fully_shard` derives from them."""
    return all(class_behind_fsdp(module).__module__.startswith("megatron.core.") for module in modules)


def overlaps_expert_comm(config: Any) -> bool:
    """Return whether forward and backward of two chunks run together, to hide the experts' all-to-all."""
    return bool(getattr(config, "overlap_moe_expert_parallel_comm", False))


def calls_no_parts(module: torch.nn.Module) -> bool:
    """Return whether fused operations of TransformerEngine replace the submodules of this module.

    If so, megatron-core calls the submodules' forward pre-hooks itself, all at once and without inputs, and their
    forward hooks not at all or without outputs.
    """
    return (
        hasattr(module, "_make_fused_impl")  # TEFusedMLP; megatron-core tests this attribute, too
        or hasattr(module, "_make_fused_grouped_swiglu_ops")  # FusedSharedExpertMLP
        or getattr(module, "_with_fused_impl", False)  # TEGroupedMLP, if configured so
    )


def sites_in_layer(row: ModuleRow, modules: dict[str, torch.nn.Module]) -> Iterator[tuple[Site, int]]:
    """Yield the sites of `row`, relative to the layer, each with the index of its expert (-1: not one of several)."""
    for span in row.spans:
        pattern = re.compile(re.escape(span.path).replace(r"\*", r"([^.]+)"))
        for path, module in modules.items():
            match = pattern.fullmatch(path)
            if match is None or _is_identity(module):
                continue
            until = span.until.replace("*", match[1]) if span.until and match.groups() else span.until
            if (until is None or until in modules) and _lies_in(row.only_in, modules.get(path.rpartition(".")[0])):
                yield Site(row.name, path, until), int(match[1]) if match.groups() else -1


def _lies_in(class_name: str, owner: torch.nn.Module | None) -> bool:
    return not class_name or (owner is not None and class_behind_fsdp(owner).__name__ == class_name)


def _under(prefix: str, site: Site) -> Site:
    return site._replace(path=f"{prefix}.{site.path}", until=f"{prefix}.{site.until}" if site.until else None)


def is_absent(block: torch.nn.Module | None) -> bool:
    """Return whether a layer lacks this block, or has an identity in its place."""
    return not isinstance(block, torch.nn.Module) or _is_identity(block)


def _is_identity(module: torch.nn.Module | None) -> bool:
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp

    return isinstance(module, (IdentityOp, IdentityFuncOp))
