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
    """A slab that writes down which copies ran; they block until the test lets them through."""

    nbytes = MIB

    def __init__(self, is_open: bool = False) -> None:
        self.gate = threading.Event()
        self.ran: list[int] = []
        if is_open:
            self.gate.set()

    def write(self, address: int, offset: int, nbytes: int) -> None:
        assert self.gate.wait(30)
        self.ran.append(offset)

    read = write

    def close(self) -> None: ...


def garbage(nbytes: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def byte(slab: GatedSlab, offset: int) -> tuple[torch.Tensor, HostRegion]:
    """A copy of one byte."""
    return garbage(1), HostRegion(slab, offset, 1)


def finish(device: CpuDevice, stream: object) -> None:
    device.synchronize(device.record_event(stream))


def check_round_trip(device: CpuDevice, stream: object, region: HostRegion) -> None:
    source, target = garbage(region.nbytes), torch.zeros(region.nbytes, dtype=torch.uint8)
    device.copy_out(stream, [(source, region)])
    device.copy_in(stream, [(region, target)])
    finish(device, stream)
    assert torch.equal(source, target)


# -- copies and their order -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nbytes", "offset_units"), [(1, 0), (4097, 3), (MIB + 3, 3)])
def test_bytes_come_back_equal(device: CpuDevice, nbytes: int, offset_units: int) -> None:
    region = HostRegion(device.new_slab(2 * MIB), offset_units * device.host_alignment, nbytes)
    check_round_trip(device, device.new_stream("copy"), region)


def test_short_counts_are_continued(file_device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:1000], offset))
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: preadv(fd, [views[0][:999]], offset))
    check_round_trip(file_device, file_device.new_stream("copy"), HostRegion(file_device.new_slab(MIB), 0, 10_001))


def test_copies_run_in_order_while_the_caller_goes_on_until_it_waits(device: CpuDevice) -> None:
    compute, stream, slab = device.current_stream(), device.new_stream("copy"), GatedSlab()
    assert device.is_complete(device.record_event(compute))
    for offset in range(20):
        device.copy_out(stream, [byte(slab, offset)])
    event = device.record_event(stream)
    assert not device.is_complete(event)  # the caller is here although no copy has run
    threading.Timer(0.05, slab.gate.set).start()
    device.wait_event(compute, event)  # compute is the caller, so that this blocks
    assert slab.ran == list(range(20)) and device.is_complete(event)


def test_streams_do_not_wait_for_each_other_unless_told(device: CpuDevice) -> None:
    late, early, slow, fast = device.new_stream("late"), device.new_stream("early"), GatedSlab(), GatedSlab(True)
    device.copy_out(late, [byte(slow, 0)])
    late_event = device.record_event(late)
    device.copy_in(early, [byte(fast, 0)[::-1]])
    finish(device, early)
    assert fast.ran == [0]
    device.wait_event(early, late_event)
    device.copy_in(early, [byte(fast, 1)[::-1]])
    event = device.record_event(early)
    assert not device.is_complete(event)
    slow.gate.set()
    device.synchronize(event)
    assert fast.ran == [0, 1]


def test_a_tensor_stands_for_its_storage(device: CpuDevice) -> None:
    stream, slab = device.new_stream("copy"), device.new_slab(4096)
    source, target = torch.arange(16.0).view(4, 4), torch.zeros(16)
    device.copy_out(stream, [(source.t()[1:, ::2], HostRegion(slab, 0, 64))])
    device.copy_in(stream, [(HostRegion(slab, 0, 64), target[3:5])])
    finish(device, stream)
    assert torch.equal(target.view(4, 4), source)
    assert torch.equal(device.host_read(target[3:5]).wait(), target[3:5])


