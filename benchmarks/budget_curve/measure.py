# SPDX-License-Identifier: Apache-2.0
"""One turn of one setting: steps until it is ready, timed steps, what was held, and the bits of its gradients."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import torch

from benchmarks.apart import describe
from benchmarks.frontends.jobs import deterministic
from benchmarks.frontends.workload import Attach, Attached, Workload
from benchmarks.gradients import Fingerprint, compare, fingerprint

_MAX_STEPS: Final = 16
"""Until a plan holds."""


class TrainedWorkload(Workload):
    """A model whose step ends with that of an optimizer, which changes nothing: every step is the same."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def step(self, attached: Attached, on_forward: Callable[[], None] = lambda: None) -> torch.Tensor:
        """See `Workload`."""
        loss = super().step(attached, on_forward)
        self._optimizer.step()
        return loss


class Turns:
    """Runs settings on one model, one after the other.

    A setting by hand has `warmup` steps before the `iters` that are timed; a budget as many as it needs for a plan.
    """

    def __init__(self, workload: Workload, warmup: int, iters: int) -> None:
        self._workload = workload
        self._warmup, self._iters = warmup, iters
        self._reference: Fingerprint | None = None

    def run(self, name: str, attach: Attach, budget_bytes: int | None = None) -> dict[str, Any]:
        """Run one setting; a failure is not raised but recorded. Run none on this model after that."""
        record: dict[str, Any] = {"setting": name, "budget_bytes": budget_bytes, "failure": None}
        self._release()
        self._workload.make_gradients()
        try:
            with attach(self._workload) as attached:
                self._take(attached, record)
        except Exception as error:  # its traceback, with the frames that hold tensors, ends here
            record["failure"] = describe(error)
        self._workload.model.zero_grad(set_to_none=True)
        self._release()
        return record

    def _take(self, attached: Attached, record: dict[str, Any]) -> None:
        budget = None if attached.engine is None else attached.engine.budget
        if budget is None:
            for _ in range(self._warmup):
                self._workload.timed_step(attached)
        else:
            record.update(self._plan(attached, budget))
        if self._workload.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        steps = [(self._workload.timed_step(attached).step_ms, self._held_bytes(attached)) for _ in range(self._iters)]
        record |= {"step_ms": [ms for ms, _ in steps], "held_bytes": max(held for _, held in steps)}
        if self._workload.is_cuda:
            record |= {"reserved_bytes": torch.cuda.max_memory_reserved()}
            record |= {"allocated_bytes": torch.cuda.max_memory_allocated()}
        if (stats := attached.stats()) is not None:
            record["moved_bytes"] = stats.copied_out_bytes
        if budget is not None:
            record |= _summary(budget) | {"host_ms": budget.planning_ms}
        with deterministic():
            loss = self._workload.step(attached)
        found = fingerprint(self._workload.gradients(), [loss])
        self._reference = self._reference or found
        record["parity"] = compare(self._reference, found).as_record()

    def _plan(self, attached: Attached, budget: Any) -> dict[str, Any]:
        """Run steps until a plan holds; return what it took, and the first prediction beside its measured step."""
        steps: list[dict[str, Any]] = []
        while budget.state.name != "HOLD" and len(steps) < _MAX_STEPS:
            step_ms = self._workload.timed_step(attached).step_ms
            found = {"state": budget.state.name, "step_ms": step_ms, "held_bytes": self._held_bytes(attached)}
            steps.append(found | _summary(budget))
        first = next((step for step in steps if "predicted_bytes" in step), {})
        return {
            "steps": steps,
            "steps_until_held": sum(step["state"] != "HOLD" for step in steps),
            "first_predicted_bytes": first.get("predicted_bytes"),
            "first_held_bytes": first.get("held_bytes"),
        }

    def _release(self) -> None:
        gc.collect()
        if self._workload.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _held_bytes(self, attached: Attached) -> int:
        """Return what the process held at the most: what torch reserved, and what lies outside of it."""
        if not self._workload.is_cuda:
            return int(attached.stats().peak_resident_bytes)
        free, total = torch.cuda.mem_get_info()
        return total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()


def _summary(budget: Any) -> dict[str, Any]:
    if budget.summary is None:
        return {}
    names = {"predicted_peak_bytes": "predicted_bytes", "predicted_step_ms": "predicted_ms"}
    return {names.get(name, name): value for name, value in asdict(budget.summary).items() if name != "budget_bytes"}
