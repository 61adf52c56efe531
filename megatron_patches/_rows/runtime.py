# SPDX-License-Identifier: Apache-2.0
"""`Runtime`: the interface between rows and the running training step, and `Step`, which describes the step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from megatron_patches._hooks.bracket import GroupBracket
from megatron_patches._model.host_claims import HostClaims
from offload_engine import Action, OffloadEngine


class Step(NamedTuple):
    """One training call of a schedule function."""

    wrapped: tuple[torch.nn.Module, ...]
    """This rank's model chunks as the schedule gets them, in the order of their virtual stages."""

    pipeline: Any
    """The pipeline-parallel process group, or None."""

    stage: tuple[Any, ...]
    """Process groups whose product is this rank's pipeline stage; empty: it is alone."""

    seq_length: int | None
    micro_batch_size: int | None
    order: Callable[[Any], list[Action]]
    """This rank's actions, for the model's configuration."""

    @property
    def chunks(self) -> tuple[torch.nn.Module, ...]:
        """Return the model chunks without data-parallel and precision wrappers."""
        return tuple(unwrap(chunk) for chunk in self.wrapped)

    @property
    def config(self) -> Any:
        """Return the model's TransformerConfig."""
        return self.chunks[0].config


class Captures(Protocol):
    """Announces captures of CUDA graphs, of the model with `chunk` as its first chunk."""

    def of_step(self, chunk: torch.nn.Module) -> AbstractContextManager[object]:
        """Return a context manager around the capture of the next step."""

    def of_layers(self, chunk: torch.nn.Module, config: Any) -> AbstractContextManager[object]:
        """Return a context manager around the captures of the layers."""

    def release(self, chunk: torch.nn.Module) -> None:
        """Release captures whose graphs have been reset or freed."""


class Runtime(Protocol):
    """The running training step, as far as rows need it."""

    host_claims: HostClaims
    """Host memory that optimizers on the CPU will take."""

    @property
    def running_engine(self) -> OffloadEngine | None:
        """Return the engine of the running training step; None outside a step."""

    @property
    def active_engine(self) -> OffloadEngine | None:
        """Return the engine of the running step if groups may be opened now, otherwise None."""

    def step(self, step: Step) -> AbstractContextManager[object] | None:
        """Return a context manager for one training step; None if nothing is to be offloaded."""

    @property
    def captures(self) -> Captures:
        """Return the object to which captures are announced."""

    def start_plan(self, model: torch.nn.Module, is_input_of_others: bool) -> None:
        """Begin the forward of the chunk `model` as a plan of nodes.

        Args:
            model: the chunk.
            is_input_of_others: code other than megatron-core's may read the decoder's input later.
        """

    def run_node(self, node: Any, forward: Callable[..., Any], *inputs: Any) -> Any:
        """Run the forward of one node of a plan, on the stream of the node; return its outputs."""

    def record_recomputed_from(self, checkpoint: object, function: Callable[..., Any], tensors: Sequence[Any]) -> None:
        """Record that `checkpoint` has saved `tensors`, or detached copies, in the running step, to run `function`."""

    def offload_recomputed_from(self, checkpoint: object, recomputed_behind: torch.Tensor) -> None:
        """Offload what `checkpoint` has saved, if that was requested.

        Args:
            checkpoint: as recorded.
            recomputed_behind: tensor whose gradient starts the recomputation, by a hook registered after this call.
        """

    def note_gathered(self, weights: torch.Tensor) -> None:
        """Note the buffer that weights are gathered into now, in or outside a training step: it never moves."""

    def checkpoint_bracket(self, function: Any) -> GroupBracket | None:
        """Return the bracket for the input of what `function` recomputes; None if the running step has none."""


def unwrap(module: torch.nn.Module) -> torch.nn.Module:
    """Return the chunk inside DistributedDataParallel, Float16Module and the like: the innermost with a config."""
    while isinstance(inner := getattr(module, "module", None), torch.nn.Module) and hasattr(inner, "config"):
        module = inner
    return module
