# SPDX-License-Identifier: Apache-2.0
"""Selects the device of a front-end's engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offload_engine import OffloadConfig, OffloadEngine
from offload_engine._devices import CpuDevice
from offload_engine.frontends._common.device import _compute_devices, device_for

PLAIN = OffloadConfig(directory="none")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to be a machine with a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def test_a_model_on_the_cpu_stays_there(cuda: None) -> None:
    model = nn.BatchNorm1d(2)
    choices: tuple[list[nn.Module | torch.Tensor], ...] = ([model], [*model.parameters()], [model, torch.ones(2)])
    for parts in choices:
        device = device_for(parts, PLAIN)
        assert isinstance(device, CpuDevice)
        device.close()


def test_without_weights_the_engine_chooses(cuda: None) -> None:
    assert device_for([], PLAIN) is None
    assert device_for([nn.ReLU(), torch.ones(2, device="meta")], PLAIN) is None


def test_model_with_weights_sharded_on_the_cpu_computes_elsewhere() -> None:
    gpu = torch.device("cuda", 1)
    wrapped: Any = nn.Sequential(nn.Linear(2, 2))
    wrapped[0].compute_device = gpu  # as FullyShardedDataParallel has it
    assert list(_compute_devices(wrapped)) == [gpu]
    weight = nn.Parameter(torch.ones(2))
    for kind, device in (("cuda", torch.device("cuda")), ("cpu", torch.device("cpu"))):
        weight.device_mesh = SimpleNamespace(device_type=kind)  # type: ignore[attr-defined]  # as a DTensor has it
        assert list(_compute_devices(weight)) == [device]


@pytest.mark.parametrize("device", ["cuda", 0, torch.device("cpu")], ids=str)
def test_a_device_of_torchs_is_no_device_of_the_engine(device: Any) -> None:
    with pytest.raises(TypeError, match="torch.device. Omit it"):
        OffloadEngine(PLAIN, device)
