# SPDX-License-Identifier: Apache-2.0
"""The CPU device: asynchronous copies in order, errors that reach whom they concern, memory that really goes away."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from offload_engine._devices import CopyError, CpuDevice, HostRegion, check_directory, file_slab, make_device
from offload_engine.config import OffloadConfig

MIB = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def no_threads_of_others() -> None:
    gc.collect()  # engines of earlier tests that nobody closed end theirs
    assert offload_threads() == []


@pytest.fixture(params=["file", "none"])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CpuDevice]:
    device = CpuDevice(tmp_path if request.param == "file" else "none")
    yield device
    device.close()


@pytest.fixture
def file_device(tmp_path: Path) -> Iterator[CpuDevice]:
    device = CpuDevice(tmp_path)
    yield device
    device.close()


class GatedSlab:
    """A slab that writes down which copies ran; they block until the test lets them through, and may fail."""

    nbytes = MIB

    def __init__(self, is_open: bool = True, num_failures: int = 0) -> None:
        self.gate = threading.Event()
        self.ran: list[int] = []
        self.num_failures = num_failures
        if is_open:
            self.gate.set()

    def write(self, address: int, offset: int, nbytes: int) -> None:
        assert self.gate.wait(30)
        self.num_failures -= 1
        if self.num_failures >= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.ran.append(offset)

    read = write

    def close(self) -> None: ...

    def out(self, device: CpuDevice, stream: Any, *offsets: int, source: torch.Tensor | None = None) -> Any:
        """Issue copies of a byte each to these places; return their event."""
        tensor = torch.zeros(1, dtype=torch.uint8) if source is None else source
        return device.copy_out(stream, [(tensor, HostRegion(self, offset, tensor.nbytes)) for offset in offsets])

    def back(self, device: CpuDevice, stream: Any, offset: int) -> Any:
        return device.copy_in(stream, [(HostRegion(self, offset, 1), torch.zeros(1, dtype=torch.uint8))])


def offload_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("offload-")]


def finish(device: CpuDevice, stream: Any) -> None:
    device.synchronize(device.record_event(stream))


def check_round_trip(device: CpuDevice, nbytes: int, offset: int = 0, is_closed: bool = False) -> None:
    source, stream = torch.randint(256, (nbytes,), dtype=torch.uint8), device.new_stream("copy")
    region, target = HostRegion(device.new_slab(2 * MIB), offset, nbytes), torch.zeros(nbytes, dtype=torch.uint8)
    device.copy_out(stream, [(source, region)])
    event = device.copy_in(stream, [(region, target)])
    if is_closed:
        device.close()
    device.synchronize(event)
    assert torch.equal(source, target) and torch.equal(device.host_read(target[:1]).wait(), source[:1])


# -- copies and their order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nbytes", "offset_units"), [(1, 0), (4097, 3), (MIB + 3, 3)])
def test_bytes_come_back_equal(device: CpuDevice, nbytes: int, offset_units: int) -> None:
    check_round_trip(device, nbytes, offset_units * device.host_alignment)


def test_short_counts_are_continued(file_device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:1000], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:999]], offset))
    check_round_trip(file_device, 10_001)


def test_copies_run_in_order_while_the_caller_goes_on_until_it_waits(device: CpuDevice) -> None:
    compute, stream, slab = device.current_stream(), device.new_stream("copy"), GatedSlab(is_open=False)
    assert device.is_complete(device.record_event(compute))
    for offset in range(20):
        event = slab.out(device, stream, offset)
    assert not device.is_complete(event)  # the caller is here although no copy has run
    threading.Timer(0.05, slab.gate.set).start()
    device.wait_event(compute, event)  # compute is the caller, so that this blocks
    assert slab.ran == list(range(20)) and device.is_complete(event)


def test_streams_do_not_wait_for_each_other_unless_told(device: CpuDevice) -> None:
    late, early, slow, fast = device.new_stream("late"), device.new_stream("early"), GatedSlab(False), GatedSlab()
    late_event = slow.out(device, late, 0)
    device.synchronize(fast.back(device, early, 0))
    assert fast.ran == [0]
    device.wait_event(early, late_event)
    event = fast.back(device, early, 1)
    assert not device.is_complete(event)
    slow.gate.set()
    device.synchronize(event)
    assert fast.ran == [0, 1]


def test_one_bad_copy_among_several_issues_none(device: CpuDevice) -> None:
    stream, slab, eight = device.new_stream("copy"), GatedSlab(), torch.zeros(8, dtype=torch.uint8)
    copies = [(eight, HostRegion(slab, 0, 8)), (eight, HostRegion(slab, 8, 9))]
    with pytest.raises(ValueError, match="a storage of that size"):
        device.copy_out(stream, copies)
    with pytest.raises(ValueError, match="a storage of that size"):
        device.copy_in(stream, [(region, tensor) for tensor, region in copies])
    finish(device, stream)
    assert slab.ran == []


@pytest.mark.timeout(60)  # a copy without a worker would never complete
@pytest.mark.parametrize("how", ["no room", "interrupted before it", "interrupted behind it"])
def test_a_start_that_goes_wrong_fails_one_copy(how: str, device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    failures, start = [how], threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if not failures or not thread.name.startswith("offload-"):
            return start(thread)
        if failures.pop() == "interrupted behind it":
            start(thread)
        raise RuntimeError("can't start new thread") if how == "no room" else KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    stream, slab = device.new_stream("copy"), GatedSlab()
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        slab.out(device, stream, 0)
    if how == "no room":
        finish(device, stream)
    device.synchronize(slab.out(device, stream, 1))
    assert slab.ran == [1] and offload_threads() == ["offload-copy"]


# -- memory -----------------------------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Return what the process has in memory, without what was freed and malloc keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_process_gets_smaller_with_a_file_and_not_with_memory(device: CpuDevice) -> None:
    num, nbytes = 8, 32 * MIB  # large enough for malloc to give the pages back when they are freed
    stream, slab = device.new_stream("copy"), device.new_slab(num * nbytes)
    sources = [torch.full((nbytes,), i, dtype=torch.uint8) for i in range(num)]
    before = resident_bytes()
    for i, source in enumerate(sources):
        device.copy_out(stream, [(source, HostRegion(slab, i * nbytes, nbytes))])
    finish(device, stream)
    sources.clear()
    del source
    shrunk = (before - resident_bytes()) / (num * nbytes)
    assert abs(shrunk) < 0.1 if device.directory is None else shrunk > 0.9


def new_file_slab(device: CpuDevice, nbytes: int) -> file_slab.FileSlab:
    slab = device.new_slab(nbytes)
    assert isinstance(slab, file_slab.FileSlab)
    return slab


def test_an_unreserved_file_is_sparse(file_device: CpuDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **kwargs: object())
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    assert os.fstat(new_file_slab(file_device, MIB)._fd).st_size == MIB
    assert list(tmp_path.iterdir()) == []


def test_a_slab_needs_room_and_a_multiple_of_the_alignment(device: CpuDevice) -> None:
    with pytest.raises(MemoryError, match="no room"):
        device.new_slab(1 << 50)
    with pytest.raises(ValueError, match="multiple"):
        device.new_slab(device.host_alignment + 1)
    if device.directory is not None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, hard))
        try:
            with pytest.raises(MemoryError, match="gives no file"):
                device.new_slab(2 * MIB)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_directory_that_is_none_or_too_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match="does not exist: create it"):
        CpuDevice(tmp_path / "missing")
    with pytest.raises(NotADirectoryError, match="is not a directory"):
        CpuDevice(tmp_path / "file")
    for code in (errno.EACCES, errno.EROFS):
        with mock.patch.object(os, "open", side_effect=OSError(code, os.strerror(code))):
            with pytest.raises(PermissionError, match="is not writable .*permissions"):
                CpuDevice(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_directory(str(tmp_path), MIB)
    with pytest.raises(ValueError, match="too full.*lower host_limit_bytes"):
        make_device(OffloadConfig(directory=str(tmp_path), host_limit_bytes=1 << 60))
    monkeypatch.setattr(file_slab, "free_bytes", lambda path: MIB - 1)
    with pytest.raises(ValueError, match="too full: 1,048,575 bytes free, 1,048,576 needed"):
        CpuDevice(tmp_path)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_full_disk_is_a_copy_error_that_keeps_no_tensor(device: CpuDevice) -> None:
    stream, slab, events = device.new_stream("out"), GatedSlab(num_failures=1), []
    for offset in (0, 1):
        source = torch.zeros(100, dtype=torch.uint8)
        gone = weakref.ref(source)
        events.append(slab.out(device, stream, offset, offset + 2, source=source))
        del source
        events[-1].wait()  # completes, without raising
        assert gone() is None
    failed, fine = events
    for wait in (device.synchronize, lambda event: device.wait_event(device.current_stream(), event)):
        with pytest.raises(CopyError, match="copy-out of 100 bytes to .*GatedSlab.*No space left") as caught:
            wait(failed)
        assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOSPC
        wait(fine)  # the error does not reach the next step
    assert not device.is_complete(failed) and device.is_complete(fine)
    assert slab.ran == [1, 3], "what came in one call behind the failed copy is skipped"


def test_what_a_file_has_lost_is_a_copy_error_and_no_other_file_is_hit(file_device: CpuDevice, tmp_path: Path) -> None:
    stream, slab, tensor = file_device.new_stream("in"), new_file_slab(file_device, MIB), torch.zeros(50)
    os.ftruncate(slab._fd, 100)
    event = file_device.copy_in(stream, [(HostRegion(slab, 0, 200), tensor)])
    with pytest.raises(CopyError, match="100 bytes early"):
        file_device.synchronize(event)
    slab.close()
    bystander = tmp_path / "bystander"
    with bystander.open("wb"):  # takes over the number of the closed file
        event = file_device.copy_out(stream, [(tensor, HostRegion(slab, 0, 200))])
        with pytest.raises(CopyError):
            file_device.synchronize(event)
    assert bystander.read_bytes() == b""


def test_waiting_for_failed_work_fails_too(device: CpuDevice) -> None:
    out, back, seen = device.new_stream("out"), device.new_stream("in"), GatedSlab()
    failing = GatedSlab(is_open=False, num_failures=1)  # the failure is not known yet when `back` waits
    event = failing.out(device, out, 0)
    device.wait_event(back, event)
    dependent = seen.back(device, back, 0)
    failing.gate.set()
    with pytest.raises(CopyError, match="No space left"):
        device.synchronize(dependent)
    with pytest.raises(CopyError):  # known by now: told at once
        device.wait_event(back, event)
    device.synchronize(seen.back(device, back, 1))
    assert seen.ran == [1]


# -- life of the device -----------------------------------------------------------------------------------------------


def test_close_finishes_the_copies_and_is_idempotent(device: CpuDevice) -> None:
    stream = device.new_stream("copy")
    check_round_trip(device, MIB, is_closed=True)
    device.close()
    assert offload_threads() == []
    for call in (lambda: device.record_event(stream), lambda: device.new_slab(4096)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_device_that_is_collected_in_its_own_thread_stops_all_of_them(tmp_path: Path) -> None:
    device = CpuDevice(tmp_path)
    slab = new_file_slab(device, 4096)
    streams = [device.new_stream("first"), device.new_stream("second")]
    collected = threading.Event()

    class CollectingSlab(GatedSlab):
        def write(self, address: int, offset: int, nbytes: int) -> None:
            assert self.gate.wait(30)
            gc.collect()
            collected.set()

    collecting = CollectingSlab(is_open=False)
    device.wait_event(streams[1], collecting.out(device, streams[0], 0))  # the second thread ends behind the first
    cycle: list[object] = [device]
    cycle.append(cycle)
    del device, streams, cycle
    collecting.gate.set()
    assert collected.wait(10)
    end = time.monotonic() + 10
    while offload_threads() or slab._fd != -1:
        assert time.monotonic() < end, offload_threads()
        time.sleep(0.001)


def in_forked_child(body: Callable[[], object]) -> int:
    """Return the exit status of a forked child that ran `body`: 0 if it returned, 1 if it raised, -14 if it hung."""
    pid = os.fork()
    if pid == 0:
        try:
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            body()
            os._exit(0)
        except BaseException:  # pytest must not go on in the child
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_an_unused_device_works_on_both_sides_of_a_fork_and_a_used_one_refuses_in_the_child(device: CpuDevice) -> None:
    stream, slab = device.new_stream("copy"), GatedSlab(is_open=False)

    def refused() -> None:
        for call in (
            lambda: device.record_event(stream),
            lambda: device.synchronize(pending),
            lambda: device.new_slab(4096),
        ):
            with pytest.raises(RuntimeError, match="new engine in the child"):
                call()
        device.close()  # joins no thread: there is none

    assert in_forked_child(lambda: check_round_trip(device, 100, is_closed=True)) == 0
    check_round_trip(device, 100)
    pending = slab.out(device, stream, 0)
    assert in_forked_child(refused) == 0
    slab.gate.set()
    device.synchronize(pending)
    check_round_trip(device, 100)


def test_the_interpreter_exits_with_copies_under_way(tmp_path: Path) -> None:
    script = """
        import sys, torch
        from offload_engine._devices import CpuDevice, HostRegion
        device = CpuDevice(sys.argv[1])
        stream, slab = device.new_stream("out"), device.new_slab(16 << 20)
        for _ in range(4):
            device.copy_out(stream, [(torch.ones(16 << 20, dtype=torch.uint8), HostRegion(slab, 0, 16 << 20))])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
