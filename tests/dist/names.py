# SPDX-License-Identifier: Apache-2.0
"""Selects the module names of a test."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from megatron_patches._model.modules import MODULES
from megatron_patches._model.validate import check_conflicts


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
