# SPDX-License-Identifier: Apache-2.0
"""Time marks of every device: in the order of the work, with the time that the work took, and without ordering it."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from offload_engine import IS_COMPILED
from offload_engine._devices import cuda_runtime
from offload_engine._devices.base import CopyError, HostRegion
from offload_engine._devices.cpu import CpuDevice
from offload_engine._devices.cuda_runtime import CudaRuntime
from tests.cpu.test_cuda_calls import (  # noqa: F401  (fixtures)
    COMPILER,
    HAS_HEADERS,
    STREAM,
    folder,
    having,
    last_call,
    last_record,
    number,
    runtime,
)

MIB = 1 << 20


@pytest.mark.parametrize("tier", ["file", "none"])
def test_a_copy_between_two_marks_takes_time_inside_the_step(tier: str, tmp_path: Path) -> None:
    """The time is asked before the marks are passed: the host blocks until the thread has come so far."""
    source, nbytes = torch.ones(16 * MIB, dtype=torch.uint8), 16 * MIB
    with closing(CpuDevice(tmp_path if tier == "file" else "none")) as device:
        stream, slab = device.new_stream("copy_out"), device.new_slab(nbytes)
        begin = device.mark_time(device.current_stream())
        before = device.mark_time(stream)
        device.copy_out(stream, [(source, HostRegion(slab, 0, nbytes))])
        after = device.mark_time(stream)
        took = device.milliseconds_between(before, after)
        device.synchronize(device.record_event(stream))
        end = device.mark_time(device.current_stream())
        assert 0.1 < took < device.milliseconds_between(begin, end)  # 16 MiB in 0.1 ms would be 170 GB/s
        assert device.milliseconds_between(begin, before) > 0 and device.milliseconds_between(after, end) > 0
        assert device.milliseconds_between(after, before) == -took


def test_a_mark_takes_no_failure_from_the_event_behind_it() -> None:
    """The next event tells of it; a mark in between must not."""
    broken = mock.Mock(nbytes=MIB, write=mock.Mock(side_effect=OSError("disk full")))
    with closing(CpuDevice("none")) as device:
        stream = device.new_stream("copy_out")
        stream.write(torch.ones(MIB, dtype=torch.uint8), broken, 0)
        mark = device.mark_time(stream)
        event = device.record_event(stream)
        with pytest.raises(CopyError, match="disk full"):
            device.synchronize(event)
        assert device.milliseconds_between(mark, mark) == 0.0


needs_compiler = pytest.mark.skipif(COMPILER is None or not HAS_HEADERS, reason="needs a C compiler")
replaces_constant = pytest.mark.skipif(IS_COMPILED, reason="a compiled constant cannot be replaced: needs pure Python")


@pytest.fixture
def cuda(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> CudaRuntime:  # noqa: F811
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(cuda_runtime, "_current_device", lambda: 0)
    return CudaRuntime(torch.device("cuda", 0), runtime)


@needs_compiler
def test_cuda_marks_are_events_with_timing_of_their_own(cuda: CudaRuntime, runtime: Any) -> None:  # noqa: F811
    """Recorded on their stream, reused for other marks and not for events, and given back when the runtime closes."""
    handle = cuda.mark_time(STREAM).handle
    assert last_record(runtime) == (handle, STREAM)
    assert number(runtime, "last_flags").value == 0, "without timing CUDA cannot tell the time of it"
    assert cuda.record(STREAM).handle != handle and number(runtime, "last_flags").value == 2
    assert cuda.mark_time(STREAM).handle == handle
    with having(runtime, "num_destroyed", 0):
        cuda.close()
        assert number(runtime, "num_destroyed").value == 2


@needs_compiler
@replaces_constant
def test_cuda_waits_for_both_marks_and_asks_for_the_time_between_on_their_device(
    cuda: CudaRuntime,
    runtime: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new thread is on device 0, where its first call would make a context."""
    first, last, device = cuda.mark_time(STREAM), cuda.mark_time(STREAM + 8), mock.Mock(return_value=nullcontext())
    monkeypatch.setattr(torch.cuda, "device", device)
    with having(runtime, "pending", 2), having(runtime, "num_synchronized", 0):
        assert cuda.milliseconds_between(first, last) == 1.5
        assert number(runtime, "num_synchronized").value == 2
    assert last_call(runtime)[:3] == (10, first.handle, last.handle) and not device.mock_calls
    monkeypatch.setattr(cuda_runtime, "_current_device", lambda: 1)
    cuda.milliseconds_between(first, first)
    device.assert_called_once_with(torch.device("cuda", 0))
