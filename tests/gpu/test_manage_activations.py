# SPDX-License-Identifier: Apache-2.0
"""`manage_activations` on a GPU: the same bits, less memory, on any stream, and with compiled layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload_engine import ManagedActivations, OffloadConfig, manage_activations
from tests.checkpointed import all_equal
from tests.gpu.parity import run_twice

WIDTH, ROWS, DEPTH = 1024, 4096, 12
TENSOR_BYTES = WIDTH * ROWS * 2

Region = Callable[[], AbstractContextManager[Any]]
Call = Callable[[nn.Sequential, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).view(4, ROWS // 4, 3, 16, WIDTH // 16).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(ROWS, WIDTH)
        x = x + F.dropout(attended, 0.1)
        return x + self.down(F.gelu(self.up(x)))


@pytest.fixture
def compiler() -> Iterator[None]:
    """Nothing compiled before; no graph is left that keeps its memory."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def activations() -> Iterator[ManagedActivations]:
    activations = manage_activations(group_bytes=2 * TENSOR_BYTES)
    yield activations
    activations.close()


def make_model(depth: int = DEPTH) -> nn.Sequential:
    torch.manual_seed(7)
    with torch.device("cuda"):
        return nn.Sequential(*[Block() for _ in range(depth)]).bfloat16()


def train(region: Region, call: Call, model: nn.Sequential | None = None) -> list[torch.Tensor]:
    model = model or make_model()
    losses = []
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)
        with region():
            loss = call(model, x).float().square().mean()
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *[p.grad for p in model.parameters() if p.grad is not None]]


def plain(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    return model(x)


def not_reentrant(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def reentrant(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_() * 1
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=True)
    return x


def on_two_streams(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    for layer in model:
        side.wait_stream(main)
        with torch.cuda.stream(side):
            x = layer(x)
        main.wait_stream(side)
        x = x.sin()
    return x


def under_autocast(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", torch.float16):
        return model(x)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("call", [plain, not_reentrant, reentrant, on_two_streams, under_autocast])
def test_parity(call: Call, activations: ManagedActivations) -> None:
    expected = run_twice(lambda: train(nullcontext, call), all_equal)
    assert all_equal(expected, train(lambda: activations, call))
    assert activations.stats.copied_out_bytes > 0 and not activations.engine.has_saved


@pytest.mark.slow
@pytest.mark.usefixtures("deterministic", "compiler")
def test_parity_of_compiled_layers(activations: ManagedActivations) -> None:
    pytest.importorskip("triton", reason="inductor needs triton on a GPU: pip install triton")

    def compiled(region: Region) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model = make_model(depth=4)
        for layer in model:
            layer.compile()
        return train(region, plain, model)

    expected = run_twice(lambda: compiled(nullcontext), all_equal)
    assert all_equal(expected, compiled(lambda: activations))
    assert activations.stats.copied_out_bytes > 0


@pytest.mark.skipif(
    torch.cuda.device_count() < 2,
    reason=f"needs 2 GPUs of one machine, one of which is not current; there are {torch.cuda.device_count()}",
)
def test_a_gpu_that_is_not_the_current_one() -> None:
    """The default stream has the same handle on all of them."""
    device = torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256, device=device) for _ in range(8)))
    batch = torch.randn(1024, 256, device=device)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(batch).sigmoid().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    offload = manage_activations(model, OffloadConfig(min_tensor_bytes=1), group_bytes=1 << 20)
    with offload:
        moved = gradients()
    assert offload.stats.copied_in_bytes > 0 and all_equal(plain, moved)
    offload.close()
