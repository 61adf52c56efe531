# SPDX-License-Identifier: Apache-2.0
"""Estimates how long a kernel takes on a machine: the longer of the times for its operations and for its bytes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from torch.utils.flop_counter import flop_registry

from offload_engine.planning.hardware import Hardware

_ATTENTION: Final = "scaled_dot_product"
_LAUNCH_MS: Final = 0.003
"""Between two kernels."""


class KernelCosts:
    """Estimates the milliseconds of kernels on a machine.

    Args:
        hardware: the machine.
        has_te: attention is TransformerEngine's, not torch's.
    """

    def __init__(self, hardware: Hardware, has_te: bool = False) -> None:
        self._hardware = hardware
        by_te = hardware.attention_tflops, hardware.attention_backward_tflops
        self._attention = by_te if has_te else (hardware.sdpa_tflops, hardware.sdpa_backward_tflops)

    def milliseconds(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, tensors: Iterable[torch.Tensor]
    ) -> float:
        """Return how long one operator takes.

        Args:
            func: operator of aten.
            args: positional arguments of the call.
            kwargs: keyword arguments of the call.
            out: its result.
            tensors: tensors that it reads and writes.
        """
        by_bytes = self.milliseconds_of_bytes(tensors)
        flops = self._operations(func, args, kwargs, out)
        by_flops = self._at_speed(flops / self._rate(func, args) / 1e9) if flops else 0.0
        return max(by_bytes, by_flops)

    def milliseconds_of_bytes(self, tensors: Iterable[torch.Tensor]) -> float:
        """Return how long a kernel takes to read and write these tensors."""
        return self._at_speed(sum(_touched(tensor) for tensor in tensors) / self._hardware.memory_gbps / 1e6)

    def _at_speed(self, milliseconds: float) -> float:
        """Return how long a kernel takes whose work takes so long by the rates."""
        return (milliseconds + _LAUNCH_MS) / self._hardware.speed

    def _operations(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> float:
        packet = func._overloadpacket
        count = flop_registry.get(packet)
        if count is None:
            return 0.0
        if _ATTENTION not in packet.__name__:
            return float(count(*args, **kwargs, out_val=out))
        operations = float(count(*_with_all_heads(args), **kwargs, out_val=out))
        return operations / 2 if _is_causal(func, args, kwargs) else operations

    def _rate(self, func: Any, args: tuple[Any, ...]) -> float:
        """Return the rate of this kernel, in 10^12 operations a second."""
        name = func._overloadpacket.__name__
        if _ATTENTION in name:
            return self._attention["backward" in name]
        first = next((arg for arg in args if isinstance(arg, torch.Tensor)), None)
        is_full = first is not None and first.dtype == torch.float32
        return self._hardware.bf16_tflops / (2 if is_full else 1)  # TF32 has half the rate


def _touched(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor, without repetitions by broadcasting."""
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


def _with_all_heads(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of attention, with shapes for tensors: keys and values as if each query had its own heads.

    Torch counts these only; the kernel computes as much where heads share keys.
    """
    num_heads = max(arg.shape[1] for arg in args if isinstance(arg, torch.Tensor) and arg.dim() == 4)
    return tuple(_shape_with(num_heads, arg) if isinstance(arg, torch.Tensor) else arg for arg in args)


def _shape_with(num_heads: int, tensor: torch.Tensor) -> torch.Size:
    shape = tensor.shape
    return torch.Size((shape[0], num_heads, *shape[2:])) if tensor.dim() == 4 else shape


def _is_causal(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    names = [argument.name for argument in func._schema.arguments]
    if "is_causal" not in names:
        return False
    position = names.index("is_causal")
    return bool(kwargs.get("is_causal", args[position] if position < len(args) else False))
