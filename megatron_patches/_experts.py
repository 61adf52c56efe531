"""Linear layers of all experts in one call, as TransformerEngine's GroupedLinear, of which the engine takes the input.

Such a layer saves each expert's part of its input, and the weight and the bias of each: 192 tensors with 64 experts.
Through hooks that takes the host ten times as long as all else that an engine does for a layer. Told to save its input
as it is (`save_original_input`, which megatron-core sets, too, where it recomputes), the layer saves one tensor of it,
and in front of all others: behind that one the hooks pause. With quantisation it saves something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def linears_of_experts(chunk: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Those submodules of a model chunk that can be told to save their input as it is."""
    for module in chunk.modules():
        if hasattr(module, "num_gemms") and hasattr(module, "save_original_input"):
            yield module


def will_quantize(linear: Any) -> bool:
    """Whether the forward that begins quantises the input of such a layer."""
    try:
        from megatron.core.fp8_utils import FP8GlobalStateManager
    except ImportError:  # no TransformerEngine, none of its layers
        return False
    is_context_quantized = FP8GlobalStateManager.is_fp8_enabled()
    # Megatron-core's subclass may be told otherwise than its surroundings.
    will = getattr(linear, "will_execute_quantized", None)
    return bool(will(is_context_quantized) if will is not None else is_context_quantized)
