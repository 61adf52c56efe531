# SPDX-License-Identifier: Apache-2.0
"""Trains a model of torchtitan with its activations offloaded.

    PYTHONPATH=examples torchrun --nproc-per-node 1 -m torchtitan.train \
        --module with_torchtitan --config llama3_debugmodel --offload_gpu_budget 60GiB

A module of configurations, as torchtitan takes one with --module: those of its llama3, with a Trainer that offloads.
What its layers save leaves; under a pipeline, what its stages save. Another model takes two lines, as those at the end.
Needs torchtitan 0.3, its assets (hf_assets_path) and a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from torch import nn
from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer

from offload_engine import LayerOffload, OffloadConfig, enable_activation_offloading
from offload_engine.frontends.integrations.pipelining import ScheduleOffload, offload_schedule


class OffloadTrainer(Trainer):
    """torchtitan's Trainer, which offloads what its model saves for backward."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """That of torchtitan's Trainer, and what the engine is told."""

        offload_gpu_budget: str | None = None
        """What the process may hold on its GPU, as 60GiB or 90%; without it all that can leave does."""

        offload_checkpoint: bool = False
        """Checkpoint each layer, and offload its input; for torchtitan's activation_checkpoint:none."""

    def __init__(self, config: OffloadTrainer.Config) -> None:
        super().__init__(config)
        settings = OffloadConfig.from_flags(gpu_budget=config.offload_gpu_budget) if config.offload_gpu_budget else None
        self._offloads: list[LayerOffload | ScheduleOffload]
        if self.parallel_dims.pp_enabled:
            self._offloads = [offload_schedule(self.pp_schedule, settings)]
        else:
            self._offloads = [
                enable_activation_offloading(
                    model, enable_ckpt=config.offload_checkpoint, config=settings, layers=layers_of(model)
                )
                for model in self.model_parts
            ]

    def close(self) -> None:
        """Remove the offload from the model; then as torchtitan's."""
        for offload in self._offloads:
            offload.remove()
        super().close()


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model of torchtitan, in the order in which they run."""
    return list(model.get_submodule("layers").children())


def with_offload(config: Trainer.Config, **settings: Any) -> OffloadTrainer.Config:
    """Return the same configuration, for a Trainer that offloads."""
    return OffloadTrainer.Config(**{each.name: getattr(config, each.name) for each in fields(config)}, **settings)


def llama3_debugmodel() -> OffloadTrainer.Config:
    """Return the configuration of torchtitan's smallest model."""
    return with_offload(config_registry.llama3_debugmodel())


def llama3_8b() -> OffloadTrainer.Config:
    """Return that of 8 billion parameters."""
    return with_offload(config_registry.llama3_8b())
