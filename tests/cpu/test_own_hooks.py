# SPDX-License-Identifier: Apache-2.0
"""Hooks that leave autograd's stack by what they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from offload_engine._compat import torch_private
from offload_engine._compat.own_hooks import OwnHooks, take_off


def same(x: torch.Tensor) -> torch.Tensor:
    return x


def other(x: torch.Tensor) -> torch.Tensor:
    return x


@pytest.fixture(autouse=True)
def empty_stack() -> Iterator[None]:
    assert torch_private.innermost_hooks(True) is None
    yield
    while torch_private.innermost_hooks(True) is not None:
        torch_private.pop_hooks()


def test_hooks_that_another_has_left_on_top_stay_there_alone() -> None:
    with OwnHooks(same, same):
        torch_private.push_hooks(other, other)  # as a generator of torch's checkpoint, before it is freed
    assert torch_private.innermost_hooks(True) == (other, other)
    torch_private.pop_hooks()
    assert torch_private.innermost_hooks(True) is None


def test_hooks_that_were_taken_off_leave_others_alone() -> None:
    with OwnHooks(other, other):
        with OwnHooks(same, same):
            take_off(lambda unpack: unpack is same)
        assert torch_private.innermost_hooks(True) == (other, other)
    assert torch_private.innermost_hooks(True) is None
