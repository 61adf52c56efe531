# SPDX-License-Identifier: Apache-2.0
"""Rows around megatron-core's two kinds of recomputation."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from megatron_patches._rows.registry import Patch
from megatron_patches._rows.runtime import Runtime
from megatron_patches._versions import SUPPORTED


def recompute_rows(runtime: Runtime) -> list[Patch]:
    """Return the rows; outside a step with offload each passes its call through unchanged."""
    return [
        Patch(
            target=f"{_DISCARDING}.checkpoint",
            wrapper=functools.partial(_wrap_discarding_checkpoint, runtime=runtime),
            why="its outputs are discarded on purpose and computed again: there would be nothing to copy. And, "
            "before 0.20, it keeps detached copies of its inputs, which are not read before backward",
        ),
        Patch(
            target=f"{_DISCARDING}.discard_output_and_register_recompute",
            wrapper=functools.partial(_wrap_discard, runtime=runtime),
            why="the inputs that it recomputes from may leave then, and are needed when the recomputation begins",
        ),
        *(
            Patch(
                target=f"megatron.core.{target}",
                wrapper=functools.partial(_wrap_full_checkpoint, runtime=runtime),
                why="what is recomputed saves only its input, and by no submodule",
                versions=versions,
            )
            for target, versions in _checkpoints()
        ),
    ]


def _checkpoints() -> tuple[tuple[str, str], ...]:
    """Return the functions that keep inputs to recompute from, with the versions that have them."""
    moe_layer = importlib.import_module("megatron.core.transformer.moe.moe_layer")
    return (*_CHECKPOINTS, *([(_OF_EXPERTS, SUPPORTED)] if hasattr(moe_layer, "te_checkpoint") else []))


_DISCARDING = "megatron.core.tensor_parallel.random:CheckpointWithoutOutput"
_OF_EXPERTS = "transformer.moe.moe_layer:te_checkpoint"  # not without TransformerEngine

# With FP8 weights a layer is recomputed by TransformerEngine's function, which most modules import by name.
_CHECKPOINTS = (
    ("tensor_parallel:checkpoint", SUPPORTED),
    ("extensions.transformer_engine:te_checkpoint", SUPPORTED),
    ("transformer.transformer_block:te_checkpoint", SUPPORTED),
    ("recompute:te_checkpoint", ">=0.18"),
)


def _wrap_discarding_checkpoint(original: Callable[..., Any], *, runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def checkpoint(self: Any, run_function: Any, *args: Any) -> Any:
        outputs = original(self, run_function, *args)
        engine = runtime.active_engine
        if engine is not None:
            for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
                if isinstance(output, torch.Tensor):
                    engine.exclude(output)
            runtime.record_recomputed_from(self, run_function, args)
        return outputs

    return checkpoint


def _wrap_discard(original: Callable[..., Any], *, runtime: Runtime) -> Callable[..., Any]:
    @functools.wraps(original)
    def discard(self: Any, hook_tensor: torch.Tensor) -> Any:
        runtime.offload_recomputed_from(self, hook_tensor)
        return original(self, hook_tensor)

    return discard


def _wrap_full_checkpoint(original: Callable[..., Any] | None, *, runtime: Runtime) -> Callable[..., Any] | None:
    if original is None:  # without TransformerEngine
        return None

    @functools.wraps(original)
    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        bracket = runtime.checkpoint_bracket(args[0] if args else None)  # the function that is run again
        if bracket is None or not bracket.enter():
            return original(*args, **kwargs)
        try:
            output = original(*args, **kwargs)
        except BaseException:
            bracket.abandon()
            raise
        return bracket.commit(output)

    return checkpoint
