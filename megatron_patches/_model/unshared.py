# SPDX-License-Identifier: Apache-2.0
"""Finds the parts of a model that need no hooks, because they share no saved tensor with a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_patches._model.modules import EXPERTS, MODULES, unshared_rows
from megatron_patches._model.sites import (
    BLOCKS,
    is_absent,
    is_megatron_cores,
    layers_of,
    overlaps_expert_comm,
    sites_in_layer,
)


def unshared_modules(chunk: torch.nn.Module, names: Sequence[str]) -> list[torch.nn.Module]:
    """Return the largest submodules that save no tensor that a group of `names` saves, too.

    In megatron-core's layers a block shares saved tensors only with the norm before it (its input). So a block is
    returned whole if none of the names has a site in it or its norm; otherwise the sites of `unshared_rows` in it are.
    Layers of other packages are skipped: their attention and MLP may read one tensor.
    """
    config = getattr(chunk, "config", None)
    found = []
    for _, layer in layers_of(chunk):
        if not is_megatron_cores(layer):
            continue
        modules = dict(layer.named_modules())
        paths = _whole_blocks(modules, names, config)
        paths |= {path for path in _single_paths(modules, names) if _is_as_known(path, modules, config)}
        found += [modules[path] for path in sorted(paths) if not any(path.startswith(f"{p}.") for p in paths)]
    return found


def _whole_blocks(modules: dict[str, torch.nn.Module], names: Sequence[str], config: object) -> set[str]:
    asked = [row for row in MODULES if row.name in names]
    parts = {site.path.partition(".")[0] for row in asked for site, _ in sites_in_layer(row, modules)}
    blocks = {block: norm for block, norm in BLOCKS.items() if not is_absent(modules.get(block))}
    paths = {block for block, norm in blocks.items() if not parts & {block, norm}}
    if "mlp" in paths and EXPERTS in modules and overlaps_expert_comm(config):
        paths = paths - {"mlp"} | {EXPERTS}  # with the overlap the MLP itself is not called, only its parts
    return paths


def _single_paths(modules: dict[str, torch.nn.Module], names: Sequence[str]) -> set[str]:
    return {site.path for row in unshared_rows(names) for site, _ in sites_in_layer(row, modules)}


def _is_as_known(path: str, modules: dict[str, torch.nn.Module], config: object) -> bool:
    """Return whether the submodule at `path` is called as in the table, and shares tensors only with rows of it."""
    if path.startswith(f"{EXPERTS}."):
        # TransformerEngine's fused operations run only the forward pre-hooks of the experts' linears.
        return not getattr(config, "use_transformer_engine_op_fuser", False)
    if path in BLOCKS.values():
        # A norm that is fused with the residual connection runs its hooks twice.
        return not getattr(config, "fused_residual_rmsnorm", False)
    block = path.partition(".")[0]
    kernel = modules.get(f"{block}.core_attention")
    if kernel is None:
        return True
    # Sparse attention with an indexer also reads the projections' input.
    return is_megatron_cores(modules[block], kernel) and f"{block}.core_attention.indexer" not in modules
