# SPDX-License-Identifier: Apache-2.0
"""Adds activation offload to megatron-core by patches that can be removed.

Call `apply()`; nothing is patched at import.
"""

from megatron_patches._arguments import add_offload_arguments, offload_config_from_args
from megatron_patches._command_line import OneLineParser, end_run
from megatron_patches._handle import Handle, apply
from megatron_patches._model.modules import known_names
from megatron_patches._rows.cpu import apply_cpu_support
from megatron_patches._rows.registry import PatchError

__all__ = [
    "Handle",
    "OneLineParser",
    "PatchError",
    "add_offload_arguments",
    "apply",
    "apply_cpu_support",
    "end_run",
    "known_names",
    "offload_config_from_args",
]
