# SPDX-License-Identifier: Apache-2.0
"""Row for the optimizer that megatron-core runs on the CPU, which shares host memory with the engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megatron_patches._rows.registry import Patch
from megatron_patches._rows.runtime import Runtime


def host_claim_rows(runtime: Runtime) -> list[Patch]:
    """Return the row."""
    return [
        Patch(
            target="megatron.core.optimizer.cpu_offloading.hybrid_optimizer:HybridDeviceOptimizer.__init__",
            wrapper=functools.partial(_wrap_init, runtime=runtime),
            why="its gradients and state take host memory in its first step, when activations have taken theirs",
        )
    ]


def _wrap_init(original: Callable[..., None], *, runtime: Runtime) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        runtime.host_claims.add(self)

    return init
