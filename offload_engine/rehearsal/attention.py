# SPDX-License-Identifier: Apache-2.0
"""Runs torch's attention as a GPU does: one fused kernel, which saves its inputs, its output and a float per row."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Return a context manager under which `scaled_dot_product_attention` is fused; on CPUs it may not be."""
    functional: Any = torch.nn.functional
    original = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = _attention
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = original


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    aten = torch.ops.aten
    if attn_mask is None:
        flash = aten._scaled_dot_product_flash_attention
        out: torch.Tensor = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        return out
    if enable_gqa:
        times = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
    mask = attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    efficient = aten._scaled_dot_product_efficient_attention
    masked: torch.Tensor = efficient(query, key, value, mask, True, dropout_p, is_causal, scale=scale)[0]
    return masked
