# SPDX-License-Identifier: Apache-2.0
"""What a contender leaves behind when it is gone: it would count as memory of every later one. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

MIB = 1 << 20
_NOTICED_BYTES = 64 * MIB  # cuBLAS keeps a workspace of 32 MiB for each stream: not a leak of the contender


class Held(NamedTuple):
    """What live tensors hold at one moment, between two contenders."""

    device_bytes: int
    pinned_bytes: int
    """Of torch's own allocator of pinned memory."""

    def since(self, before: Held) -> Held:
        """Return how much has been added since `before`; less counts as zero."""
        pairs = zip(self, before, strict=True)
        return Held(*(max(0, now - then) for now, then in pairs))


def leftovers(first: Held, before: Held, after: Held) -> dict[str, int]:
    """Return the fields of a turn's record that say what it left behind.

    Args:
        first: held before the first turn of the run.
        before: held before this turn.
        after: held after it.
    """
    left, found = after.since(before), before.since(first)
    return {
        "left_device_bytes": left.device_bytes,
        "left_pinned_bytes": left.pinned_bytes,
        "found_device_bytes": found.device_bytes,
        "found_pinned_bytes": found.pinned_bytes,
    }


def notice(record: Mapping[str, Any]) -> str:
    """Say in words what this turn and earlier ones left behind; empty if that is not worth a word."""
    left = _amounts(record, "left")
    found = _amounts(record, "found")
    parts = [f"left {left} behind"] if left else []
    parts += [f"its peaks include {found} that earlier contenders left"] if found else []
    return "; ".join(parts)


def _amounts(record: Mapping[str, Any], what: str) -> str:
    sizes = {name: record.get(f"{what}_{name}_bytes", 0) for name in ("device", "pinned")}
    return " and ".join(f"{nbytes / MIB:,.0f} MiB {name}" for name, nbytes in sizes.items() if nbytes >= _NOTICED_BYTES)
