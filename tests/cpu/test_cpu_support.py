# SPDX-License-Identifier: Apache-2.0
"""The rows for machines without a GPU: they go on, do what they say, and come off without a trace."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_patches import apply_cpu_support
from megatron_patches._rows.cpu import cpu_rows
from megatron_patches._rows.registry import PatchError
from megatron_patches._rows.without_gpu import CudaWithoutGpu, TorchWithoutGpu

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@pytest.fixture
def applied() -> Iterator[None]:
    with apply_cpu_support():
        yield


def targets() -> dict[str, Any]:
    """Return what each row's target is now."""
    values = {}
    for row in cpu_rows():
        module, _, path = row.target.partition(":")
        *outer, name = path.split(".")
        owner = importlib.import_module(module)
        for part in outer:
            owner = getattr(owner, part)
        values[row.target] = vars(owner).get(name)
    return values


def test_the_rows_come_off_without_a_trace() -> None:
    before = targets()
    with apply_cpu_support() as applied:
        assert len(applied.rows) > 20
        changed = [target for target, value in targets().items() if value is not before[target]]
        assert {row.target for row in applied.rows} >= set(changed)
        with pytest.raises(PatchError, match="already in force"):
            apply_cpu_support()
    assert targets() == before


def test_torch_itself_stays_as_it_is(applied: None) -> None:
    assert not torch.cuda.is_available()
    for call in (lambda: torch.zeros(1, device="cuda"), torch.cuda.current_device):
        with pytest.raises((AssertionError, RuntimeError)):
            call()
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_a_module_sees_the_cpu_in_the_place_of_the_gpu_and_streams_that_do_nothing() -> None:
    stand_in, cuda = TorchWithoutGpu(torch), CudaWithoutGpu()
    for device in ("cuda", stand_in.cuda.current_device()):
        assert stand_in.zeros(2, device=device).device.type == "cpu"
    assert stand_in.tensor([1.0], device="cuda").tolist() == [1.0]
    assert stand_in.Tensor is torch.Tensor and stand_in.nn.Linear is torch.nn.Linear
    stream, event = cuda.Stream(), cuda.Event()
    assert cuda.current_stream() is cuda.default_stream()
    with cuda.stream(stream), cuda.nvtx.range("label"):
        stream.wait_stream(cuda.current_stream())
        event.record(stream)
        event.wait(stream)
    assert stream.record_event(event) is event and stream.query() and event.query()
    cuda.synchronize()


def test_a_sent_tensor_may_be_freed_at_once(applied: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.pipeline_parallel import p2p_communication

    sent = []

    def isend(tensor: torch.Tensor, dst: int, group: object) -> None:
        sent.append(tensor)

    monkeypatch.setattr(torch.distributed, "isend", isend)
    output = torch.ones(4, requires_grad=True)
    p2p_communication._p2p_ops(
        tensor_send_prev=None,
        tensor_recv_prev=None,
        tensor_send_next=output,
        tensor_recv_next=None,
        group=SimpleNamespace(size=lambda: 3, rank=lambda: 0),
        prev_pipeline_rank=2,
        next_pipeline_rank=1,
    )
    output.data = torch.zeros(1)
    assert sent[0].tolist() == [1.0, 1.0, 1.0, 1.0]
    assert not sent[0].requires_grad
