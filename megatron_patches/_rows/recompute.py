"""Rows around megatron-core's two kinds of recomputation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from megatron_patches._hooks.bracket import GroupBracket
from megatron_patches._rows.registry import Patch
from megatron_patches._versions import SUPPORTED
from offload_engine import OffloadEngine


class Runner(Protocol):
    """What the rows ask."""

    @property
    def active_engine(self) -> OffloadEngine | None:
        """The engine of the running step where groups may be opened, else None."""

    def note_recomputed_from(self, tensors: Iterable[Any]) -> None:
        """Recomputation has saved detached copies of `tensors` in the running step."""

    def checkpoint_bracket(self) -> GroupBracket | None:
        """The bracket for the input of fully recomputed layers, if it is asked for in the running step."""


def recompute_rows(runner: Runner) -> list[Patch]:
    """The rows."""
    return [
        Patch(
            target="megatron.core.tensor_parallel.random:CheckpointWithoutOutput.checkpoint",
            wrapper=functools.partial(_excluding_outputs, runner=runner),
            why="its outputs are discarded on purpose and computed again: copying them would copy nothing. And it "
            "keeps detached copies of its inputs, which nobody reads",
        ),
        *(
            Patch(
                target=f"megatron.core.{target}",
                wrapper=functools.partial(_bracketing_input, runner=runner),
                why="under full recomputation the input of each layer is all that is saved, and no submodule saves it",
                versions=versions,
            )
            for target, versions in _CHECKPOINTS
        ),
    ]


# With weights in FP8 a layer is recomputed by TransformerEngine's function, which most modules import by its name.
_CHECKPOINTS = (
    ("tensor_parallel:checkpoint", SUPPORTED),
    ("extensions.transformer_engine:te_checkpoint", SUPPORTED),
    ("transformer.transformer_block:te_checkpoint", SUPPORTED),
    ("recompute:te_checkpoint", ">=0.18"),
)


def _excluding_outputs(original: Callable[..., Any], *, runner: Runner) -> Callable[..., Any]:
    @functools.wraps(original)
    def checkpoint(self: Any, run_function: Any, *args: Any) -> Any:
        outputs = original(self, run_function, *args)
        engine = runner.active_engine
        if engine is not None:
            for output in outputs if isinstance(outputs, (tuple, list)) else (outputs,):
                if isinstance(output, torch.Tensor):
                    engine.exclude(output)
            runner.note_recomputed_from(args)
        return outputs

    return checkpoint


def _bracketing_input(original: Callable[..., Any] | None, *, runner: Runner) -> Callable[..., Any] | None:
    if original is None:  # no TransformerEngine
        return None

    @functools.wraps(original)
    def checkpoint(*args: Any, **kwargs: Any) -> Any:
        bracket = runner.checkpoint_bracket()
        if bracket is None or not bracket.enter():
            return original(*args, **kwargs)
        output = None
        try:
            output = original(*args, **kwargs)
        finally:
            output = bracket.leave_with(output)
        return output

    return checkpoint
