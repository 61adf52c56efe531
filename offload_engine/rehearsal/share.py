# SPDX-License-Identifier: Apache-2.0
"""Derives which groups a share keeps on the device from rehearsed shapes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from offload_engine._policy.share import leaving_bytes
from offload_engine.config import OffloadConfig
from offload_engine.planning.choices import Choices, slots_of
from offload_engine.planning.shapes import Shapes
from offload_engine.schedule import Action, count_alive


def kept_by_share(shapes: Shapes, actions: Sequence[Action], config: OffloadConfig) -> Choices:
    """Return the groups that stay by `OffloadConfig.fraction` and `kept_bytes`, from the second step on."""
    if not config.keeps_a_share:
        return Choices()
    num_waiting, kept = max(count_alive(actions), default=1), set()
    for stage, shape in enumerate(shapes):
        so_far = list(accumulate(group.nbytes for group in shape.groups))
        limit = leaving_bytes(so_far[-1] if so_far else 0, config.fraction, config.kept_bytes, num_waiting)
        slots = zip(slots_of(stage, shape.groups), shape.groups, so_far, strict=True)
        kept |= {slot for slot, group, nbytes in slots if group.nbytes and nbytes > limit}
    return Choices(frozenset(kept))
