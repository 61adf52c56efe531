# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint function is in force when `with` statements are left in another order than they were entered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn

import offload_engine
from offload_engine import CheckpointOffload, OffloadConfig, OffloadError, manage_activations

CONFIG = OffloadConfig(min_tensor_bytes=1, directory="none")
WIDTH = 16


@pytest.fixture
def contexts() -> Iterator[Callable[[str], list[Any]]]:
    """Make `manage_activations` for each "m" and `CheckpointOffload` for each "c"."""
    with contextlib.ExitStack() as closing:

        def make(kinds: str) -> list[Any]:
            made: list[Any] = [
                manage_activations(None, CONFIG) if kind == "m" else CheckpointOffload(CONFIG) for kind in kinds
            ]
            for context in made:
                closing.callback(context.close)
            return made

        yield make


def leave(context: AbstractContextManager[Any]) -> None:
    context.__exit__(None, None, None)


def checkpointed() -> torch.Tensor:
    inputs = torch.ones(8, WIDTH, requires_grad=True)
    result: torch.Tensor = offload_engine.checkpoint(nn.Linear(WIDTH, WIDTH), inputs)
    return result.sum()


@pytest.mark.parametrize("kinds", ["mc", "cm", "cc", "mcm"])
def test_none_is_left_whatever_the_order(kinds: str, contexts: Callable[[str], list[Any]]) -> None:
    made = contexts(kinds)
    for order in permutations(made):
        for context in made:
            context.__enter__()
        for context in order:
            checkpointed()
            leave(context)
        with pytest.raises(OffloadError, match="has no engine"):
            checkpointed()


def test_one_that_is_entered_twice_is_in_force_until_it_is_left_twice(contexts: Callable[[str], list[Any]]) -> None:
    (offload,) = contexts("c")
    with offload:
        with offload:
            checkpointed().backward()
        checkpointed().backward()
        assert offload.stats.num_groups == 1
    with pytest.raises(OffloadError, match="has no engine"):
        checkpointed()