def test_one_bad_copy_among_several_issues_none(device: CpuDevice) -> None:
    stream, slab = device.new_stream("copy"), GatedSlab(True)
    good = garbage(8), HostRegion(slab, 0, 8)
    for bad, message in (
        ((garbage(8), HostRegion(slab, 8, 9)), "a storage of that size"),
        ((garbage(9)[:8], HostRegion(slab, 8, 8)), "a storage of that size"),
        ((garbage(8), HostRegion(device.new_slab(4096), 4090, 8)), "not inside"),
    ):
        with pytest.raises(ValueError, match=message):
            device.copy_out(stream, [good, bad])
        with pytest.raises(ValueError, match=message):
            device.copy_in(stream, [good[::-1], bad[::-1]])
    finish(device, stream)
    assert slab.ran == []


# -- threads that do not start ----------------------------------------------------------------------------------------


@pytest.mark.timeout(60)  # a copy without a worker would never complete
@pytest.mark.parametrize("how", ["no room", "interrupted before it", "interrupted behind it"])
def test_a_start_that_goes_wrong_fails_one_copy_and_leaves_one_thread(
    how: str, device: CpuDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, start = [how], threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if not failures or not thread.name.startswith("offload-"):
            return start(thread)
        if failures.pop() == "interrupted behind it":
            start(thread)
        raise RuntimeError("can't start new thread") if how == "no room" else KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)
    stream, slab = device.new_stream("copy"), GatedSlab(True)
    with pytest.raises((RuntimeError, KeyboardInterrupt)):
        device.copy_out(stream, [byte(slab, 0)])
    if how == "no room":
        finish(device, stream)
    device.copy_out(stream, [byte(slab, 1)])
    finish(device, stream)
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
    shrunk = before - resident_bytes()
    if device.directory is None:
        assert abs(shrunk) < 0.1 * num * nbytes
    else:
        assert shrunk > 0.9 * num * nbytes
    back = torch.empty(nbytes, dtype=torch.uint8)
    device.copy_in(stream, [(HostRegion(slab, 5 * nbytes, nbytes), back)])
    finish(device, stream)
    assert bool((back == 5).all())


def new_file_slab(device: CpuDevice, nbytes: int) -> file_slab.FileSlab:
    slab = device.new_slab(nbytes)
    assert isinstance(slab, file_slab.FileSlab)
    return slab


