# SPDX-License-Identifier: Apache-2.0
"""`OptimizerWatch`: tells when an optimizer has stepped, and so has allocated its state."""

from __future__ import annotations

import weakref
from threading import Event
from typing import Final

from torch.optim.optimizer import register_optimizer_step_post_hook

_MAX_WAIT_STEPS: Final = 64
"""For an optimizer to step: gradients may be accumulated over many iterations."""


class OptimizerWatch:
    """Watches all optimizers of the process, until `close` or its own end.

    Close it outside the step of an optimizer, which calls the hooks in turn.
    """

    def __init__(self) -> None:
        has_stepped = self._has_stepped = Event()
        # Torch keeps the hook for ever, so it must not hold its owner.
        handle = register_optimizer_step_post_hook(lambda *_: has_stepped.set())
        self._remove = weakref.finalize(self, handle.remove)

    def has_state(self, num_steps: int) -> bool:
        """Return whether an optimizer has stepped, or none is expected any more after this many iterations."""
        return self._has_stepped.is_set() or num_steps >= _MAX_WAIT_STEPS

    def close(self) -> None:
        """Stop watching. Idempotent."""
        self._remove()
