# SPDX-License-Identifier: Apache-2.0
"""The checker checked: each wait left out of a small correct program gives a wrong number and a hazard, every time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from offload_engine._devices.base import HostRegion
from tests.adversarial import AdversarialDevice, AdversarialEvent, AdversarialSlab, AdversarialStream

NBYTES = 64
NUMEL = NBYTES // 4
Earlier = AdversarialEvent | None


@pytest.fixture(params=[None, 0, 1, 2, 3, 4], ids=lambda seed: f"seed={seed}")
def device(request: pytest.FixtureRequest) -> Iterator[AdversarialDevice]:
    device = AdversarialDevice(request.param)
    with device.observe_compute():
        yield device
    device.close()


def full(value: float) -> torch.Tensor:
    return torch.full((NUMEL,), value)


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
        self.slab: AdversarialSlab = device.new_slab(NBYTES)
        self.region = HostRegion(self.slab, 0, NBYTES)

    def wait(self, name: str, stream: AdversarialStream, event: AdversarialEvent) -> None:
        if name != self.skip:
            self.device.wait_event(stream, event)

    def expects(self, hazard: str) -> None:
        assert any(hazard in found for found in self.device.hazards), self.device.hazards

    def copy_out(self, tensor: torch.Tensor, earlier: Earlier = None) -> AdversarialEvent:
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

    def use(self, buffer: torch.Tensor, copied_in: AdversarialEvent) -> torch.Tensor:
        self.wait("use", self.main, copied_in)
        return as_floats(buffer) * 1

    def round_trip(self, value: float, earlier: Earlier = None) -> tuple[torch.Tensor, AdversarialEvent]:
        """Return what the model reads in the end (it should be `value` throughout), and the event of the copy-in."""
        tensor = full(value)
        copied_out = self.copy_out(tensor, earlier)
        self.drop(tensor, copied_out)
        del tensor
        buffer, copied_in = self.copy_in(copied_out)
        result = self.use(buffer, copied_in)
        self.device.on_release(buffer)
        return result, copied_in


def test_the_correct_program_gives_the_right_numbers_and_no_hazard(device: AdversarialDevice) -> None:
    program = Program(device)
    first, copied_in = program.round_trip(3.0)
    second, _ = program.round_trip(5.0, earlier=copied_in)
    assert first.eq(3.0).all() and second.eq(5.0).all()
    assert device.hazards == [] and device.num_copies == {"out": 2, "in": 2}


@pytest.mark.parametrize("skip", ["produce", "drop", "allocate", "use"])
def test_a_missing_wait_gives_a_wrong_number_and_a_hazard(device: AdversarialDevice, skip: str) -> None:
    program = Program(device, skip)
    result, _ = program.round_trip(3.0)
    if skip == "drop":
        # The copy-in still waits for the copy-out, but the source may be overwritten while it is read.
        program.expects("released")
    assert not result.eq(3.0).any(), "the number should be wrong"
    assert device.hazards


def test_a_copy_in_not_ordered_after_its_copy_out(device: AdversarialDevice) -> None:
    # With the wait before the drop it is ordered through compute, so both have to go to lose the order.
    result, _ = Program(device, skip="copied_out").round_trip(3.0)
    assert result.eq(3.0).all() and device.hazards == []

    tensor, program = full(4.0), Program(device, skip="copied_out")
    result = program.use(*program.copy_in(program.copy_out(tensor)))
    assert not result.eq(4.0).any()
    program.expects("reads host bytes not ordered after copy-out")


def test_a_lease_lent_again_before_its_copy_in_ran(device: AdversarialDevice) -> None:
    program, tensor, other = Program(device, skip="lease"), full(3.0), full(5.0)
    copied_out = program.copy_out(tensor)
    program.drop(tensor, copied_out)
    buffer, copied_in = program.copy_in(copied_out)
    program.copy_out(other, earlier=copied_in)
    assert not program.use(buffer, copied_in).eq(3.0).any()
    program.expects("overwrites host bytes not ordered after copy-in")


@pytest.mark.parametrize("has_run", [False, True])
def test_a_source_dropped_unknown_to_compute(device: AdversarialDevice, has_run: bool) -> None:
    if not has_run:
        device = AdversarialDevice()  # whose copies wait until something asks for them
    program, tensor = Program(device), full(3.0)
    copied_out = program.copy_out(tensor)
    if has_run:
        device.drain()  # but nothing on the compute stream is ordered after it
    del tensor
    result = program.use(*program.copy_in(copied_out))
    assert not result.eq(3.0).any()
    program.expects("was dropped")


# -- several compute streams ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_release_must_be_ordered_on_the_stream_whose_pool_gets_the_bytes_or_recorded(
    device: AdversarialDevice, is_recorded: bool
) -> None:
    program = Program(device)
    with device.compute_stream("comm") as comm:
        tensor = full(3.0)
    if is_recorded:
        device.record_stream(tensor, program.main)
    device.wait_event(program.main, device.record_event(comm))
    program.drop(tensor, program.copy_out(tensor))  # main waits for the copy; comm, whose pool gets the bytes, does not
    del tensor
    device.record_event(comm)
    assert any("released" in hazard for hazard in device.hazards) != is_recorded
    assert is_recorded != bool(device.hazards)


def test_a_use_on_another_stream_must_be_ordered_before_the_drop(device: AdversarialDevice) -> None:
    program = Program(device)
    for is_ordered in (True, False):
        tensor = full(3.0)
        buffer, copied_in = program.copy_in(program.copy_out(tensor))
        with device.compute_stream("comm") as comm:
            device.wait_event(comm, copied_in)
            result = as_floats(buffer) * 1
        if is_ordered:
            device.wait_event(program.main, device.record_event(comm))
        device.wait_event(program.main, copied_in)
        device.wait_event(program.out_stream, copied_in)
        del buffer
        assert result.eq(3.0).all()
        assert bool(device.hazards) is not is_ordered


def test_operations_of_backward_are_seen() -> None:
    device = AdversarialDevice()
    with device.observe_compute():
        program = Program(device, skip="use")
        leaf = torch.ones(NUMEL, requires_grad=True)

        def pack(tensor: torch.Tensor) -> tuple[torch.Tensor, AdversarialEvent]:
            copied_out = program.copy_out(tensor)
            program.drop(tensor, copied_out)
            return program.copy_in(copied_out)

        def unpack(packed: tuple[torch.Tensor, AdversarialEvent]) -> torch.Tensor:
            return as_floats(packed[0])

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            (leaf * 2).exp().sum().backward()
    assert leaf.grad is not None and leaf.grad.isnan().all()
    program.expects("aten::mul on <stream main> reads or writes a buffer")
