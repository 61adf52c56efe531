# SPDX-License-Identifier: Apache-2.0
"""Defines the errors of the engine. A bad argument raises a ValueError or TypeError where it is passed."""

from __future__ import annotations

from offload_engine._devices.base import CopyError

__all__ = ["BudgetError", "CopyError", "OffloadError"]


class OffloadError(RuntimeError):
    """Raised for a call in the wrong order, or for an activation that was abandoned."""


class BudgetError(OffloadError):
    """Raised when a step takes more memory than its budget even with everything offloaded."""
