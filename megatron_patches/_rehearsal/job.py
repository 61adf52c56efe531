# SPDX-License-Identifier: Apache-2.0
"""`TrainingJob`: holds the arguments of a script, as far as a rehearsal needs them."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from megatron_patches._arguments import Settings
from offload_engine import OffloadConfig
from offload_engine.planning.shapes import Bounds


@dataclass(frozen=True)
class TrainingJob:
    """A training of a GPT with megatron-core."""

    make_config: Any
    """Returns a new TransformerConfig; its arguments replace fields of the job's own."""
    vocab_size: int
    """Padded."""
    seq_length: int
    micro_batch_size: int
    num_microbatches: int
    world_size: int
    has_te: bool = True
    model: dict[str, Any] = field(default_factory=dict)
    """More arguments of GPTModel."""
    spec: dict[str, Any] = field(default_factory=dict)
    """Arguments of the layer spec."""
    has_data_parallelism: bool = True
    """Gradients are kept in the buffers of DistributedDataParallel."""
    keeps_fp32_gradients: bool = False
    distributes_optimizer: bool = False
    optimizer_bytes: int = 12
    """For each parameter: its master copy and the moments of the optimizer."""
    parallel: dict[str, Any] = field(default_factory=dict)
    """More arguments of `initialize_model_parallel`."""
    has_experts: bool = False
    recomputes_all: bool = False
    """Its configuration asks for full recomputation."""
    settings: Settings = Settings(OffloadConfig(), ())
    """The offload settings of the run. Without modules, all names that the model has are offloaded."""

    @property
    def bounds(self) -> Bounds:
        """Return the bounds of the engine."""
        policy, names = self.settings.engine.policy, (field.name for field in fields(Bounds))
        return Bounds(**{name: getattr(policy, name, None) for name in names})

    @property
    def is_partial(self) -> bool:
        """Return whether a part of the saved tensors of the modules stays, whatever the bounds."""
        own = self.settings
        return bool(own.engine.keeps_a_share or own.rank_delta_bytes or own.num_layers or own.thresholds.by_name)
