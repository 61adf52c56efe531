# SPDX-License-Identifier: Apache-2.0
"""Settings made by hand and budgets, one after the other on one model: what each holds, its time and its gradients."""

from __future__ import annotations

import gc
import time
from typing import Any, Final

import torch

from benchmarks.apart import describe
from benchmarks.budgets import decision_of, first_prediction
from benchmarks.frontends.contenders import Ours, make_contender, put_layers
from benchmarks.frontends.jobs import deterministic
from benchmarks.frontends.workload import Attach, Attached, Workload, attaching
from benchmarks.gradients import Fingerprint, compare, fingerprint
from offload_engine import LowestPeak, OffloadConfig, ResidentBudget, ResidentLayers

from .report import TITLES

_MAX_STEPS: Final = 16
"""Until a plan holds."""


class TrainedWorkload(Workload):
    """A model whose step ends with that of an optimizer, which changes nothing: every step is the same."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)

    def step(self, attached: Attached) -> torch.Tensor:
        """See `Workload`."""
        loss = super().step(attached)
        self._optimizer.step()
        return loss

    def in_a_row_ms(self, attached: Attached, num_steps: int) -> float:
        """Run steps without waiting for the device in between; return the milliseconds of each, on average."""
        self.wait()
        begin = time.perf_counter()
        for _ in range(num_steps):
            self.step(attached)
        self.wait()
        return (time.perf_counter() - begin) * 1e3 / num_steps


class Turns:
    """Runs settings on one model, one after the other; `by_hand` are those of `TITLES` that can run here.

    A setting by hand has `warmup` steps before the `iters` that are timed, and `in_a_row` after them, which are timed
    together; a budget has as many before as it needs for a plan.
    """

    def __init__(self, workload: TrainedWorkload, warmup: int, iters: int, in_a_row: int | None = None) -> None:
        self._workload = workload
        self._warmup, self._iters, self._in_a_row = warmup, iters, in_a_row
        self._config = OffloadConfig() if workload.is_cuda else OffloadConfig(min_tensor_bytes=0, directory="none")
        self._reference: Fingerprint | None = None
        self.by_hand = self._settings_by_hand()

    def run(self, name: str, budget_bytes: int | None = None) -> dict[str, Any]:
        """Run one setting; a failure is not raised but recorded. Run none on this model after that."""
        record: dict[str, Any] = {"setting": name, "budget_bytes": budget_bytes, "failure": None}
        attach = self.by_hand[name] if budget_bytes is None else self._layers(gpu_budget=budget_bytes)
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

    def _settings_by_hand(self) -> dict[str, Attach]:
        """Return them in the order of `TITLES`."""
        ours = Ours(self._config, None if self._workload.is_cuda else 4096)
        num_layers = len(self._workload.layers)
        saved = self._workload.layer_bytes * num_layers
        found = {
            **{name: make_contender(name, ours, None) for name in ("none", "any_model", "ckpt")},
            "all": self._layers(policy=LowestPeak()),
            "layers": self._layers(),
            "half_layers": self._layers(policy=ResidentLayers(max(2, num_layers // 2))),
            "layers_ckpt": self._layers(enable_ckpt=True),
            "every_other": self._layers(every=2),
            "half_ckpt": self._layers(every=2, enable_ckpt=True),
            "bytes_1/3": self._layers(policy=ResidentBudget(saved // 3)),
            "bytes_2/3": self._layers(policy=ResidentBudget(2 * saved // 3)),
        }
        if not self._workload.is_cuda:  # only an engine counts what is saved there
            found["none"] = self._layers(dry_run=True)
            del found["ckpt"]
        return {name: found[name] for name in TITLES if name in found}

    def _layers(self, *, enable_ckpt: bool = False, every: int = 1, **settings: Any) -> Attach:
        """Return `enable_activation_offloading` of each `every`-th layer; `settings` are of `OffloadConfig`."""
        config, layers = self._config.replace(**settings), list(self._workload.layers)[::every]
        return attaching(lambda workload, stack: put_layers(workload, stack, config, enable_ckpt, layers))

    def _take(self, attached: Attached, record: dict[str, Any]) -> None:
        budget = None if attached.engine is None else attached.engine.budget
        if budget is None:
            for _ in range(self._warmup):
                self._workload.timed_step(attached)
        else:
            record |= self._plan(attached, budget)
        if self._workload.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        steps = [self._step(attached) for _ in range(self._iters)]
        record |= {"step_ms": [step["step_ms"] for step in steps]}
        record |= {"held_bytes": max(step["held_bytes"] for step in steps)}
        if self._in_a_row:
            record["in_a_row_ms"] = [self._workload.in_a_row_ms(attached, self._in_a_row)]
        if self._workload.is_cuda:
            record |= {"reserved_bytes": torch.cuda.max_memory_reserved()}
            record |= {"allocated_bytes": torch.cuda.max_memory_allocated()}
        if (stats := attached.stats()) is not None:
            record["moved_bytes"] = stats.copied_out_bytes
        if budget is not None:
            record |= decision_of(budget) | {"host_ms": budget.planning_ms}
        with deterministic():
            loss = self._workload.step(attached)
        found = fingerprint(self._workload.gradients(), [loss])
        self._reference = self._reference or found
        record["parity"] = compare(self._reference, found).as_record()

    def _plan(self, attached: Attached, budget: Any) -> dict[str, Any]:
        """Run steps until a plan holds; return what it took, and the first prediction beside its measured step."""
        steps: list[dict[str, Any]] = []
        while not budget.is_settled and len(steps) < _MAX_STEPS:
            step = self._step(attached)
            steps.append({"state": budget.state.name, **step, **decision_of(budget)})
        return {
            "steps": steps,
            "steps_until_held": sum(step["state"] != "HOLD" for step in steps),
            **first_prediction(steps),
        }

    def _step(self, attached: Attached) -> dict[str, Any]:
        """Return the time of a step, and what the process held: what torch reserved, and what lies outside of it."""
        step_ms = self._workload.timed_step(attached)
        if not self._workload.is_cuda:
            return {"step_ms": step_ms, "held_bytes": int(attached.stats().peak_resident_bytes)}
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        return {"step_ms": step_ms, "held_bytes": outside + torch.cuda.max_memory_reserved()}

    def _release(self) -> None:
        gc.collect()
        if self._workload.is_cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
