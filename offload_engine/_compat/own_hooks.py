# SPDX-License-Identifier: Apache-2.0
"""`OwnHooks`: saved tensors hooks that leave autograd's stack by what they are, not by where they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offload_engine._compat import torch_private


class OwnHooks(torch.autograd.graph.saved_tensors_hooks):
    """A pair of hooks whose exit takes off these hooks only.

    An interrupt may come between the push of hooks and the `with` that would pop them: then they are left on the stack,
    and all tensors that the thread saves later pass through them. So code that pushes them again, or resets their
    engine, calls `take_off` first. A `with` that ends after that finds none of its own, and leaves others alone.
    """

    def __exit__(self, *exc_info: object) -> None:
        # Others are on top after an exception in a checkpoint of torch, whose generator takes its own off when it is
        # freed, which is later.
        above = []
        while (top := torch_private.innermost_hooks(True)) is not None and top[1] != self.unpack_hook:
            above.append(top)
            torch_private.pop_hooks()
        if top is not None:
            torch_private.pop_hooks()
        for hooks in reversed(above):
            torch_private.push_hooks(*hooks)


def are_innermost(unpack: Callable[[Any], torch.Tensor]) -> bool:
    """Return whether the innermost hooks of this thread unpack by this function."""
    top = torch_private.innermost_hooks(True)
    return top is not None and top[1] == unpack


def take_off(is_own: Callable[[Callable[[Any], torch.Tensor]], bool]) -> None:
    """Pop the innermost hooks of this thread while `is_own` is true of the function that they unpack by."""
    while (top := torch_private.innermost_hooks(True)) is not None and is_own(top[1]):
        torch_private.pop_hooks()
