# SPDX-License-Identifier: Apache-2.0
"""Activation offload for training: saved tensors live in host memory between forward and backward."""

from offload_engine._compat import torch_private as _torch_private  # noqa: F401 - says what torch lacks, first
from offload_engine._compat.build import IS_COMPILED
from offload_engine.chunk import ChunkOffloadHandler
from offload_engine.config import OffloadConfig
from offload_engine.engine import OffloadEngine
from offload_engine.engine_view import EngineSnapshot, explain
from offload_engine.errors import BudgetError, CopyError, OffloadError
from offload_engine.frontends.any_model import ManagedActivations, manage_activations
from offload_engine.frontends.checkpoint import CheckpointOffload, checkpoint
from offload_engine.frontends.layers import LayerOffload, enable_activation_offloading
from offload_engine.frontends.wrapper import WrapperHandle, offload_wrapper
from offload_engine.functions import group_commit, group_start
from offload_engine.identities import GroupCommitFunction, GroupStartFunction
from offload_engine.meter import ResidencyMeter
from offload_engine.policies import (
    FixedBounds,
    GroupWindow,
    LowestPeak,
    Planned,
    PrefetchWindow,
    ResidentBudget,
    ResidentLayers,
)
from offload_engine.schedule import Action, ChunkKey
from offload_engine.stats import IterationStats
from offload_engine.tracker import SavedTensorTracker
from offload_engine.traits import GroupTraits

__version__ = "0.2.0"

__all__ = [
    "GroupTraits",
    "ResidentLayers",
    "ResidentBudget",
    "PrefetchWindow",
    "LowestPeak",
    "Planned",
    "GroupWindow",
    "FixedBounds",
    "EngineSnapshot",
    "IS_COMPILED",
    "Action",
    "BudgetError",
    "CheckpointOffload",
    "ChunkKey",
    "ChunkOffloadHandler",
    "CopyError",
    "GroupCommitFunction",
    "GroupStartFunction",
    "IterationStats",
    "LayerOffload",
    "ManagedActivations",
    "OffloadConfig",
    "OffloadEngine",
    "OffloadError",
    "ResidencyMeter",
    "SavedTensorTracker",
    "WrapperHandle",
    "__version__",
    "checkpoint",
    "enable_activation_offloading",
    "explain",
    "group_commit",
    "group_start",
    "manage_activations",
    "offload_wrapper",
]
