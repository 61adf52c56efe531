# SPDX-License-Identifier: Apache-2.0
"""Small models whose layers are checkpointed in each of the ways that people use, and a training loop for them."""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from offload_engine import WrapperHandle
from tests.decoders import HIDDEN, LENGTH, VOCABULARY, make_decoder

BATCH, DEPTH = 2, 4
INPUT_BYTES = BATCH * LENGTH * HIDDEN * 4

WAYS = ("transformers", "transformers reentrant", "pytorch", "pytorch reentrant")
FAMILIES = ("llama", "qwen2")


class Block(nn.Module):
    """A layer that autograd saves a lot of, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.down(self.dropout(torch.tanh(self.up(self.norm(x)))))
        return x + (y if mask is None else y * mask)


class Stack(nn.Module):
    """Blocks one after the other; nothing but the caller of a block holds its input."""

    activation_offload: WrapperHandle  # of `offload_wrapper`

    def __init__(self, depth: int = DEPTH, call: Callable[..., torch.Tensor] = operator.call) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(HIDDEN, HIDDEN), nn.ModuleList(Block() for _ in range(depth))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return x.square().mean()


def double(x: torch.Tensor) -> torch.Tensor:
    """Save nothing."""
    return 2 * x


class WatchedBlock(nn.Module):
    """A layer that saves two activations, and has `note` called between their uses in backward.

    Args:
        note: see above.
        begin: the operation on its input, which saves that or does not.

    Attributes:
        recomputed: the storage that each recomputation has got as its input.
    """

    def __init__(self, note: Callable[[], None], begin: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.note, self.begin, self.recomputed = note, begin, list[StorageWeakRef]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.begin(x).sin()
        if torch._C._current_graph_task_id() != -1:
            self.recomputed.append(StorageWeakRef(x.untyped_storage()))
        else:
            y.register_hook(lambda _: self.note())
        return y.cos()


class WatchedStack(Stack):
    """`WatchedBlock`s, whose recomputations can be told from the rest of their backwards.

    Attributes:
        look: called in each of them, behind the recomputation.
        seen: for each of them how many inputs of recomputations are still there, and what `look` has returned.
    """

    def __init__(
        self, call: Callable[..., torch.Tensor] = operator.call, begin: Callable[[torch.Tensor], torch.Tensor] = double
    ) -> None:
        super().__init__(0, call)
        self.blocks.extend(WatchedBlock(self._note, begin) for _ in range(DEPTH))
        self.look: Callable[[], Any] = lambda: None
        self.seen: list[tuple[int, Any]] = []

    def _note(self) -> None:
        refs = [ref for block in self.blocks for ref in block.recomputed]  # type: ignore[union-attr]
        self.seen.append((sum(not ref.expired() for ref in refs), self.look()))


def make_language_model(family: str, way: str | None = None, **changes: Any) -> Any:
    """Make a causal language model of transformers with random weights.

    Args:
        family: one of `FAMILIES`.
        way: one of `WAYS` to checkpoint its layers; None: none.
        changes: to its configuration.
    """
    model: Any = make_decoder(family, DEPTH, **{"use_cache": False, **changes})
    if way is not None:
        enable_checkpointing(model, way, type(model.model.layers[0]))
    return model


def make_stack(way: str = "pytorch", **arguments: Any) -> Stack:
    """Make a checkpointed `Stack`; `way` is one of PyTorch's."""
    torch.manual_seed(0)
    stack = Stack(**arguments)
    enable_checkpointing(stack, way, Block)
    return stack


def enable_checkpointing(model: Any, way: str, layer: type[nn.Module]) -> None:
    """Checkpoint each `layer` of `model` in one of `WAYS`."""
    is_reentrant = way.endswith(" reentrant")
    if way.startswith("transformers"):
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        return
    wrap = partial(
        checkpoint_wrapper,
        checkpoint_impl=CheckpointImpl.REENTRANT if is_reentrant else CheckpointImpl.NO_REENTRANT,
    )
    apply_activation_checkpointing(model, wrap, check_fn=lambda module: isinstance(module, layer))


def random_tokens(seed: int) -> torch.Tensor:
    """Draw a batch, the same for the same seed."""
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(seed))


def all_equal(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Return whether they are the same to the last bit."""
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@contextmanager
def watch_inputs(layers: Sequence[nn.Module]) -> Iterator[list[list[int]]]:
    """For each call of a layer in forward: which calls so far have an input whose storage is still there."""
    inputs: list[StorageWeakRef] = []
    alive: list[list[int]] = []

    def look(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch._C._current_graph_task_id() != -1:
            return
        x = args[0] if args else kwargs["x"]
        inputs.append(StorageWeakRef(x.untyped_storage()))
        alive.append([i for i, storage in enumerate(inputs) if not storage.expired()])

    handles = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in layers]
    try:
        yield alive
    finally:
        for handle in handles:
            handle.remove()
    alive.append([i for i, storage in enumerate(inputs) if not storage.expired()])


@pytest.fixture(scope="session", autouse=True)
def first_recomputation() -> None:
    """The first one in a process imports a lot, and leaves cycles behind that keep its frame and inputs alive."""
    x = torch.ones(1, requires_grad=True)
    checkpoint(torch.sin, x, use_reentrant=False).backward()
    gc.collect()
