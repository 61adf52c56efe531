# SPDX-License-Identifier: Apache-2.0
"""`PlanFiles`: reads and writes what a budget has decided."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from offload_engine import OffloadEngine
from offload_engine.plan_files import plot_budget, save_plan
from offload_engine.planning.saved_plan import SavedPlan, check_described, parse_saved

logger = logging.getLogger(__name__)


_SIZES: Final = (
    *("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "num_moe_experts"),
    *("moe_ffn_hidden_size", "moe_router_topk", "fp8", "sequence_parallel"),
    *(f"{name}_parallel_size" for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model")),
    *(f"{name}_parallel_size" for name in ("context", "expert_model", "expert_tensor")),
)
"""Fields of `TransformerConfig` by which another model or layout saves other groups, or as many bytes more."""


def described(config: Any, seq_length: int | None, micro_batch_size: int | None) -> dict[str, object]:
    """Return what a plan is for, as plain values by name."""
    found = {name: getattr(config, name, None) for name in _SIZES}
    found |= {"seq_length": seq_length, "micro_batch_size": micro_batch_size}
    return {name: value if isinstance(value, (int, str, type(None))) else str(value) for name, value in found.items()}


class PlanFiles:
    """Reads and writes the plan of one rank and, on rank 0, draws it.

    Args:
        plan: file to begin with, if it exists, and to write; with several ranks, each has its own.
        plot: file for the picture of rank 0.
        model: what plans are for; see `described`.

    Raises:
        ValueError: if a file cannot be written there, or matplotlib is missing; names the flag.
    """

    def __init__(self, plan: str | None, plot: str | None, model: Mapping[str, object]) -> None:
        self._plan = None if plan is None else _of_this_rank(plan)
        self._plot = plot if _rank() == 0 else None
        self._is_over = False
        self._model = model
        for flag, file in (("--offload-plan", plan), ("--offload-plan-plot", plot)):
            if file is not None and Path(file).is_dir():
                raise ValueError(f"{flag} {file} is a directory: give a file in it")
            if file is not None and not Path(file).resolve().parent.is_dir():
                raise ValueError(f"{flag} {file}: there is no directory {Path(file).resolve().parent}: create it first")
        if plot is not None and find_spec("matplotlib") is None:
            raise ValueError(f"--offload-plan-plot {plot} needs matplotlib: install it, or omit the flag")

    @property
    def source(self) -> str:
        """Return the source of the plan for messages: the flag and the file of this rank."""
        return f"--offload-plan {self._plan}"

    def read(self, may_recompute: bool = True) -> SavedPlan | None:
        """Return the plan in the file; None if there is none.

        Raises:
            ValueError: if the file is not a plan, or one of another model or layout, or recomputes and that is
                forbidden.
        """
        if self._plan is None or not os.path.exists(self._plan):
            return None
        saved = parse_saved(Path(self._plan).read_text(), self.source)
        check_described(saved, self._model, self.source)
        if saved.allowance.choices.recomputed and not may_recompute:
            raise ValueError(
                f"{self.source} recomputes, which --offload-recompute off forbids: remove the file, and "
                "a new plan is made, or give --offload-recompute auto"
            )
        return saved

    def begin(self, engine: OffloadEngine, saved: SavedPlan | None) -> None:
        """Begin the engine with the plan of the file. Collective, if a file was given."""
        if self._plan is not None and engine.budget is not None:
            engine.budget.start_with(saved, self.source)

    def after_step(self, engine: OffloadEngine) -> None:
        """Write the first decision that holds, once its steps have been timed."""
        if not self._is_over and engine.budget is not None and engine.budget.has_result:
            self._is_over = True
            if engine.budget.summary is not None:
                self._write(engine)

    def close(self, engine: OffloadEngine) -> None:
        """Write the last decision, before the engine closes."""
        if engine.budget is not None and engine.budget.summary is not None:
            self._write(engine)

    def _write(self, engine: OffloadEngine) -> None:
        try:
            if self._plan is not None:
                save_plan(engine, self._plan, model=self._model)
            if self._plot is not None:
                plot_budget(engine, self._plot)
        except OSError as error:  # must not end a training run
            logger.warning("the plan was not written: %s", error)


def _of_this_rank(file: str) -> str:
    """Return the file of this rank: its number replaces {rank}, or precedes the suffix."""
    if "{rank}" not in file and is_one_of_several():
        root, suffix = os.path.splitext(file)
        file = f"{root}_rank{{rank}}{suffix}"
    return file.replace("{rank}", str(_rank()))


def _rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def is_one_of_several() -> bool:
    """Return whether this process is one of several ranks."""
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
