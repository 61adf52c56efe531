# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: one file per rank with everything a step depends on, so that a resumed run repeats every bit.

DIR/latest_checkpointed_iteration.txt
DIR/iter_0000100/rank_00000.pt             model, optimizer, schedule, random states, progress
DIR/iter_0000100/rank_00000_optimizer.pt   parameter states of the distributed optimizer
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from gpt_trainer.arguments import UsageError
from gpt_trainer.steps import Progress

LATEST = "latest_checkpointed_iteration.txt"
# Settings that the files of a checkpoint depend on: with others they would not fit, or silently give another model.
_SHAPE = (
    "num_layers",
    "hidden_size",
    "num_moe_experts",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "num_virtual_stages_per_pipeline_rank",
    "pipeline_model_parallel_layout",
    "expert_model_parallel_size",
    "use_distributed_optimizer",
    "bf16",
)


class CheckpointError(UsageError):
    """Raised if a checkpoint cannot be read or does not fit; the message says what was expected."""


class Checkpoints:
    """Saves and loads the state of one training run."""

    def __init__(
        self,
        args: argparse.Namespace,
        chunks: list[DistributedDataParallel],
        optimizer: MegatronOptimizer,
        scheduler: OptimizerParamScheduler,
    ) -> None:
        self._shape = {name: getattr(args, name) for name in _SHAPE} | {"world_size": dist.get_world_size()}
        self._chunks = chunks
        self._optimizer = optimizer
        self._scheduler = scheduler

    def save(self, directory: Path, progress: Progress) -> None:
        """Write a checkpoint; replace the latest one only when all ranks are done."""
        folder = directory / f"iter_{progress.step:07d}"
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(self._state(progress), folder / _rank_file())
        dist.barrier()
        if dist.get_rank() == 0:
            _write_atomically(directory / LATEST, f"{progress.step}\n")
        dist.barrier()

    def load(self, directory: Path) -> Progress:
        """Restore the latest checkpoint.

        Raises:
            CheckpointError: if there is none, or it was made with other sizes.
        """
        folder = _latest(directory)
        state = _read(folder / _rank_file())
        self._check(state["shape"], folder)
        for chunk, weights in zip(self._chunks, state["model"], strict=True):
            chunk.load_state_dict(weights)
        _set_optimizer_states(self._optimizer, state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])
        _set_random_states(state["random"])
        return Progress(**state["progress"])

    def _state(self, progress: Progress) -> dict[str, Any]:
        return {
            "shape": self._shape,
            "progress": dataclasses.asdict(progress),
            "model": [chunk.state_dict() for chunk in self._chunks],
            "optimizer": _optimizer_states(self._optimizer),
            "scheduler": self._scheduler.state_dict(),
            "random": _random_states(),
        }

    def _check(self, saved: dict[str, Any], folder: Path) -> None:
        others = [f"{name} {saved.get(name)} (now {value})" for name, value in self._shape.items()
                  if saved.get(name) != value]  # fmt: skip
        if others:
            raise CheckpointError(f"{folder} was made with {', '.join(others)}")


def _rank_file() -> str:
    return f"rank_{dist.get_rank():05d}.pt"


def _latest(directory: Path) -> Path:
    try:
        step = int((directory / LATEST).read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"there is no checkpoint in {directory} ({LATEST} is missing)") from error
    return directory / f"iter_{step:07d}"


def _read(path: Path) -> dict[str, Any]:
    try:
        # the file holds numpy's and Python's random states besides tensors, and comes from our own save()
        return torch.load(path, map_location="cpu", weights_only=False)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing: was the checkpoint made with as many ranks?") from error


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    os.replace(temporary, path)


def _optimizer_states(optimizer: MegatronOptimizer) -> list[dict[str, Any]]:
    """Return this rank's share of the optimizer, of any kind: torch's own states and the weights they belong to.

    megatron-core's functions for this fail for a distributed optimizer made of torch's AdamW, as on a CPU.
    """
    return [
        {"state": part.state_dict(), "weights": [weight.detach().clone() for weight in _weights(part)]}
        for part in _parts(optimizer)
    ]


def _set_optimizer_states(optimizer: MegatronOptimizer, states: list[dict[str, Any]]) -> None:
    for part, saved in zip(_parts(optimizer), states, strict=True):
        part.load_state_dict(saved["state"])
        for weight, value in zip(_weights(part), saved["weights"], strict=True):
            weight.data.copy_(value)


def _parts(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers: one each for dense and expert parameters, none on a stage without parameters."""
    parts = [part.optimizer for part in getattr(optimizer, "chained_optimizers", [optimizer])]
    return [part for part in parts if part is not None]


def _weights(part: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the weights that the optimizer steps: this rank's share of the parameters, or float32 copies of it."""
    return [weight for group in part.param_groups for weight in group["params"]]


def _random_states() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None:
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(states["tracker"])
