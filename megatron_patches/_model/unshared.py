"""Which parts of a model need not go through the engine: no group saves a tensor that they save, too."""

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
    """The largest submodules that are called and save no tensor that a place of these names is to free.

    In megatron-core's layers a block shares what it saves with the norm in front of it at most: its input. So it is one
    of these submodules where none of the names has a place in the two. In other blocks, what `unshared_rows` stand for
    is. Of other layers nothing is known: attention and MLP may read one tensor there.
    """
    config = getattr(chunk, "config", None)
    found = []
    for _, layer in layers_of(chunk):
        if not is_megatron_cores(layer):
            continue
        modules = dict(layer.named_modules())
        paths = _whole_blocks(modules, names, config)
        paths |= {path for path in _single_places(modules, names) if _is_as_known(path, modules, config)}
        found += [modules[path] for path in sorted(paths) if not any(path.startswith(f"{p}.") for p in paths)]
    return found


def _whole_blocks(modules: dict[str, torch.nn.Module], names: Sequence[str], config: object) -> set[str]:
    asked = [row for row in MODULES if row.name in names]
    parts = {site.path.partition(".")[0] for row in asked for site, _ in sites_in_layer(row, modules)}
    blocks = {block: norm for block, norm in BLOCKS.items() if not is_absent(modules.get(block))}
    paths = {block for block, norm in blocks.items() if not parts & {block, norm}}
    if "mlp" in paths and EXPERTS in modules and overlaps_expert_comm(config):
        paths = paths - {"mlp"} | {EXPERTS}  # then the MLP is not called, but its parts are
    return paths


def _single_places(modules: dict[str, torch.nn.Module], names: Sequence[str]) -> set[str]:
    return {site.path for row in unshared_rows(names) for site, _ in sites_in_layer(row, modules)}


def _is_as_known(path: str, modules: dict[str, torch.nn.Module], config: object) -> bool:
    """Whether the submodule at `path` is called as the table has it, and what shares its tensors is in the table."""
    if path.startswith(f"{EXPERTS}."):
        # TransformerEngine's operations run the hooks in front of the experts' linear layers, and never those behind.
        return not getattr(config, "use_transformer_engine_op_fuser", False)
    if path in BLOCKS.values():
        # Fused with the residual connection a norm runs its hooks twice.
        return not getattr(config, "fused_residual_rmsnorm", False)
    block = path.partition(".")[0]
    kernel = modules.get(f"{block}.core_attention")
    if kernel is None:
        return True
    # One that looks for the keys it needs reads what the projections read, too.
    return is_megatron_cores(modules[block], kernel) and f"{block}.core_attention.indexer" not in modules
