# SPDX-License-Identifier: Apache-2.0
"""`counted`: writes a number before a noun."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which takes an s unless there is one: "1 group", "0 groups", "1,200 groups"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
