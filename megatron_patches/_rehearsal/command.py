# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_patches --plan`: predicts what training would take, without a GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megatron_patches._arguments import Settings
from megatron_patches._model.gpu_budget import FLAG
from megatron_patches._rehearsal.forecast import NUM_WAYS, forecast_job
from megatron_patches._rehearsal.job import TrainingJob
from megatron_patches._rehearsal.script import ScriptError, read_job
from offload_engine.gpu_budget import resolve_budget
from offload_engine.output import write_out
from offload_engine.planning.hardware import Hardware
from offload_engine.rehearsal.failures import RehearsalError
from offload_engine.rehearsal.forecast import Forecast
from offload_engine.rehearsal.options import budget_on, hardware_of
from offload_engine.rehearsal.progress import Progress
from offload_engine.rehearsal.recorded import forecast_at_recorded_speed
from offload_engine.rehearsal.tables import draw_forecast, forecast_text
from offload_engine.sizes import Size


def show_plan(args: argparse.Namespace, defaults: Settings, script: Sequence[str]) -> str | None:
    """Print the forecast of a script's training; return an error in one line, or None.

    Args:
        args: parsed flags, with `hardware`, `hardware_file`, `nodes`, `budget`, `recording` and `plan_plot`.
        defaults: settings of the offload flags before the script.
        script: its path and its arguments.
    """
    try:
        hardware = hardware_of(args.hardware, args.hardware_file, args.recording)
        job = read_job(script, hardware.num_gpus * args.nodes, defaults)
        forecast, notes = _forecast(args, job, hardware)
        write_out(forecast_text(forecast, [*notes, *_notes(job, forecast)]))
        if args.plan_plot:
            draw_forecast(forecast, args.plan_plot)
    except (ScriptError, RehearsalError, ValueError, OSError, AssertionError, ImportError) as error:
        return " ".join(str(error).split())
    return None


def _budget_bytes(own: Size, job: TrainingJob, hardware: Hardware) -> int:
    """Return `--budget`, or otherwise the budget of the run itself.

    Raises:
        ValueError: if both are given, or the run's is above the memory of a GPU.
    """
    of_run = job.settings.gpu_budget
    if own != Size() and of_run is not None:
        raise ValueError(f"--budget {own} and {FLAG} {of_run} both say what a GPU may hold: give one")
    if of_run is not None:
        return resolve_budget(FLAG, of_run, hardware.gpu_bytes)
    return budget_on(hardware, own)


def _forecast(args: argparse.Namespace, job: TrainingJob, hardware: Hardware) -> tuple[Forecast, list[str]]:
    num_ranks = job.parallel.get("pipeline_model_parallel_size", 1)
    budget_bytes = _budget_bytes(args.budget, job, hardware)
    num_passes = 2 if args.recording else 1
    with Progress(num_passes * NUM_WAYS * num_ranks, sys.stderr) as progress:

        def make(machine: Hardware) -> Forecast:
            return forecast_job(job, machine, budget_bytes, progress.advance, bool(args.plan_plot))

        return forecast_at_recorded_speed(make, hardware, args.recording)


def _notes(job: TrainingJob, forecast: Forecast) -> list[str]:
    """Return the assumptions of the forecast, and what a budget cannot choose."""
    context = "8.9 GiB of CUDA and TransformerEngine's kernels" if job.has_te else "0.7 GiB of CUDA"
    notes = [
        f"Fullest GPU: allocated bytes, what the allocator reserves in vain, and {context}. Not counted: "
        "communication during the backward of data parallelism, and fused accumulation of weight gradients."
    ]
    if job.has_experts:
        notes.append("Experts: all are assumed to get equally many tokens.")
    if job.has_te:
        notes.append(
            "Layers are those of TransformerEngine, with fused attention; --transformer-impl local changes it."
        )
    for number, rank in enumerate(forecast.ranks):
        if rank.chosen is not None:
            notes += [f"Stage {number}: a budget does not recompute {refusal}." for refusal in rank.refusals]
    return notes
