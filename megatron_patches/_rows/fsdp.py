# SPDX-License-Identifier: Apache-2.0
"""Row for Megatron-FSDP, which gathers the weights of a layer into a buffer that it frees and reuses."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from megatron_patches._rows.registry import Patch
from megatron_patches._rows.runtime import Runtime

_BUFFERS = "megatron.core.distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"


def fsdp_rows(runtime: Runtime) -> list[Patch]:
    """Return the row; none if this installation cannot import Megatron-FSDP, which megatron-core allows."""
    try:
        importlib.import_module(_BUFFERS)
    except ImportError:
        return []
    return [
        Patch(
            target=f"{_BUFFERS}:DataParallelBuffer.fetch_bucket",
            wrapper=functools.partial(_wrap_fetch, runtime=runtime),
            why="weights are gathered into buffers that no parameter owned before: what autograd saves of them are "
            "weights, although it need not be a view of a parameter",
        )
    ]


def _wrap_fetch(original: Callable[..., Any], *, runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def fetch(self: Any, *args: Any, **kwargs: Any) -> Any:
        bucket = original(self, *args, **kwargs)
        if kwargs.get("set_param_data"):  # gradients are reduced in buckets, too
            runtime.note_gathered(bucket.data)
        return bucket

    return fetch
