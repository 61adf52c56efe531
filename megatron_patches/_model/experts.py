# SPDX-License-Identifier: Apache-2.0
"""Handles linear layers that run all experts in one call, such as TransformerEngine's GroupedLinear: only inputs move.

Such a layer saves each expert's part of its input, weight and bias: 192 tensors with 64 experts, which take the host
thirty times as long in hooks as one tensor. With `save_original_input` (which megatron-core also sets when it
recomputes) the layer saves its input as one tensor, before all others: after that tensor the hooks can pause.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

_TE = "transformer_engine"
_DEBUGGING = f"{_TE}.debug.pytorch.debug_state"  # imported by TransformerEngine's modules, in versions that have it
_KNOWN = ("megatron.core.", f"{_TE}.")


def linears_of_experts(chunk: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Return the submodules of a model chunk that have `save_original_input`.

    Excludes classes with a forward from other packages, because what else they save is unknown, and wrappers, which
    only forward the attributes of the wrapped module.
    """
    for module in chunk.modules():
        own = vars(module)
        if "num_gemms" in own and "save_original_input" in own and module.forward.__module__.startswith(_KNOWN):
            yield module


def saves_only_weights_behind(linear: Any, args: tuple[Any, ...]) -> bool:
    """Return whether the forward of `args` saves, after its input, only weights and biases, and these uncopied."""
    tokens, weight = args[0] if args else None, next(linear.parameters(), None)
    if type(tokens) is not torch.Tensor or type(weight) is not torch.nn.Parameter:
        return False
    # Otherwise the layer casts its weights and saves the copies.
    is_as_it_is = weight.dtype == tokens.dtype and not torch.is_autocast_enabled(tokens.device.type)
    return is_as_it_is and not _will_quantize(linear)


def _will_quantize(linear: Any) -> bool:
    """Return whether `linear` will quantize, or TransformerEngine's debug mode will inspect its tensors."""
    if _TE not in sys.modules:
        return False
    try:
        from megatron.core.fp8_utils import FP8GlobalStateManager
    except ImportError:  # moved in another version: assume that it quantizes
        return True
    debugging = getattr(sys.modules.get(_DEBUGGING), "TEDebugState", None)
    if debugging is not None and debugging.debug_enabled:
        return True
    is_context_quantized = FP8GlobalStateManager.is_fp8_enabled()
    # Megatron-core's subclass may override the enclosing FP8 context.
    will = getattr(linear, "will_execute_quantized", None)
    return bool(will(is_context_quantized) if will is not None else is_context_quantized)
