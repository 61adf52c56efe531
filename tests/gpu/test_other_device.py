# SPDX-License-Identifier: Apache-2.0
"""An engine on a GPU that is not the current one: the default stream has the same handle on all of them."""

from __future__ import annotations

import pytest
import torch

from offload_engine import OffloadConfig, manage_activations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 2,
        reason=f"needs 2 GPUs of one machine, one of which is not current; there are {torch.cuda.device_count()}",
    ),
]


def test_gradients_are_those_without_offload() -> None:
    device = torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, device=device) for _ in range(8)))
    batch = torch.randn(1024, 256, device=device)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        model(batch).sigmoid().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    plain = gradients()
    offload = manage_activations(model, OffloadConfig(min_tensor_bytes=1), group_bytes=1 << 20)
    with offload:
        moved = gradients()
    assert offload.stats.copied_in_bytes > 0
    offload.close()
    assert all(torch.equal(a, b) for a, b in zip(plain, moved, strict=True))
