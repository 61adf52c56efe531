# SPDX-License-Identifier: Apache-2.0
"""`OwnHooks`: saved tensors hooks that are popped off autograd's stack by identity, not by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offload_engine._compat import torch_private


class OwnHooks(torch.autograd.graph.saved_tensors_hooks):
    """A pair of hooks whose exit pops these hooks only.

    An interrupt may come between the push of hooks and the `with` that would pop them. They are then left on the stack,
    and all tensors that the thread saves later pass through them. So code that pushes them again, or resets their
    engine, calls `pop_own` first. A `with` that ends after that finds none of its own hooks, and pops no others.
    """

    def __exit__(self, *exc_info: object) -> None:
        # After an exception in torch's checkpoint, its hooks are on top: its generator pops them only when it is freed.
        above = []
        while (top := torch_private.innermost_hooks(True)) is not None and top[1] != self.unpack_hook:
            above.append(top)
            torch_private.pop_hooks()
        if top is not None:
            torch_private.pop_hooks()
        for hooks in reversed(above):
            torch_private.push_hooks(*hooks)


def are_innermost(unpack: Callable[[Any], torch.Tensor]) -> bool:
    """Return whether `unpack` is the unpack function of the innermost hooks of this thread."""
    top = torch_private.innermost_hooks(True)
    return top is not None and top[1] == unpack


def innermost_is(is_own: Callable[[Callable[[Any], torch.Tensor]], bool]) -> bool:
    """Return whether `is_own` is true of the unpack function of the innermost hooks of this thread."""
    top = torch_private.innermost_hooks(True)
    return top is not None and is_own(top[1])


def pop_own(is_own: Callable[[Callable[[Any], torch.Tensor]], bool]) -> None:
    """Pop the innermost hooks of this thread while `is_own` is true of their unpack function."""
    while (top := torch_private.innermost_hooks(True)) is not None and is_own(top[1]):
        torch_private.pop_hooks()
