# SPDX-License-Identifier: Apache-2.0
"""The rows for machines without a GPU: they go on, do what they say, and come off without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_patches import apply_cpu_support

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@pytest.fixture
def applied() -> Iterator[None]:
    with apply_cpu_support():
        yield


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
