# SPDX-License-Identifier: Apache-2.0
"""Hollow tensors: the sizes of a real step, no contents, no memory; what is allocated and how long it takes."""

from __future__ import annotations

import gc
import resource

import pytest
import torch

from offload_engine.planning.hardware import find_hardware
from offload_engine.rehearsal.attention import fused_attention
from offload_engine.rehearsal.costs import KernelCosts
from offload_engine.rehearsal.tensors import HollowTensors

MIB = 1 << 20


@pytest.fixture
def hollow() -> HollowTensors:
    return HollowTensors(KernelCosts(find_hardware("h200")), 100.0)


def test_nothing_large_is_touched(hollow: HollowTensors) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with hollow:
        linear = torch.nn.Linear(8192, 8192, bias=False)
        linear(torch.randn(4096, 8192)).relu().sum().backward()
    assert linear.weight.grad is not None and linear.weight.grad.shape == (8192, 8192)
    assert hollow.allocated.nbytes >= 2 * 256 * MIB
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024  # KiB


def test_bytes_are_counted_until_their_storage_is_freed(hollow: HollowTensors) -> None:
    allocated = hollow.allocated
    with hollow:
        x = torch.empty(MIB, dtype=torch.uint8)
        view = x[10:]
        y = x.float()
        assert allocated.nbytes == 5 * MIB
        del x, y
        gc.collect()
        assert allocated.nbytes == MIB  # the view holds it
        view.untyped_storage().resize_(0)
        allocated.note(view.untyped_storage())
        assert (allocated.nbytes, allocated.peak_bytes) == (0, 5 * MIB)
        allocated.reset_peak()
        small = torch.empty(1, dtype=torch.uint8)
        assert allocated.peak_bytes == 512  # as the allocator of GPUs rounds
        del small


def test_attention_whose_heads_share_keys_takes_as_long(hollow: HollowTensors) -> None:
    """Transformers leaves it to the kernel where there is a GPU; torch counts operations of as many heads only."""
    times = []
    for num_heads in (4, 16):
        ran: list[float] = []

        def run(milliseconds: float, name: str, ran: list[float] = ran) -> None:
            ran.append(milliseconds)

        hollow.run = run
        with hollow, fused_attention():
            query = torch.empty(1, 16, 4096, 64, dtype=torch.bfloat16, requires_grad=True)
            keys = torch.empty(1, num_heads, 4096, 64, dtype=torch.bfloat16, requires_grad=True)
            attend = torch.nn.functional.scaled_dot_product_attention
            attend(query, keys, keys, is_causal=True, enable_gqa=num_heads < 16).sum().backward()
        times.append(sorted(ran)[-2:])
    assert times[0] == times[1] and times[0][0] > 0.05


def test_integers_are_computed_from_integers_and_zero_from_floats(hollow: HollowTensors) -> None:
    with hollow:
        places = torch.arange(12)
        chosen = torch.zeros(6, 4, dtype=torch.bool)
        chosen[places // 2, places % 4] = True
        assert chosen.sum(0).tolist() == [3, 3, 3, 3]
        assert torch.empty(6, 4).masked_select(chosen).shape == (12,)
        x = torch.ones(8, 4)
        assert x.argmax(1).tolist() == [0] * 8 and x.sum().item() == 0


def test_a_fused_function_allocates_its_result_only(hollow: HollowTensors) -> None:
    def gated(x: torch.Tensor) -> torch.Tensor:
        return x * x.sigmoid() * 2 + 1

    names: list[str] = []
    hollow.run = lambda milliseconds, name: names.append(name)
    with hollow, torch.no_grad():
        x = torch.empty(MIB)
        hollow.allocated.reset_peak()
        out = hollow.fused(gated)(x)
        assert out.shape == x.shape and hollow.allocated.peak_bytes == 8 * MIB
    assert names == ["gated"]


def test_kernels_take_the_longer_of_operations_and_bytes(hollow: HollowTensors) -> None:
    spent: list[float] = []
    hollow.run = lambda milliseconds, name: spent.append(milliseconds)
    with hollow, torch.no_grad():
        x = torch.empty(8192, 8192, dtype=torch.bfloat16)
        x @ x
        x + x
        q = torch.empty(1, 16, 4096, 128, dtype=torch.bfloat16)
        for is_causal in (False, True):
            torch.ops.aten._scaled_dot_product_flash_attention(q, q, q, 0.0, is_causal)
    product, addition, attention, causal_attention = spent
    hardware = find_hardware("h200")
    assert product == pytest.approx(2 * 8192**3 / hardware.bf16_tflops / 1e9, rel=0.01)
    assert addition == pytest.approx(3 * 128 * MIB / hardware.memory_gbps / 1e6, rel=0.05)
    assert attention == pytest.approx(2 * causal_attention, rel=0.05)
