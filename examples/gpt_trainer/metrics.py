# SPDX-License-Identifier: Apache-2.0
"""Reports of a run: a progress bar, one JSON object per step, and resident saved bytes over one step."""

from __future__ import annotations

import dataclasses
import json
import resource
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from tqdm import tqdm

from gpt_trainer.steps import StepResult
from gpt_trainer.timeline import Spans
from offload_engine import IterationStats, ResidencyMeter
from offload_engine.stats import StepTimes

_SUMS = ("kept_bytes", "offloaded_bytes", "recomputed_bytes")
_OF_PLAN = ("budget_bytes", "predicted_peak_bytes", "measured_peak_bytes", "predicted_step_ms", *_SUMS)


class Metrics:
    """Gathers every rank's figures on rank 0 and shows them there. Its methods are collective: all ranks call them.

    Args:
        json_path: file for one JSON object a step; None: only the progress bar.
        meter: resident saved bytes of this rank; None: not measured.
    """

    def __init__(
        self, num_steps: int, first_step: int, log_interval: int, json_path: Path | None, meter: ResidencyMeter | None
    ) -> None:
        self._meter = meter
        self._log_interval = log_interval
        # objects are gathered over gloo: NCCL would take them through the GPU
        self._group = dist.new_group(backend="gloo")
        self._is_first = dist.get_rank() == 0
        self._file: TextIO | None = json_path.open("w") if self._is_first and json_path is not None else None
        self._bar = tqdm(total=num_steps, initial=first_step, unit="step", desc="training", disable=not self._is_first)

    def step(
        self,
        step: int,
        result: StepResult,
        step_ms: float,
        stats: IterationStats | None,
        validation_loss: float | None = None,
        budget: Any = None,
        times: StepTimes | None = None,
    ) -> None:
        """Report one training step.

        Args:
            stats: None without offload.
            budget: the controller of `gpu_budget`; None without one.
            times: of a step of which a line is shown; None: of the others.
        """
        figures = {
            "rank": dist.get_rank(),
            "loss": result.loss,
            "validation_loss": validation_loss,
            "step_ms": step_ms,
            **_memory(),
            "offload": self._offload(stats),
            "times": times,
            "plan": _plan_of(budget),
        }
        ranks = self._gather(figures)
        if ranks is None:
            return
        loss, validation_loss = (_first_known([rank.pop(key) for rank in ranks]) for key in ("loss", "validation_loss"))
        record: dict[str, Any] = {"step": step, "loss": loss, "grad_norm": result.grad_norm, "step_ms": step_ms}
        if validation_loss is not None:
            record["validation_loss"] = validation_loss
            self._bar.write(f"step {step}: validation loss {validation_loss:.4f}")
        record |= {"offload": _total([rank["offload"] for rank in ranks]), "ranks": ranks}
        plans, times = [rank.pop("plan") for rank in ranks], _slowest([rank.pop("times") for rank in ranks])
        for place, plan in zip((record, *ranks), (_plan_of_all(plans), *plans), strict=True):
            place["offload"]["plan"] = plan
        if self._file is not None:
            print(json.dumps(record), file=self._file, flush=True)
        self._show(step, record)
        if times is not None:
            self._bar.write(f"step {step}, offload of all ranks: {_stats_of(record['offload']).line(times)}")

    def start(self, validation_loss: float | None) -> None:
        """Report the validation loss before the first step."""
        losses = self._gather(validation_loss)
        if losses is not None:
            self._bar.write(f"before the first step: validation loss {_first_known(losses):.4f}")

    def timeline(self, path: Path, step: int, begin: float, spans: Spans) -> None:
        """Write the records of the meter and `spans` for the step that began at `begin`, in seconds from there."""
        assert self._meter is not None, "a timeline needs a meter"
        points = [(time - begin, nbytes) for time, nbytes in self._meter.timeline]
        chunks = [(kind, first - begin, last - begin) for kind, first, last in spans.recorded]
        ranks = self._gather({"rank": dist.get_rank(), "timeline": points, "spans": chunks})
        if ranks is not None:
            path.write_text(json.dumps({"step": step, "ranks": ranks}))

    def close(self) -> None:
        """Close the progress bar and the file."""
        self._bar.close()
        if self._file is not None:
            self._file.close()

    def _offload(self, stats: IterationStats | None) -> dict[str, int]:
        peak = {} if self._meter is None else {"peak_resident_saved_bytes": self._meter.peak_bytes}
        return {**dataclasses.asdict(stats or IterationStats()), **peak}

    def _gather(self, value: Any) -> list[Any] | None:
        values = [None] * dist.get_world_size() if self._is_first else None
        dist.gather_object(value, values, group=self._group)
        return values

    def _show(self, step: int, record: dict[str, Any]) -> None:
        if step % self._log_interval == 0:
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix(loss=f"{record['loss']:.4f}", ms=f"{record['step_ms']:.0f}")


def _stats_of(totals: dict[str, Any]) -> IterationStats:
    return IterationStats(**{field.name: totals[field.name] for field in dataclasses.fields(IterationStats)})


def _slowest(times: list[StepTimes | None]) -> StepTimes | None:
    """Return the times of the rank whose compute waited longest for copies."""
    return max(filter(None, times), key=lambda of_rank: of_rank.waited_ms, default=None)


def _first_known(values: list[float | None]) -> float | None:
    return next((value for value in values if value is not None), None)


def _total(ranks: list[dict[str, int]]) -> dict[str, int]:
    """Sum over the ranks; for peaks take the largest, because the ranks' peaks are at different times."""
    return {key: (max if key.startswith("peak") else sum)(rank[key] for rank in ranks) for key in ranks[0]}


def _plan_of(controller: Any) -> dict[str, Any] | None:
    """Return the figures of a rank's budget, each None until it is known; None without a budget."""
    if controller is None:
        return None
    summary = controller.summary
    if summary is None:  # nothing is decided yet
        return {**dict.fromkeys(_OF_PLAN), "budget_bytes": controller.decider.budget_bytes}
    figures = {name: getattr(summary, name) for name in _OF_PLAN}
    return {**figures, "measured_peak_bytes": summary.measured_peak_bytes or None}


def _plan_of_all(plans: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """Sum the bytes of groups over the ranks; of all else take the largest, because a budget is one of each process.

    What one of them does not know yet is not known.
    """
    found = [plan for plan in plans if plan is not None]
    if not found:
        return None
    columns = {name: [plan[name] for plan in found] for name in _OF_PLAN}
    return {
        name: None if None in values else (sum if name in _SUMS else max)(values) for name, values in columns.items()
    }


def _memory() -> dict[str, int]:
    figures = {"rss_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        figures["device_peak_allocated_bytes"] = torch.cuda.max_memory_allocated()
        figures["device_peak_reserved_bytes"] = torch.cuda.max_memory_reserved()
    return figures
