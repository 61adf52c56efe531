"""`OptimizerWatch`: tells when an optimizer has stepped, and so has allocated its state."""

from __future__ import annotations

from typing import Any, Final

from torch.optim.optimizer import register_optimizer_step_post_hook

_MAX_WAIT_STEPS: Final = 64
"""For an optimizer to step: gradients may be accumulated over many iterations."""


class OptimizerWatch:
    """Watches all optimizers of the process. Close it outside the step of one, which calls the hooks in turn.

    Attributes:
        had_state: one had stepped when the running, or last, iteration began.
    """

    def __init__(self) -> None:
        self.had_state: bool = False
        self._has_stepped = False
        self._handle: Any = register_optimizer_step_post_hook(self._note)

    def begin(self, number: int) -> None:
        """Begin an iteration, the first with number 1."""
        self.had_state = self._has_stepped or number > _MAX_WAIT_STEPS

    def close(self) -> None:
        """Watch no more. Idempotent."""
        self._handle.remove()

    def _note(self, *_: Any) -> None:
        self._has_stepped = True
