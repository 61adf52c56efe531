"""`OptimizerWatch`: tells when an optimizer has stepped, and so has allocated its state."""

from __future__ import annotations

from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook


class OptimizerWatch:
    """Watches all optimizers of the process. Close it outside the step of one, which calls the hooks in turn."""

    def __init__(self) -> None:
        self.has_stepped: bool = False
        self._handle: Any = register_optimizer_step_post_hook(self._note)

    def close(self) -> None:
        """Watch no more. Idempotent."""
        self._handle.remove()

    def _note(self, *_: Any) -> None:
        self.has_stepped = True
