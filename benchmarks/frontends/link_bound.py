# SPDX-License-Identifier: Apache-2.0
"""What the link allows: a step that moves so many bytes cannot be faster than this. Pure functions.

Within a forward, the copy-outs can overlap nothing but this forward; within a backward, the copy-ins nothing but this
backward. So each takes at least as long as its copies, and the bound is their sum.
"""

from __future__ import annotations

from .settings import Shape

BF16_BYTES = 2
FP32_BYTES = 4


def link_bound(
    saved_bytes: int, kept_bytes: int, forward_ms: float, backward_ms: float, out_gbps: float, in_gbps: float
) -> dict[str, float]:
    """Compute the least time of a step that moves all but `kept_bytes` (the last layer's) of what its forward saves.

    Times of forward and backward are of a run that moves nothing, rates of plain copies each way.
    """
    moved = max(0, saved_bytes - kept_bytes)
    out_ms, in_ms = moved / out_gbps / 1e6, moved / in_gbps / 1e6
    step_ms = max(forward_ms, out_ms) + max(backward_ms, in_ms)
    return dict(moved_bytes=moved, out_ms=out_ms, in_ms=in_ms, step_ms=step_ms, compute_ms=forward_ms + backward_ms)


def saved_bytes_per_token(shape: Shape) -> int:
    """Return the bytes per token that a layer of Qwen2 saves in bf16 without checkpointing, each storage once.

    - two RMS norms: the input in fp32, its reciprocal root in fp32, the normalised input and the output in bf16;
    - attention: query, key and value after rotation, the output, and the logarithms of the kernel in fp32;
    - MLP: gate, its activation, up, and the product of the two.
    """
    norm = (FP32_BYTES + 2 * BF16_BYTES) * shape.hidden + FP32_BYTES
    key_value = 2 * shape.hidden // shape.heads * shape.kv_heads * BF16_BYTES
    attention = 2 * shape.hidden * BF16_BYTES + key_value + shape.heads * FP32_BYTES
    return 2 * norm + attention + 4 * shape.ffn * BF16_BYTES
