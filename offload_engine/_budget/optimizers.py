# SPDX-License-Identifier: Apache-2.0
"""`OptimizerWatch`: tells when an optimizer has stepped, and so has allocated its state."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Final

from torch.optim.optimizer import register_optimizer_step_post_hook

_MAX_WAIT_STEPS: Final = 64
"""For an optimizer to step: gradients may be accumulated over many iterations."""


class OptimizerWatch:
    """Watches all optimizers of the process, until `close` or its own end.

    Close it outside the step of an optimizer, which calls the hooks in turn.
    """

    def __init__(self) -> None:
        self._has_stepped = False
        note = weakref.WeakMethod(self._note)
        handle = register_optimizer_step_post_hook(lambda *_: _call(note))  # the hooks of torch live for ever
        self._remove = weakref.finalize(self, handle.remove)

    def has_state(self, num_steps: int) -> bool:
        """Return whether an optimizer has stepped, or none is to be expected after so many iterations."""
        return self._has_stepped or num_steps >= _MAX_WAIT_STEPS

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._remove()

    def _note(self) -> None:
        self._has_stepped = True


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    bound: Any = method()
    if bound is not None:
        bound()
