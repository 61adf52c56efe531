"""Linear layers of all experts in one call, as TransformerEngine's GroupedLinear, of which the engine takes the input.

Such a layer saves each expert's part of its input, and the weight and the bias of each: 192 tensors with 64 experts,
which take the host thirty times as long through hooks as one does. Told to save its input as it is
(`save_original_input`, which megatron-core sets, too, where it recomputes), the layer saves one tensor of it, in front
of all others: behind that one the hooks may pause.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch

_TE = "transformer_engine"
_DEBUGGING = f"{_TE}.debug.pytorch.debug_state"  # imported by TransformerEngine's modules, where it has any
_KNOWN = ("megatron.core.", f"{_TE}.")


def linears_of_experts(chunk: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Those submodules of a model chunk that can be told to save their input as it is.

    Of classes whose forward is somebody else's it is not known what else they save; those of wrappers, which pass on
    the attributes of what they wrap, neither.
    """
    for module in chunk.modules():
        own = vars(module)
        if "num_gemms" in own and "save_original_input" in own and module.forward.__module__.startswith(_KNOWN):
            yield module


def saves_only_weights_behind(linear: Any, args: tuple[Any, ...]) -> bool:
    """Whether the forward that begins with `args` saves weights and biases alone, and as they are, behind its input."""
    tokens, weight = args[0] if args else None, next(linear.parameters(), None)
    if type(tokens) is not torch.Tensor or type(weight) is not torch.nn.Parameter:
        return False
    # Else it casts, and saves copies of its weights.
    is_as_it_is = weight.dtype == tokens.dtype and not torch.is_autocast_enabled(tokens.device.type)
    return is_as_it_is and not _will_quantize(linear)


def _will_quantize(linear: Any) -> bool:
    """Or look at what it would quantise, as TransformerEngine's debugging does, in forward and in backward."""
    if _TE not in sys.modules:
        return False
    try:
        from megatron.core.fp8_utils import FP8GlobalStateManager
    except ImportError:  # of a version that has it elsewhere
        return True
    debugging = getattr(sys.modules.get(_DEBUGGING), "TEDebugState", None)
    if debugging is not None and debugging.debug_enabled:
        return True
    is_context_quantized = FP8GlobalStateManager.is_fp8_enabled()
    # Megatron-core's subclass may be told otherwise than its surroundings.
    will = getattr(linear, "will_execute_quantized", None)
    return bool(will(is_context_quantized) if will is not None else is_context_quantized)
