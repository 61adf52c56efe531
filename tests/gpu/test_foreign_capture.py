# SPDX-License-Identifier: Apache-2.0
"""Captures of CUDA graphs around offloaded modules end in a sentence, and the next step outside of them is right."""

from __future__ import annotations

import pytest
import torch

from offload_engine import OffloadConfig, OffloadEngine, OffloadError, enable_activation_offloading, group_start

CONFIG = OffloadConfig(min_tensor_bytes=1)


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4))
    ).cuda()


def gradients(model: torch.nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(inputs).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.usefixtures("deterministic")
def test_a_graph_of_a_forward() -> None:
    model, inputs = make_model(), torch.randn(32, 64, device="cuda")
    expected = gradients(model, inputs)
    handle = enable_activation_offloading(model, "none", config=CONFIG, layers=list(model))
    gradients(model, inputs)
    with pytest.raises(OffloadError, match="capture of a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model(inputs)
    got = gradients(model, inputs)
    assert len(got) == len(expected) and all(map(torch.equal, got, expected))
    assert handle.stats.num_offloaded_groups > 0
    handle.remove()


@pytest.mark.usefixtures("deterministic")
def test_graphed_callables() -> None:
    layer = torch.nn.Linear(64, 64).cuda()
    engine = OffloadEngine(CONFIG)

    class Bracketed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            chunk = engine.active_chunk
            return self.layer(hidden if chunk is None else group_start(hidden, chunk, name="layer"))

    hidden = torch.randn(8, 64, device="cuda", requires_grad=True)
    with pytest.raises(OffloadError, match="group 'layer' begins inside the capture"), engine.iteration():
        engine.start_chunk()
        torch.cuda.make_graphed_callables(Bracketed(), (hidden,), num_warmup_iters=0)
    torch.cuda.synchronize()
    engine.close()
