# SPDX-License-Identifier: Apache-2.0
"""What rehearsals rest on: hollow tensors, with the sizes of a real step and no memory, and machines by name."""

from __future__ import annotations

import gc
import resource
from pathlib import Path

import pytest
import torch

from offload_engine.planning.clocks import Link
from offload_engine.planning.hardware import find_hardware, with_speed
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
        hollow.run = lambda milliseconds, name, ran=ran: ran.append(milliseconds)  # type: ignore[misc]
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


def test_kernels_of_a_gpu_that_is_twice_as_fast_as_its_rates_take_half_as_long() -> None:
    spent = []
    for machine in (find_hardware("h200"), with_speed(find_hardware("h200"), 2.0)):
        ran: list[float] = []
        hollow = HollowTensors(KernelCosts(machine), 100.0)
        hollow.run = lambda milliseconds, name, ran=ran: ran.append(milliseconds)  # type: ignore[misc]
        with hollow, torch.no_grad():
            x = torch.empty(64, 64)
            (x @ x) + x
        spent.append(ran)
    assert spent[0] == pytest.approx([2 * milliseconds for milliseconds in spent[1]]) and len(spent[0]) == 2


# -- machines by name, from the table of the package and from a file of the user --------------------------------------


def test_a_name_with_a_number_is_so_many_gpus_of_a_host() -> None:
    one, eight = find_hardware("h200"), find_hardware("h200x8")
    assert (one.num_gpus, eight.num_gpus) == (1, 8)
    assert (one.gpu_bytes, one.source) == (eight.gpu_bytes, "measured")
    assert find_hardware("a100-80x4").num_gpus == 4  # the number of the name is none of GPUs
    with pytest.raises(ValueError, match=r"'h201x8' is unknown hardware; known are a100-40, .*h200.*--hardware-file"):
        find_hardware("h201x8")


@pytest.mark.parametrize(
    ("num_gpus", "is_both_ways", "link"),
    [
        (1, True, Link(50.7, 50.7)),
        (1, False, Link(55.3, 55.4)),
        (8, True, Link(14.5, 14.5)),
        (4, True, Link(29.0, 29.0)),
        (2, False, Link(55.3, 55.4)),  # no faster than alone
    ],
)
def test_gpus_that_copy_at_once_share_the_host(num_gpus: int, is_both_ways: bool, link: Link) -> None:
    assert find_hardware("h200x8").link(num_gpus, is_both_ways=is_both_ways) == link


def test_a_users_file_changes_and_adds_machines(tmp_path: Path) -> None:
    table = tmp_path / "mine.toml"
    table.write_text("[h200]\nhost_gib = 500\n")
    assert find_hardware("h200x8", table).host_gib == 500
    assert find_hardware("h200x8", table).gpu_gib == find_hardware("h200").gpu_gib
    rows = Path("offload_engine/planning/hardware.toml").read_text().partition("[h100]")[2].partition("\n[")[0]
    table.write_text(f'["box x2"]\n{rows}')
    assert find_hardware("box x2", table).num_gpus == 1  # a name of the table comes before the number
    assert find_hardware("box x2x4", table).num_gpus == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[h200]\nspeed = 3\n", "hardware h200: speed is not a value of a machine"),
        ("[h201]\ngpu_gib = 3\n", r"hardware h201: \w+ is missing"),
        ("[h200]\ngpu_gib = -1\n", "hardware h200: gpu_gib must be a number above 0, got -1"),
        ("[h200]\nsource = 'guess'\n", "source must be one of measured, datasheet"),
        ("h200 = 3\n", r"h200 must be a machine: \[h200\]"),
        ("[h200\n", "is not a TOML file"),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, text: str, message: str) -> None:
    table = tmp_path / "mine.toml"
    table.write_text(text)
    with pytest.raises(ValueError, match=message):
        find_hardware("h201" if "h201" in text else "h200", table)
