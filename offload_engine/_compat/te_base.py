# SPDX-License-Identifier: Apache-2.0
"""Imports the base class of `ChunkOffloadHandler` from TransformerEngine, guarded; the only import of that library.

TransformerEngine up to 2.9 has `AsyncDoubleBufferGroupOffloadHandler` in `pytorch.cpu_offload`, from 2.10 on in
`pytorch.cpu_offload_v1`. If it cannot be imported, a class with the same contract replaces it, so that no other module
depends on TransformerEngine.
"""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Callable
from typing import Any

import torch

# TransformerEngine dlopens CUDA libraries at import. Partly installed or without a GPU, it fails in all of these ways.
_IMPORT_FAILURES = (ImportError, OSError, RuntimeError, AssertionError, subprocess.CalledProcessError)
_TE_MODULES = ("transformer_engine.pytorch.cpu_offload_v1", "transformer_engine.pytorch.cpu_offload")


class _GroupOffloadHandler:
    """Has the state that TransformerEngine's handlers share, which its hook and commit function may read."""

    def __init__(
        self,
        num_offload_group: int,
        tensor_need_offloading_checker: Callable[[torch.Tensor], bool] = lambda _: True,
        debug: bool = False,
    ) -> None:
        self.num_offload_group = num_offload_group
        self.tensor_need_offloading_checker = tensor_need_offloading_checker
        self.debug = debug
        self.groupid_reset()

    def groupid_reset(self) -> None:
        """Count groups and their tensors from zero."""
        self.current_group = 0
        self.tensor_count_current_group = 0
        self.tensor_tag_to_state: dict[Any, Any] = {}


class _AsyncGroupOffloadHandler(_GroupOffloadHandler):
    """Has the contract of TransformerEngine's `AsyncDoubleBufferGroupOffloadHandler`; a subclass implements it."""

    def tensor_push(self, tensor: torch.Tensor, **kwargs: Any) -> Any:
        """Pack a saved tensor; return the tag for `tensor_pop`."""
        raise NotImplementedError

    def tensor_pop(self, tensor_tag: Any, **kwargs: Any) -> torch.Tensor:
        """Return the tensor of a tag."""
        raise NotImplementedError

    def on_group_commit_forward(self) -> Any:
        """Commit a group; called at the end of its forward."""
        raise NotImplementedError

    def on_group_commit_backward(self) -> None:
        """Begin the backward of a group."""
        raise NotImplementedError

    def bulk_offload_group(self, group_to_offload: int) -> None:
        """Copy out the tensors of a group."""
        raise NotImplementedError

    def bulk_reload_group(self, group_to_reload: int) -> None:
        """Copy in the tensors of a group."""
        raise NotImplementedError


def _find_base() -> Any:
    for name in _TE_MODULES:
        try:
            return importlib.import_module(name).AsyncDoubleBufferGroupOffloadHandler
        except (*_IMPORT_FAILURES, AttributeError):
            continue
    return _AsyncGroupOffloadHandler


HandlerBase: Any = _find_base()
