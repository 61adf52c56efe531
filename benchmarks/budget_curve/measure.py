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
from offload_engine.engine import OffloadEngine

_HELD: Final = "HOLD"
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
        engine: OffloadEngine | None = attached.engine
        if record["budget_bytes"] is None:
            for _ in range(self._warmup):
                self._workload.timed_step(attached)
        else:
            assert engine is not None
            record.update(self._plan(attached, engine))
        if self._workload.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        timings, held = [], []
        for _ in range(self._iters):
            timings.append(self._workload.timed_step(attached).step_ms)
            held.append(self._held_bytes(attached))
        record |= {"step_ms": timings, "held_bytes": max(held), **self._allocator()}
        if (stats := attached.stats()) is not None:
            record["moved_bytes"] = stats.copied_out_bytes
        if engine is not None and engine.budget is not None:
            record |= _summary(engine) | {"host_ms": engine.budget.planning_ms}
        record["parity"] = self._compare(attached)

    def _plan(self, attached: Attached, engine: OffloadEngine) -> dict[str, Any]:
        """Run steps until a plan holds; return what it took, and the first prediction beside its measured step."""
        controller = engine.budget
        assert controller is not None
        steps: list[dict[str, Any]] = []
        while controller.state.name != _HELD and len(steps) < _MAX_STEPS:
            milliseconds = self._workload.timed_step(attached).step_ms
            found = {"state": controller.state.name, "step_ms": milliseconds, "held_bytes": self._held_bytes(attached)}
            steps.append(found | (_summary(engine) if controller.summary is not None else {}))
        planned = [step for step in steps if "predicted_bytes" in step]
        first = planned[0] if planned else {}
        return {
            "steps": steps,
            "steps_until_held": sum(step["state"] != _HELD for step in steps),
            "first_predicted_bytes": first.get("predicted_bytes"),
            "first_held_bytes": first.get("held_bytes"),
        }

    def _compare(self, attached: Attached) -> dict[str, Any]:
        with deterministic():
            loss = self._workload.step(attached)
        found = fingerprint(self._workload.gradients(), [loss])
        self._reference = self._reference or found
        return compare(self._reference, found).as_record()

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

    def _allocator(self) -> dict[str, int]:
        if not self._workload.is_cuda:
            return {}
        return {
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "allocated_bytes": torch.cuda.max_memory_allocated(),
        }


def _summary(engine: OffloadEngine) -> dict[str, Any]:
    assert engine.budget is not None
    summary = engine.budget.summary
    if summary is None:
        return {}
    names = {"predicted_peak_bytes": "predicted_bytes", "predicted_step_ms": "predicted_ms"}
    return {names.get(name, name): value for name, value in asdict(summary).items() if name != "budget_bytes"}
