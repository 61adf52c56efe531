# SPDX-License-Identifier: Apache-2.0
"""Figures as the tables show them; empty where there is none."""

from __future__ import annotations

MIB = 1 << 20


def mib(nbytes: float | None) -> str:
    """Show bytes in MiB."""
    return "" if nbytes is None else f"{nbytes / MIB:,.0f}"


def number(value: float | None, digits: int) -> str:
    """Show a number with so many digits behind the point."""
    return "" if value is None else f"{value:,.{digits}f}"
