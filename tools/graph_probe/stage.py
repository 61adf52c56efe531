"""A dense stage of a GPT, its step, and what is measured of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from offload_engine.schedule import Action, no_pipelining, one_forward_one_backward

MIB = 1 << 20


@dataclass(frozen=True)
class Shape:
    """Of the stage, as setup a of docs/results/2026-11-23_h200.md, but without embedding and head."""

    layers: int = 8
    hidden: int = 4096
    ffn: int = 14336
    heads: int = 32
    seq: int = 8192
    microbatches: int = 4
    depth: int = 2
    """Forwards before the first backward, as on a rank with `depth - 1` stages behind it."""
    device: str = "cuda"

    def actions(self) -> list[Action]:
        """Return the order of forwards and backwards."""
        if self.depth == 1:
            return no_pipelining(self.microbatches)
        return one_forward_one_backward(self.depth, 0, self.microbatches)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        seq, width = hidden.shape
        q, k, v = self.qkv(hidden).view(1, seq, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        context = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(context.transpose(1, 2).reshape(seq, width))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.fc2 = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.fc2(functional.gelu(self.fc1(hidden)))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(shape.hidden, eps=1e-5), nn.RMSNorm(shape.hidden, eps=1e-5)
        self.attention, self.mlp = Attention(shape), Mlp(shape)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.norm1(hidden))
        return hidden + self.mlp(self.norm2(hidden))


PARTS: dict[str, Callable[[Layer], nn.Module]] = {
    "qkv": lambda layer: layer.attention.qkv,
    "mlp": lambda layer: layer.mlp,
    "layer": lambda layer: layer,
}
"""What may be offloaded of each layer: what this module saves."""


class Stage(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Job:
    """The stage with static gradients and inputs; a step adds up the gradients of all microbatches."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        torch.manual_seed(0)
        with torch.device(shape.device):
            self.stage = Stage(shape).to(torch.bfloat16)
        generator = torch.Generator(shape.device).manual_seed(1)
        size = (shape.seq, shape.hidden)
        self.inputs = [
            torch.randn(size, generator=generator, device=shape.device, dtype=torch.bfloat16)
            for _ in range(shape.microbatches)
        ]
        self.parameters = list(self.stage.parameters())
        for parameter in self.parameters:
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02, generator=generator)
            parameter.grad = torch.zeros_like(parameter)
        self.grads = [parameter.grad for parameter in self.parameters]
        self.losses: list[torch.Tensor] = []

    def zero(self) -> None:
        torch._foreach_zero_(self.grads)

    def loss(self, out: torch.Tensor) -> torch.Tensor:
        return out.float().square().mean()

    def step(self, iteration: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        """Run forwards and backwards in the order of the schedule; `losses` are those of this step."""
        self.zero()
        losses: dict[int, torch.Tensor] = {}
        with iteration():
            for kind, chunk in self.shape.actions():
                if kind == "F":
                    losses[chunk.microbatch] = self.loss(self.stage(self.inputs[chunk.microbatch]))
                else:
                    losses[chunk.microbatch].backward()
                    losses[chunk.microbatch] = losses[chunk.microbatch].detach()
        self.losses = [losses[microbatch] for microbatch in sorted(losses)]

    def bits(self) -> dict[str, Any]:
        """Return the losses, and numbers that differ if one bit of a gradient does."""
        return {
            "losses": [loss.item() for loss in self.losses],
            "grads": {name: fingerprint(p.grad) for name, p in self.stage.named_parameters() if p.grad is not None},
        }


def fingerprint(tensor: torch.Tensor) -> int:
    """Return a number of all bits of a tensor, computed where it is."""
    words = tensor.detach().reshape(-1).view(torch.int16)
    total = 0
    for number, part in enumerate(words.split(1 << 24)):
        weights = torch.arange(part.numel(), device=part.device, dtype=torch.int64) * 0x9E3779B1 + 0x85EBCA77
        total = (total * 31 + number + int((part.to(torch.int64) * weights).sum().item())) % (1 << 63)
    return total


def kernels(is_exact: bool = False) -> AbstractContextManager[Any]:
    """Return a context manager in which attention has one kernel.

    Args:
        is_exact: two steps are equal to the last bit. The backward of attention is slower then, because it adds in one
            order; merely warning of kernels that do not, as without it, leaves that backward as it is.
    """
    torch.use_deterministic_algorithms(True, warn_only=not is_exact)
    torch.utils.deterministic.fill_uninitialized_memory = False
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION if torch.cuda.is_available() else SDPBackend.MATH)


def timed(run: Callable[[], object], rounds: int) -> dict[str, Any]:
    """Return times of a step: with the device's work, and until the host is through; in ms, sorted."""
    steps, hosts = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        hosts.append(1e3 * (time.perf_counter() - begin))
        torch.cuda.synchronize()
        steps.append(1e3 * (time.perf_counter() - begin))
    return {
        "step_ms": round(sorted(steps)[len(steps) // 2], 2),
        "host_ms": round(sorted(hosts)[len(hosts) // 2], 3),
        "steps_ms": [round(step, 2) for step in sorted(steps)],
        "hosts_ms": [round(host, 3) for host in sorted(hosts)],
    }


def memory(prefix: str) -> dict[str, int]:
    """Return MiB that the allocator holds, now and at the most."""
    return {
        f"{prefix}_reserved_mib": torch.cuda.memory_reserved() // MIB,
        f"{prefix}_peak_reserved_mib": torch.cuda.max_memory_reserved() // MIB,
        f"{prefix}_peak_allocated_mib": torch.cuda.max_memory_allocated() // MIB,
    }


def pool_segments(pool: Sequence[int]) -> list[tuple[int, int]]:
    """Return address and bytes of each segment that a graph's pool holds."""
    return [
        (segment["address"], segment["total_size"])
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == tuple(pool)
    ]