def test_a_file_system_that_reserves_nothing_gets_a_sparse_file(
    file_device: CpuDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def first_write_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk."""
    pwrite, failures = os.pwrite, iter([OSError(errno.ENOSPC, "No space left on device")])

    def write_or_fail(*args: Any) -> int:
        for failure in failures:
            raise failure
        return pwrite(*args)

    monkeypatch.setattr(os, "pwrite", write_or_fail)


def test_a_full_disk_is_a_copy_error_that_keeps_no_tensor(file_device: CpuDevice, first_write_fails: None) -> None:
    stream, region = file_device.new_stream("out"), HostRegion(file_device.new_slab(4096), 0, 100)
    events = []
    for _ in range(2):
        source = garbage(100)
        gone = weakref.ref(source)
        events.append(file_device.copy_out(stream, [(source, region)]))
        del source
        events[-1].wait()  # completes, without raising
        assert gone() is None
    failed, fine = events
    for wait in (file_device.synchronize, lambda e: file_device.wait_event(file_device.current_stream(), e)):
        with pytest.raises(CopyError, match="copy-out of 100 bytes to FileSlab.*No space left") as caught:
            wait(failed)
        assert isinstance(caught.value.__cause__, OSError) and caught.value.__cause__.errno == errno.ENOSPC
        wait(fine)  # the error does not reach the next step
    assert not file_device.is_complete(failed) and file_device.is_complete(fine)


def test_what_a_file_has_lost_is_a_copy_error_and_no_other_file_is_hit(file_device: CpuDevice, tmp_path: Path) -> None:
    stream, slab = file_device.new_stream("in"), new_file_slab(file_device, MIB)
    os.ftruncate(slab._fd, 100)
    event = file_device.copy_in(stream, [(HostRegion(slab, 0, 200), garbage(200))])
    with pytest.raises(CopyError, match="100 bytes early"):
        file_device.synchronize(event)
    slab.close()
    bystander = tmp_path / "bystander"
    with bystander.open("wb"):  # takes over the number of the closed file
        event = file_device.copy_out(stream, [(garbage(100), HostRegion(slab, 0, 100))])
        with pytest.raises(CopyError):
            file_device.synchronize(event)
    assert bystander.read_bytes() == b""


def test_copies_of_one_call_after_a_failed_one_are_skipped(file_device: CpuDevice, first_write_fails: None) -> None:
    stream, slab = file_device.new_stream("out"), GatedSlab(True)
    broken = HostRegion(file_device.new_slab(4096), 0, 100)
    failed = file_device.copy_out(stream, [(garbage(100), broken), byte(slab, 1)])
    file_device.copy_out(stream, [byte(slab, 2)])
    finish(file_device, stream)
    assert slab.ran == [2] and not file_device.is_complete(failed)


def test_waiting_for_failed_work_fails_too(file_device: CpuDevice, first_write_fails: None) -> None:
    out, back, gate, seen = file_device.new_stream("out"), file_device.new_stream("in"), GatedSlab(), GatedSlab(True)
    file_device.copy_out(out, [byte(gate, 0)])  # the failure is not known yet when `back` waits
    event = file_device.copy_out(out, [(garbage(100), HostRegion(file_device.new_slab(4096), 0, 100))])
    file_device.wait_event(back, event)
    dependent = file_device.copy_in(back, [byte(seen, 0)[::-1]])
    gate.gate.set()
    with pytest.raises(CopyError, match="No space left"):
        file_device.synchronize(dependent)
    assert seen.ran == []
    with pytest.raises(CopyError):  # known by now: told at once
        file_device.wait_event(back, event)
    file_device.copy_in(back, [byte(seen, 1)[::-1]])
    finish(file_device, back)
    assert seen.ran == [1]


# -- life of the device -----------------------------------------------------------------------------------------------


def offload_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("offload-")]


def test_close_finishes_the_copies_and_is_idempotent(device: CpuDevice) -> None:
    stream, region = device.new_stream("copy"), HostRegion(device.new_slab(MIB), 0, MIB)
    source, target = garbage(MIB), torch.zeros(MIB, dtype=torch.uint8)
    device.copy_out(stream, [(source, region)])
    event = device.copy_in(stream, [(region, target)])
    device.close()
    device.close()
    assert torch.equal(source, target) and offload_threads() == []
    device.synchronize(event)
    for call in (lambda: device.record_event(stream), lambda: device.new_slab(4096)):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_a_device_that_is_collected_in_its_own_thread_stops_all_of_them(tmp_path: Path) -> None:
    device = CpuDevice(tmp_path)
    slab = new_file_slab(device, 4096)
    streams = [device.new_stream("first"), device.new_stream("second")]
    gate, collected = threading.Event(), threading.Event()

    class CollectingSlab(GatedSlab):
        def write(self, address: int, offset: int, nbytes: int) -> None:
            assert gate.wait(30)
            gc.collect()
            collected.set()

    device.copy_out(streams[0], [byte(CollectingSlab(), 0)])
    device.wait_event(streams[1], device.record_event(streams[0]))  # the second thread ends behind the first
    cycle: list[object] = [device]
    cycle.append(cycle)
    del device, streams, cycle
    gate.set()
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
    stream, slab = device.new_stream("copy"), GatedSlab()

    def use() -> None:
        check_round_trip(device, stream, HostRegion(device.new_slab(4096), 0, 100))

    def refused() -> None:
        for call in (
            lambda: device.record_event(stream),
            lambda: device.synchronize(pending),
            lambda: device.new_slab(4096),
        ):
            with pytest.raises(RuntimeError, match="new engine in the child"):
                call()
        device.close()  # joins no thread: there is none

    assert in_forked_child(lambda: (use(), device.close())) == 0
    use()
    pending = device.copy_out(stream, [byte(slab, 0)])
    assert in_forked_child(refused) == 0
    slab.gate.set()
    device.synchronize(pending)
    use()


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


# -- the directory ----------------------------------------------------------------------------------------------------


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
