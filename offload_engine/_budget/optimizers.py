# SPDX-License-Identifier: Apache-2.0
"""`OptimizerWatch`: tells when an optimizer has stepped, and so has allocated its state."""

from __future__ import annotations

from typing import Any, Final

from torch.optim.optimizer import register_optimizer_step_post_hook

_MAX_WAIT_STEPS: Final = 64
"""For an optimizer to step: gradients may be accumulated over many iterations."""


class OptimizerWatch:
    """Watches all optimizers of the process. Close it outside the step of one, which calls the hooks in turn."""

    def __init__(self) -> None:
        self._has_stepped = False
        self._handle: Any = register_optimizer_step_post_hook(self._note)

    def has_state(self, num_steps: int) -> bool:
        """Return whether an optimizer has stepped, or none is to be expected after so many iterations."""
        return self._has_stepped or num_steps >= _MAX_WAIT_STEPS

    def close(self) -> None:
        """Watch no more. Idempotent."""
        self._handle.remove()

    def _note(self, *_: Any) -> None:
        self._has_stepped = True
