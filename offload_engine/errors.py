# SPDX-License-Identifier: Apache-2.0
"""Errors of the engine. A bad argument is a ValueError or TypeError where it is passed."""

from __future__ import annotations

from offload_engine._devices.base import CopyError

__all__ = ["BudgetError", "CopyError", "OffloadError"]


class OffloadError(RuntimeError):
    """Raised for a call in the wrong order, or an activation that was dropped."""


class BudgetError(OffloadError):
    """Raised where a step takes more memory than its budget, with everything offloaded."""
