"""The order in which one rank runs the forward and backward of its model chunks.

The engine prefetches in this order. It is computed anew for each step from the pipeline's shape, so there is no
warm-up step and nothing to spoil when the number of microbatches changes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class ChunkKey(NamedTuple):
    """One forward of one model chunk: virtual stage (0 without virtual stages) and microbatch, both from 0."""

    stage: int
    microbatch: int


class Action(NamedTuple):
    """Run the forward ("F") or the backward ("B") of one chunk."""

    kind: Literal["F", "B"]
    chunk: ChunkKey
