# SPDX-License-Identifier: Apache-2.0
"""Settings and module names that many tests share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_patches._model.modules import MODULES
from megatron_patches._model.validate import check_conflicts
from tests.dist.launch import Pipeline

DEEP = Pipeline(2, 2, expert=2)
"""With one layer in each virtual stage."""
SHARED: dict[str, Any] = {"moe_shared_expert_intermediate_size": 32}
GROUPED: dict[str, Any] = {"moe_grouped_gemm": True}
ON_TWO_RANKS: dict[str, Any] = {"expert_model_parallel_size": 2}
OVERLAP: dict[str, Any] = {**ON_TWO_RANKS, "overlap_moe_expert_parallel_comm": True}


def selective(*modules: str, **more: Any) -> dict[str, Any]:
    """Return settings with which these modules are recomputed, none of them for none; and `more`."""
    recomputed = {"recompute_granularity": "selective", "recompute_modules": list(modules)} if modules else {}
    return {**more, **recomputed}


def full(at_once: int = 1, method: str = "uniform", /, **more: Any) -> dict[str, Any]:
    """Return settings with which whole layers are recomputed, so many at once; and `more`."""
    return {
        **more,
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": at_once,
    }


def leaves(names: Iterable[str]) -> list[str]:
    """Without the names that hold others: then those open groups of their own."""
    asked = set(names)
    return [row.name for row in MODULES if row.name in asked and not row.parts]


def is_refused(config: Any, name: str, norms: frozenset[str]) -> bool:
    """Whether what `name` saves is computed again in a model with this configuration and these norms of their own."""
    try:
        check_conflicts(config, [name], norms)
    except ValueError:
        return True
    return False
