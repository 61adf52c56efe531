# SPDX-License-Identifier: Apache-2.0
"""`ModuleRuns`: notes when modules that could be recomputed run, while the allocator's work is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from offload_engine._budget.allocations import AllocationNotes


class ModuleRuns:
    """Notes the forwards of modules that could be recomputed, and when their backwards begin.

    What a recomputation allocates is what the forward has allocated, and it comes right before the backward: also what
    lies behind the last group of the module.

    Attributes:
        notes: receives them in the step that is recorded; None in others.
    """

    def __init__(self) -> None:
        self.notes: AllocationNotes | None = None

    def begin(self, name: str, inputs: Any = ()) -> Callable[[Any], None]:
        """Note the begin of a forward of what `name` recomputes; call the result at its end, with what it returns."""
        notes = self.notes
        is_on = notes is not None and torch.is_grad_enabled()
        run = notes.begin_run(name, _first_with_gradient(inputs)) if notes is not None and is_on else None

        def end(output: Any) -> None:
            if notes is None or run is None:
                return
            run.ends = notes.now()
            if (first := _first_with_gradient(output)) is not None:
                first.register_hook(begin_backward)

        def begin_backward(_: torch.Tensor) -> None:
            assert notes is not None and run is not None
            run.backward = notes.now()

        return end


def _first_with_gradient(values: Any) -> torch.Tensor | None:
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, (tuple, list)):
        values = (values,)
    return next((each for each in values if isinstance(each, torch.Tensor) and each.requires_grad), None)
