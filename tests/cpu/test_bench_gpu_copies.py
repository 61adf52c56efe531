"""tools/bench_gpu/copies.py: what was on the host, and there only, when the most device memory was allocated."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("tqdm")

from offload_engine import ChunkKey, OffloadConfig, OffloadEngine, ResidencyMeter  # noqa: E402
from offload_engine.schedule import parse_actions  # noqa: E402
from tests.adversarial import AdversarialDevice  # noqa: E402
from tests.cpu.test_bench_gpu import FakeEvent, tools_on_path  # noqa: E402
from tests.engine_state import release_all

with tools_on_path():
    from bench_gpu import contenders, copies, settings

GROUP_BYTES, NUM_GROUPS = 256, 8


def test_the_stretch_with_the_most_memory_counts() -> None:
    peaks = iter((5, 9, 9, 7))
    found = copies.HostAtPeak(lambda: next(peaks))
    for host_bytes in (1, 2, 3, 4):
        found.mark(host_bytes)
    assert (found.peak_allocated_bytes, found.host_bytes) == (9, 2)


def test_a_copy_counts_when_its_twin_on_the_device_is_gone_or_empty() -> None:
    held = copies.HostCopies()
    dropped, emptied, kept = (torch.ones(8) for _ in range(3))
    twins = [tensor.clone() for tensor in (dropped, emptied, kept)]
    for copy, source in zip(twins, (dropped, emptied, kept), strict=True):
        held.add(copy, source)
    assert held.only_bytes == 0
    del dropped, source
    assert held.only_bytes == 32
    emptied.untyped_storage().resize_(0)
    assert held.only_bytes == 64
    held.remove(twins[0])
    held.remove(twins[0])
    assert held.only_bytes == 32
    assert kept.sum() == 8


class Memory:
    """Device memory: what the engine has there, and for a moment what a computation needs besides."""

    def __init__(self) -> None:
        self.meter = ResidencyMeter()
        self._computed_bytes = 0

    def compute(self, nbytes: int) -> None:
        self._computed_bytes = max(self._computed_bytes, self.meter.current_bytes + nbytes)

    def take_peak(self) -> int:
        peak = max(self._computed_bytes, self.meter.peak_bytes)
        self._computed_bytes = 0
        self.meter.reset_peak()
        return peak


class Step:
    """Forward and backward of one chunk, with the forward of another between them; one moment needs the most memory."""

    def __init__(self, peak_moment: int) -> None:
        self.memory = Memory()
        self.device = AdversarialDevice()
        self.engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), self.device, self.memory.meter)
        self.on_host: list[int] = []  # at each moment, by what is saved and what the meter finds on the device
        self._peak_moment = peak_moment
        self._handles: list[object] = []

    def run(self) -> None:
        with self.engine.iteration(parse_actions("F0.0 F0.1 B0.0 B0.1")):
            chunk = self.engine.start_chunk(ChunkKey(0, 0))
            for _ in range(NUM_GROUPS):
                chunk.open_group("group")
                self._handles.append(chunk.tensor_push(torch.ones(GROUP_BYTES, dtype=torch.uint8)))
                self._compute()
                chunk.close_group()
            chunk.end_forward()
            self.engine.start_chunk(ChunkKey(0, 1)).end_forward()
            while self._handles:
                chunk.on_group_commit_backward(chunk.groups[len(self._handles) - 1])
                chunk.tensor_pop(self._handles[-1])
                self._compute()
                self._handles.pop()

    def _compute(self) -> None:
        self.memory.compute(2_000 if len(self.on_host) == self._peak_moment else 1_000)
        self.on_host.append(len(self._handles) * GROUP_BYTES - self.memory.meter.current_bytes)


def test_of_ours_each_storage_counts_as_a_copy() -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), AdversarialDevice())
    own = contenders.Ours(settings.Entry("ours"), [], {})
    own._handle = SimpleNamespace(engine=engine)
    counter = copies.CopyCounter(FakeEvent)
    with own.counting(counter), engine.iteration():
        chunk = engine.start_chunk()
        chunk.open_group("group")
        handles = [chunk.tensor_push(torch.ones(numel)) for numel in (1, 2, 3)]
        chunk.close_group()
        release_all(engine)
        chunk.bulk_reload_group(0)
        assert [chunk.tensor_pop(handle).sum() for handle in handles] == [1, 2, 3]
    for direction in (counter.out, counter.back):
        assert (direction.nbytes, direction.num_copies, len(direction.events)) == (24, 3, 1)
    del handles
    engine.close()


@pytest.mark.parametrize("moment", range(2 * NUM_GROUPS))
def test_bytes_of_ours_are_those_away_at_that_moment(moment: int) -> None:
    """What leaves or returns just before or behind it does not count."""
    step = Step(moment)
    device = step.device
    device.copy_out = device.copy_out  # as the CUDA device has it: the instance's, not of its class
    calls = dict(vars(device))
    own = contenders.Ours(settings.Entry("ours"), [], {})
    own._handle = SimpleNamespace(engine=step.engine)
    counter = copies.CopyCounter(FakeEvent, step.memory.take_peak)
    with own.counting(counter):
        step.run()
    moved = own.moved(counter)
    assert moved.host_bytes_at_peak == step.on_host[moment] <= moved.host_bytes_max
    assert len(set(step.on_host)) > 2
    assert counter.at_peak.peak_allocated_bytes >= 2_000
    names = {"is_complete", "allocate", "restore", "copy_out", "copy_in"}
    assert {name: call for name, call in vars(device).items() if name in names} == {"copy_out": calls["copy_out"]}
    step.engine.close()
