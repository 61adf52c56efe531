# SPDX-License-Identifier: Apache-2.0
"""Other settings of CUDA's caching allocator than the default, which is read once in a process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAIN = """
import torch
from torch import nn
from offload_engine import OffloadConfig, enable_activation_offloading

def train(offload):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8))).cuda()
    handle = None
    if offload:
        config = OffloadConfig(min_tensor_bytes=0)
        handle = enable_activation_offloading(model, "none", layers=list(model), config=config)
    found = []
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(1024 + 512 * (step % 3), 1024, device="cuda")
        model.zero_grad()
        loss = model(x).pow(2).sum()
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in model.parameters())]
    return found, handle

plain, _ = train(False)
offloaded, handle = train(True)
assert all(map(torch.equal, plain, offloaded))
assert handle.stats.copied_out_bytes > 0 and handle.stats.num_storages_left == 0
handle.remove()
"""


@pytest.mark.parametrize("settings", ["expandable_segments:True", "backend:cudaMallocAsync"])
def test_losses_and_gradients_are_equal_to_the_last_bit(settings: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTORCH_CUDA_ALLOC_CONF": settings}
    ended = subprocess.run([sys.executable, "-c", TRAIN], env=environment, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 0, ended.stderr[-2000:]
