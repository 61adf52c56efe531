# SPDX-License-Identifier: Apache-2.0
"""The checkers checked: each wait that a small program or a captured graph lacks is noticed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offload_engine._devices.base import HostRegion
from tests import graph_order as order
from tests.adversarial import AdversarialDevice, AdversarialEvent, AdversarialStream

NBYTES = 64
NUMEL = NBYTES // 4


@pytest.fixture(params=[None, 0, 1, 2], ids=lambda seed: f"seed={seed}")
def device(request: pytest.FixtureRequest) -> Iterator[AdversarialDevice]:
    device = AdversarialDevice(request.param)
    with device.observe_compute():
        yield device
    device.close()


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def as_floats(buffer: torch.Tensor) -> torch.Tensor:
    return torch.empty(0).set_(buffer.untyped_storage(), 0, (NUMEL,), (1,))


class Program:
    """Copies a tensor out and in again. `skip` names the one wait that is left out."""

    def __init__(self, device: AdversarialDevice, skip: str | None = None) -> None:
        self.device = device
        self.skip = skip
        self.out_stream = device.new_stream("out")
        self.in_stream = device.new_stream("in")
        self.main = device.current_stream()
        self.region = HostRegion(device.new_slab(NBYTES), 0, NBYTES)

    def wait(self, name: str, stream: AdversarialStream, event: AdversarialEvent) -> None:
        if name != self.skip:
            self.device.wait_event(stream, event)

    def copy_out(self, tensor: torch.Tensor, earlier: AdversarialEvent | None = None) -> AdversarialEvent:
        self.wait("produce", self.out_stream, self.device.record_event(self.main))
        if earlier is not None:
            self.wait("lease", self.out_stream, earlier)
        return self.device.copy_out(self.out_stream, [(as_bytes(tensor), self.region)])

    def drop(self, tensor: torch.Tensor, copied_out: AdversarialEvent) -> None:
        """The caller drops its own reference afterwards."""
        self.wait("drop", self.main, copied_out)
        self.device.on_release(as_bytes(tensor))

    def copy_in(self, copied_out: AdversarialEvent) -> tuple[torch.Tensor, AdversarialEvent]:
        self.wait("copied_out", self.in_stream, copied_out)
        buffer = self.device.allocate(NBYTES, self.main)
        self.wait("allocate", self.in_stream, self.device.record_event(self.main))
        return buffer, self.device.copy_in(self.in_stream, [(self.region, buffer)])

    def reads(self, value: float, buffer: torch.Tensor, copied_in: AdversarialEvent) -> bool:
        """Return whether compute reads `value` throughout; False: nowhere."""
        self.wait("use", self.main, copied_in)
        equal = (as_floats(buffer) * 1).eq(value)
        assert equal.all() == equal.any()
        return bool(equal.all())

    def round_trip(self, value: float, earlier: AdversarialEvent | None = None) -> tuple[bool, AdversarialEvent]:
        """Return whether the model reads `value` in the end, and the event of the copy-in."""
        tensor = torch.full((NUMEL,), value)
        copied_out = self.copy_out(tensor, earlier)
        self.drop(tensor, copied_out)
        del tensor
        buffer, copied_in = self.copy_in(copied_out)
        is_right = self.reads(value, buffer, copied_in)
        self.device.on_release(buffer)
        return is_right, copied_in


def test_the_correct_program_gives_the_right_numbers_and_no_hazard(device: AdversarialDevice) -> None:
    program = Program(device)
    is_right, copied_in = program.round_trip(3.0)
    assert is_right and program.round_trip(5.0, earlier=copied_in)[0]
    assert device.hazards == [] and device.num_copies == {"out": 2, "in": 2}
    # The wait before the drop orders the copy-in through compute.
    assert Program(device, skip="copied_out").round_trip(3.0)[0] and device.hazards == []


@pytest.mark.parametrize(
    ("skip", "hazard"),
    [
        *((skip, "") for skip in ("produce", "allocate", "use")),
        # The copy-in still waits for the copy-out, but the source may be overwritten while it is read.
        ("drop", "released"),
        ("copied_out", "reads host bytes not ordered after copy-out"),
        ("lease", "overwrites host bytes not ordered after copy-in"),
        ("drop unknown to compute", "was dropped"),
        ("drop unknown to compute behind the copy", "was dropped"),
    ],
)
def test_a_missing_wait_gives_a_wrong_number_and_a_hazard(device: AdversarialDevice, skip: str, hazard: str) -> None:
    if skip == "drop unknown to compute":
        device = AdversarialDevice()  # whose copies wait until something asks for them
    program, tensor = Program(device, skip), torch.full((NUMEL,), 3.0)
    if skip in ("produce", "allocate", "use", "drop"):
        del tensor
        assert not program.round_trip(3.0)[0]
    else:
        copied_out = program.copy_out(tensor)
        if skip == "lease":
            program.drop(tensor, copied_out)
        elif skip == "drop unknown to compute behind the copy":
            device.drain()
        if skip.startswith("drop"):
            del tensor
        buffer, copied_in = program.copy_in(copied_out)
        if skip == "lease":
            program.copy_out(torch.full((NUMEL,), 5.0), earlier=copied_in)
        assert not program.reads(3.0, buffer, copied_in)
    assert any(hazard in found for found in device.hazards), device.hazards


# -- the offline check of captured graphs -----------------------------------------------------------------------------


DUMP = Path(__file__).parents[1] / "artifacts" / "graph_qkv.json.gz"
"""Of a captured step: 3 layers, 3 microbatches, QKV linear layers offloaded; H200, CUDA 13, torch 2.11."""


def test_a_graph_from_a_gpu_is_ordered_and_each_edge_that_matters_is_missed() -> None:
    with gzip.open(DUMP, "rt") as file:
        dump = json.load(file)
    nodes, edges = dump["nodes"], [(source, target) for source, target in dump["edges"]]
    found, taken = order.check(nodes, edges), order.take_out(nodes, edges)
    assert found.is_right and (found.host_pairs, found.device_pairs) == (25, 289)
    assert found.unread_kernels == 108  # matrix products: their tensor maps hide the addresses
    assert len(taken.noticed) == 19 and taken.unnoticed == []
    for edge in taken.superfluous:  # alone; they may stand in for each other
        assert order.reachable(len(nodes), edges) == order.reachable(len(nodes), [e for e in edges if e != edge])
