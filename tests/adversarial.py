# SPDX-License-Identifier: Apache-2.0
"""A device that makes every ordering bug visible on a machine without a GPU.

It does two things at once.

It delays. A copy stream is a queue without a worker: a copy runs when the compute side waits for it, directly or
through another stream, and no earlier. A reader that forgot to wait finds 0xFF bytes, which are NaN in every float
format. With a seed, copies also run early now and then, in an order that the waits allow.

It checks. Each stream has a vector clock, events carry it, waits merge it, and every access to a buffer or to host
bytes is compared with the accesses it must come after. Two accesses that conflict and that no wait orders are a
hazard, even where this run happened to execute them in the right order: the bytes involved are overwritten with 0xFF,
so that the result becomes wrong, and `AdversarialDevice.hazards` gets a sentence that says what was not ordered.

Where a kernel writes a part of a storage during a copy-out of the whole, that part is undetermined on the host, and
only that is overwritten there: autograd may need the other parts, and these are right.

A storage that is emptied in place really is: to use it in between is a hazard too, and an exception.

Words: a *compute stream* is where the model's kernels go (torch runs them at once; the checks treat them as
asynchronous), *memory* is the bytes of one device storage, its *home* the compute stream whose pool it came from. What
the host has seen complete is ordered before whatever it issues afterwards.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from offload_engine._devices.base import CopyError, DeviceGraphs, HostRegion, MemoryGauge, PlainRead, TensorSpec
from offload_engine._devices.regions import whole

POISON = 0xFF
_ALIGNMENT = 64  # of torch's own CPU memory: vectorised kernels may sum in another order at another alignment
_PRUNE_EVERY = 4096  # compute operations between two removals of memories that are gone

Clock = dict[int, int]


class Access(NamedTuple):
    """One use of some bytes, at one tick of one stream's clock."""

    stream: AdversarialStream
    tick: int
    what: str
    copy: Copy | None = None  # None: a kernel, or the allocation itself
    knows: Clock | None = None  # of a kernel, where there are several compute streams: what came before it


class AdversarialStream:
    """A compute stream (never has a queue) or a copy stream (a queue that runs on demand)."""

    def __init__(self, index: int, name: str, is_compute: bool, lock: threading.RLock) -> None:
        self.index = index
        self.name = name
        self.is_compute = is_compute
        self.clock: Clock = {index: 1}
        self.queue: deque[Copy | AdversarialEvent | AdversarialMark | tuple[AdversarialEvent]] = deque()
        self.failure: str | None = None  # goes to the next event, as on the CPU device
        self._lock = lock  # another thread may ask for the time of a mark

    def __repr__(self) -> str:
        return f"<stream {self.name}>"

    @property
    def now(self) -> int:
        return self.clock[self.index]

    def tick(self, count: int = 1) -> int:
        self.clock[self.index] += count
        return self.now

    def run_until(self, event: AdversarialEvent | AdversarialMark) -> None:
        with self._lock:
            while not event.is_done:
                self._run(self.queue[0])

    def run_one(self) -> None:
        """Execute the head of the queue, if there is one, and first whatever it waits for."""
        with self._lock:
            if self.queue:
                self._run(self.queue[0])

    def _run(self, item: Copy | AdversarialEvent | AdversarialMark | tuple[AdversarialEvent]) -> None:
        if isinstance(item, Copy):
            if self.failure is None:
                self.failure = item.execute()
        elif isinstance(item, AdversarialEvent):  # recorded here
            item.complete(self.failure)
            self.failure = None
        elif isinstance(item, AdversarialMark):
            item.strike()
        else:  # a wait
            item[0].stream.run_until(item[0])
            self.failure = self.failure or item[0].failure
        self.queue.popleft()


class AdversarialEvent:
    """A point in a stream, and all that is known to have happened before it."""

    def __init__(self, stream: AdversarialStream, clock: Clock) -> None:
        self.stream = stream
        self.clock = clock
        self.is_done = stream.is_compute
        self.failure: str | None = None

    def complete(self, failure: str | None) -> None:
        self.is_done = True
        self.failure = failure

    def raise_failure(self) -> None:
        if self.failure is not None:
            raise CopyError(self.failure)


class AdversarialMark:
    """When a stream has come so far; orders nothing."""

    def __init__(self, stream: AdversarialStream) -> None:
        self.stream = stream
        self.is_done = False
        self.seconds = 0.0

    def strike(self) -> None:
        self.is_done = True
        self.seconds = perf_counter()


class Memory:
    """The bytes of one device storage: where they are, who used them, and which pool they go back to."""

    def __init__(self, home: AdversarialStream, ref: StorageWeakRef | None = None, block: Block | None = None) -> None:
        self.home = home
        self.ref = ref  # a storage that torch made; weak, so that dropping it too early is seen
        self.block = block  # or one of our own, whose bytes outlive the storage as those of a caching allocator do
        self.writes: list[Access] = []  # the last write, and the allocation
        self.reads: dict[tuple[int, int], Access] = {}  # since then: (stream, copy) -> access
        self.is_watched = block is not None  # a copy has touched it, or allocate() made it
        self.is_released = False
        self.is_empty = False  # its storage has no bytes, until it is restored as another memory
        self.recorded: list[AdversarialStream] = []  # by record_stream: reuse also waits for what they have by then

    def span(self, nbytes_needed: int = 0) -> tuple[int, int] | None:
        """Return the address and size, or None if the storage is gone, or has been resized below what is needed."""
        if self.block is not None:
            return self.block.address, self.block.nbytes
        assert self.ref is not None
        storage = torch.UntypedStorage._new_with_weak_ptr(self.ref.cdata)
        if storage is None or storage.nbytes() < nbytes_needed:
            return None
        return storage.data_ptr(), storage.nbytes()

    def poison(self) -> None:
        span = self.span()
        if span is not None:
            ctypes.memset(span[0], POISON, span[1])

    def accesses(self) -> list[Access]:
        return [*self.writes, *self.reads.values()]


class Block:
    """Device bytes that `allocate` hands out again and again, each time under a fresh storage."""

    def __init__(self, nbytes: int) -> None:
        self._base = np.empty(nbytes + _ALIGNMENT, np.uint8)
        start = -self._base.ctypes.data % _ALIGNMENT
        self.bytes = self._base[start : start + nbytes]
        self.address: int = self.bytes.ctypes.data
        self.nbytes = nbytes
        self.history: list[Access] = []  # of the owners before

    def lend(self, nbytes: int) -> np.ndarray:
        self.bytes[:] = POISON
        return self.bytes[:nbytes]  # a new object each time, which lives as long as the storage made from it


class AdversarialSlab:
    """Host bytes, poisoned from the start, and who touched which of them."""

    def __init__(self, device: AdversarialDevice, nbytes: int) -> None:
        self.nbytes = nbytes
        self.is_closed = False
        self.bytes = torch.full((nbytes,), POISON, dtype=torch.uint8)
        self.uses: list[tuple[int, int, bool, Access]] = []  # start, end, is it a write, access
        self._device = device

    def address(self, region: HostRegion) -> int:
        return self.bytes.data_ptr() + region.offset

    def poison(self, region: HostRegion) -> None:
        ctypes.memset(self.address(region), POISON, region.nbytes)

    def overlapping(self, region: HostRegion, only_writes: bool) -> list[Access]:
        start, end = region.offset, region.offset + region.nbytes
        return [a for s, e, is_write, a in self.uses if s < end and start < e and (is_write or not only_writes)]

    def note(self, region: HostRegion, is_write: bool, access: Access) -> None:
        start, end = region.offset, region.offset + region.nbytes
        if is_write:  # order behind this write includes order behind what it overwrote
            self.uses = [use for use in self.uses if use[0] < start or use[1] > end]
        self.uses.append((start, end, is_write, access))

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._device._close_slab(self)


class Copy:
    """One copy: what it moves, whether it ran, and whether what it delivers must be wrong."""

    def __init__(
        self, kind: str, number: int, memory: Memory, buffer: torch.Tensor, region: HostRegion, will_fail: bool
    ) -> None:
        self.name = f"copy-{kind} #{number} ({region.nbytes} bytes, host bytes {region.offset}..)"
        self.is_out = kind == "out"
        self.number = number
        self.memory = memory
        self.buffer = weakref.ref(buffer)  # through which it reaches that memory
        self.region = region
        self.will_fail = will_fail
        self.is_done = False
        self.is_poisoned = False
        self.written_parts: list[tuple[int, int]] = []  # offset and bytes: by kernels, while it may have run
        self.hazards: list[str] | None = None  # where to report what is found when it runs

    def __repr__(self) -> str:
        return self.name

    def is_held_by_other(self, buffer: torch.Tensor) -> bool:
        """Return whether a buffer other than this one keeps the memory for the copy."""
        return self.buffer() is not None and self.buffer() is not buffer

    def poison(self) -> None:
        """Make what this copy delivers wrong, whether it has run or not."""
        self.is_poisoned = True
        if self.is_done:
            self._spoil_target()

    def note_written(self, offset: int, nbytes: int) -> None:
        """Make a part of what this copy-out delivers wrong: a kernel writes it before or after the copy."""
        self.written_parts.append((offset, nbytes))
        if self.is_done:
            self._spoil_parts()

    def execute(self) -> str | None:
        """Move the bytes; returns why it failed, if it was told to."""
        self.is_done = True
        slab, nbytes = _slab_of(self.region), self.region.nbytes
        span = self.memory.span(nbytes)
        if span is None or slab.is_closed:
            what = "its host slab was closed" if slab.is_closed else "its device buffer was dropped"
            assert self.hazards is not None
            self.hazards.append(f"{what} before {self} ran")
            self.is_poisoned = True
        if self.will_fail or self.is_poisoned:
            self._spoil_target()
            return f"{self} failed: injected by the test" if self.will_fail else None
        assert span is not None
        device, host = span[0], slab.address(self.region)
        to, source = (host, device) if self.is_out else (device, host)
        ctypes.memmove(to, source, nbytes)
        self._spoil_parts()
        return None

    def _spoil_parts(self) -> None:
        for offset, nbytes in self.written_parts:
            ctypes.memset(_slab_of(self.region).address(self.region) + offset, POISON, nbytes)

    def _spoil_target(self) -> None:
        if self.is_out:
            _slab_of(self.region).poison(self.region)
        else:
            self.memory.poison()


class AdversarialDevice:
    """Implements the `Device` protocol on CPU tensors; see the top of this file.

    Compute is seen only inside `with device.observe_compute():`; outside, a source of a copy counts as just written.

    Args:
        seed: None runs every copy as late as possible and answers `is_complete` from what has run. With a seed,
            copies also run early at random, and `is_complete` may run them first, or deny what has completed.
        host_capacity: `new_slab` raises MemoryError beyond this many bytes; None is no bound.

    Attributes:
        hazards: one sentence for each ordering violation, in the order they were found.
        num_copies: issued copies by kind, "out" and "in".
    """

    torch_device = torch.device("cpu")
    host_alignment = 64
    memory: MemoryGauge | None = None
    graphs: DeviceGraphs | None = None
    busy_ratio = 1.0

    def __init__(self, seed: int | None = None, host_capacity: int | None = None) -> None:
        self.hazards: list[str] = []
        self.num_copies: Counter[str] = Counter()
        self.is_closed = False
        self._random = None if seed is None else random.Random(seed)
        self._eagerness = 0.0 if self._random is None else self._random.choice((0.0, 0.05, 0.3))
        self._host_capacity = host_capacity
        self._host_clock: Clock = {}
        self._streams: list[AdversarialStream] = []
        self._running = threading.RLock()  # of all streams: one may wait for another
        self._compute: dict[str, AdversarialStream] = {}
        self._main = self._current = self._compute_stream("main")
        self._memories: dict[int, Memory] = {}  # by storage; the weak reference keeps the key from being used again
        self._unsettled: dict[Memory, None] = {}  # torch's storages whose home may not know of a copy yet
        self._free_blocks: dict[tuple[int, int], list[Block]] = {}
        self._slabs: list[AdversarialSlab] = []
        self._failures: dict[str, list[int]] = {"out": [], "in": []}
        self._signatures: dict[Any, _Signature] = {}
        self._num_operations = 0

    # ---- the Device protocol

    def new_stream(self, name: str) -> AdversarialStream:
        return self._add_stream(name, is_compute=False)

    def current_stream(self) -> AdversarialStream:
        return self._current

    def record_event(self, stream: AdversarialStream) -> AdversarialEvent:
        self._enter()
        event = AdversarialEvent(stream, _merged(stream.clock, self._host_clock))
        if not stream.is_compute:
            stream.queue.append(event)
        return event

    def wait_event(self, stream: AdversarialStream, event: AdversarialEvent) -> None:
        self._enter()
        if stream.is_compute:
            event.stream.run_until(event)
        _merge_into(stream.clock, event.clock)
        if event.is_done:
            event.raise_failure()
        else:
            stream.queue.append((event,))

    def wait_stream(self, stream: AdversarialStream, leader: AdversarialStream) -> None:
        self.wait_event(stream, self.record_event(leader))

    def is_copy_thread(self) -> bool:
        return False

    def is_complete(self, event: AdversarialEvent) -> bool:
        self._enter()
        if self._random is not None and self._random.random() < 0.25:
            if self._random.random() < 0.5:
                return False  # it may well have completed: the host just has not heard of it
            event.stream.run_until(event)
        if event.stream.is_compute:
            return _includes(self._host_clock, event.clock)
        if not event.is_done or event.failure is not None:
            return False
        _merge_into(self._host_clock, event.clock)
        return True

    def synchronize(self, event: AdversarialEvent) -> None:
        self._enter()
        event.stream.run_until(event)
        _merge_into(self._host_clock, event.clock)
        event.raise_failure()

    def mark_time(self, stream: AdversarialStream) -> AdversarialMark:
        mark = AdversarialMark(stream)
        if stream.is_compute:
            mark.strike()
        else:
            stream.queue.append(mark)
        return mark

    def milliseconds_between(self, first: AdversarialMark, last: AdversarialMark) -> float:
        for mark in (first, last):
            mark.stream.run_until(mark)
        return 1e3 * (last.seconds - first.seconds)

    def allocate(self, nbytes: int, stream: AdversarialStream, spec: TensorSpec | None = None) -> torch.Tensor:
        self._enter()
        assert stream.is_compute, f"buffers come from the pool of a compute stream, not of {stream}"
        block = self._take_block(nbytes, stream)
        view = block.lend(nbytes)
        tensor = torch.from_numpy(view)
        memory = Memory(stream, block=block)
        memory.writes.append(Access(stream, stream.tick(), "the allocation"))
        key = tensor.untyped_storage()._cdata
        self._memories[key] = memory
        weakref.finalize(view, self._forget_block, key, memory).atexit = False
        if spec is None:
            return tensor
        _, shape, stride, dtype = spec
        return torch.empty(0, dtype=dtype).set_(tensor.untyped_storage(), 0, shape, stride)

    def empty(self, storage: torch.UntypedStorage) -> None:
        self._enter()
        memory = self._memories[storage._cdata]
        self._check_reuse(memory, "was emptied", with_kernels=True)
        memory.is_released = memory.is_empty = True
        self._unsettled.pop(memory, None)
        storage.resize_(0)

    def restore(self, storage: torch.UntypedStorage, nbytes: int, stream: AdversarialStream) -> torch.Tensor:
        self._enter()
        assert self._memories[storage._cdata].is_empty and storage.nbytes() == 0, "nothing to restore"
        storage.resize_(nbytes)
        memory = self._memories[storage._cdata] = Memory(stream, StorageWeakRef(storage))
        memory.writes.append(Access(stream, stream.tick(), "the allocation"))
        memory.is_watched = True
        memory.poison()
        return whole(storage)

    def copy_out(
        self, stream: AdversarialStream, copies: Sequence[tuple[torch.Tensor, HostRegion]]
    ) -> AdversarialEvent:
        self._enter()
        for tick, (source, target) in enumerate(copies, stream.now + 1):
            self._copy_out(stream, tick, source, target)
        stream.tick(len(copies))  # not before: the copies of one call have no order among themselves
        return self.record_event(stream)

    def copy_in(self, stream: AdversarialStream, copies: Sequence[tuple[HostRegion, torch.Tensor]]) -> AdversarialEvent:
        self._enter()
        for tick, (source, target) in enumerate(copies, stream.now + 1):
            self._copy_in(stream, tick, source, target)
        stream.tick(len(copies))  # as above
        return self.record_event(stream)

    def host_read(self, tensor: torch.Tensor) -> PlainRead:
        return PlainRead(tensor)

    def on_release(self, buffer: torch.Tensor) -> None:
        self._enter()
        memory = self._memory_of(buffer)
        memory.is_released = True
        # What was saved twice has two buffers: each has to stay as long as its own copy.
        self._check_reuse(memory, "was released", through=buffer)

    def free_host_bytes(self) -> int:
        return 1 << 60  # `host_capacity` is met by surprise

    def new_slab(self, nbytes: int) -> AdversarialSlab:
        assert nbytes > 0 and nbytes % self.host_alignment == 0, f"bad slab size {nbytes}"
        held = sum(slab.nbytes for slab in self._slabs)
        if self._host_capacity is not None and held + nbytes > self._host_capacity:
            raise MemoryError(f"the test's host tier has {self._host_capacity - held} bytes left, not {nbytes}")
        self._slabs.append(AdversarialSlab(self, nbytes))
        return self._slabs[-1]

    def abandon(self) -> None:
        """Nothing is closed at exit."""

    def close(self) -> None:
        if not self.is_closed:
            self.synchronize_all()
            for slab in list(self._slabs):
                slab.close()
            self.is_closed = True

    # ---- for tests

    @property
    def host_bytes(self) -> int:
        """Return the bytes of the slabs that are open."""
        return sum(slab.nbytes for slab in self._slabs)

    def fail_next_copy(self, kind: str, after: int = 0) -> None:
        """Let one copy fail: of those issued from now on, the one after the next `after` ones of its kind.

        Args:
            kind: "out" or "in".
            after: how many copies of that kind still succeed.
        """
        self._failures[kind].append(after)

    def forget_failures(self) -> None:
        """Take back what `fail_next_copy` announced and no copy has met yet."""
        self._failures = {"out": [], "in": []}

    def drain(self) -> None:
        """Run every copy that is still queued; the host learns nothing from it."""
        while busy := [stream for stream in self._streams if stream.queue]:
            (self._random or random.Random(0)).choice(busy).run_one()

    def synchronize_all(self) -> None:
        """Do what `torch.cuda.synchronize()` does: the host has seen everything complete."""
        self.drain()
        for stream in self._streams:
            _merge_into(self._host_clock, stream.clock)

    @contextmanager
    def compute_stream(self, name: str) -> Iterator[AdversarialStream]:
        """Make another compute stream current; made at its first use."""
        previous, self._current = self._current, self._compute_stream(name)
        try:
            yield self._current
        finally:
            self._current = previous

    def set_current(self, stream: AdversarialStream | None = None) -> None:
        """Make `stream` current; None is the main stream."""
        self._current = stream or self._main

    @contextmanager
    def observe_compute(self) -> Iterator[None]:
        """See every torch operation, also those of `backward()`, as work of the current compute stream."""
        with _ObserveCompute(self):
            yield

    def record_stream(self, tensor: torch.Tensor, stream: AdversarialStream) -> None:
        """Do what `Tensor.record_stream` does: declare that `stream` uses memory of another's pool."""
        memory = self._memory_of(tensor)
        if stream is not memory.home and stream not in memory.recorded:
            memory.recorded.append(stream)

    def note_produced(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Note that the current stream has made `tensors` by now, some perhaps below what `observe_compute` sees."""
        for tensor in tensors:
            if tensor is not None:
                self._memory_of(tensor)

    def wait_for_writers(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Order the current stream after the kernels that wrote `tensors`: what autograd does before each node."""
        for tensor in tensors:
            memory = None if tensor is None else self._memories.get(tensor.untyped_storage()._cdata)
            for write in memory.writes if memory is not None else ():
                if write.knows is not None:
                    _merge_into(self._current.clock, write.knows)

    # ---- time

    def _enter(self) -> None:
        """Start of every call: look for what was dropped too early, and perhaps let some copy run."""
        if self.is_closed:
            raise RuntimeError("the device has been closed")
        for memory in list(self._unsettled):
            assert memory.ref is not None
            if all(self._knows(memory.home, access) for access in memory.accesses() if access.copy is not None):
                del self._unsettled[memory]
            elif memory.ref.expired():
                self._check_reuse(memory, "was dropped")
                del self._unsettled[memory]
        if self._random is not None and self._random.random() < self._eagerness:
            if busy := [stream for stream in self._streams if stream.queue]:
                self._random.choice(busy).run_one()

    def _knows(self, stream: AdversarialStream, access: Access) -> bool:
        index = access.stream.index
        return stream.clock.get(index, 0) >= access.tick or self._host_clock.get(index, 0) >= access.tick

    def _require(self, access: Access, action: str, earlier: Iterable[Access]) -> None:
        """Require that `access` comes after all of `earlier`."""
        for other in earlier:
            if other.tick != access.tick or other.stream is not access.stream:
                if not self._knows(access.stream, other):
                    text = f"{access.what} on {access.stream} {action} not ordered after {other.what} on {other.stream}"
                    self._violation(text, access.copy, other.copy)

    def _violation(self, text: str, *copies: Copy | None) -> None:
        self.hazards.append(text)
        for copy in copies:
            if copy is not None:
                copy.poison()

    # ---- copies

    def _copy_out(self, stream: AdversarialStream, tick: int, source: torch.Tensor, target: HostRegion) -> None:
        copy, access, memory = self._issue("out", stream, tick, source, target)
        self._require(access, f"reads {_describe(memory)}", memory.writes)
        self._require(access, "overwrites host bytes", _slab_of(target).overlapping(target, only_writes=False))
        memory.reads[stream.index, copy.number] = access
        _slab_of(target).note(target, True, access)
        stream.queue.append(copy)

    def _copy_in(self, stream: AdversarialStream, tick: int, source: HostRegion, target: torch.Tensor) -> None:
        copy, access, memory = self._issue("in", stream, tick, target, source)
        earlier_writes = _slab_of(source).overlapping(source, only_writes=True)
        if not earlier_writes:
            self._violation(f"{copy} reads host bytes that were never written", copy)
        self._require(access, "reads host bytes", earlier_writes)
        self._require(access, f"writes {_describe(memory)}", memory.accesses())
        memory.writes.append(access)
        _slab_of(source).note(source, False, access)
        stream.queue.append(copy)

    def _issue(
        self, kind: str, stream: AdversarialStream, tick: int, buffer: torch.Tensor, region: HostRegion
    ) -> tuple[Copy, Access, Memory]:
        assert buffer.untyped_storage().nbytes() == region.nbytes, "a copy is of a whole storage"
        assert region.offset % self.host_alignment == 0, region
        assert region.offset + region.nbytes <= region.slab.nbytes, region
        memory = self._memory_of(buffer)
        self.num_copies[kind] += 1
        copy = Copy(kind, self.num_copies.total(), memory, buffer, region, self._next_fails(kind))
        copy.hazards = self.hazards
        if memory.is_released and memory.block is not None:
            self._violation(f"{copy} uses a buffer after its release", copy)
        if _slab_of(region).is_closed:
            self._violation(f"{copy} uses a host slab after it was closed", copy)
        memory.is_watched = True
        if memory.ref is not None:
            self._unsettled[memory] = None
        return copy, Access(stream, tick, copy.name, copy), memory

    def _next_fails(self, kind: str) -> bool:
        fails = 0 in self._failures[kind]
        self._failures[kind] = [after - 1 for after in self._failures[kind] if after > 0]
        return fails

    # ---- memory

    def _memory_of(self, tensor: torch.Tensor) -> Memory:
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = Memory(self._current, StorageWeakRef(storage))
            memory.writes.append(Access(self._current, self._current.clock[self._current.index], "its producer"))
            self._memories[storage._cdata] = memory
        return memory

    def _check_reuse(
        self, memory: Memory, what: str, with_kernels: bool = False, through: torch.Tensor | None = None
    ) -> None:
        """Its home pool may hand the bytes out at once: every use of them must be ordered before what comes next.

        Args:
            memory: the bytes.
            what: has become of them.
            with_kernels: not copies alone.
            through: not copies of another buffer, which is still there; None: of every one.
        """
        for access in memory.accesses():
            if through is not None and access.copy is not None and access.copy.is_held_by_other(through):
                continue
            if access.copy is None and memory.block is None and not with_kernels:
                continue  # kernels on torch's own memory are not the engine's business, unless it empties that
            if not any(self._knows(stream, access) for stream in (memory.home, *memory.recorded)):
                text = f"{_describe(memory)} {what} not ordered after {access.what} on {access.stream}"
                self._violation(text, access.copy)

    def _take_block(self, nbytes: int, stream: AdversarialStream) -> Block:
        size = max(_ALIGNMENT, (nbytes + _ALIGNMENT - 1) & -_ALIGNMENT)
        free = self._free_blocks.get((stream.index, size))
        return free.pop() if free else Block(size)

    def _forget_block(self, key: int, memory: Memory) -> None:
        """Forget a block whose storage is gone. Runs wherever its last reference was dropped, so it must not raise."""
        assert memory.block is not None
        del self._memories[key]
        self._check_reuse(memory, "was dropped")
        memory.poison()
        self._free_blocks.setdefault((memory.home.index, memory.block.nbytes), []).append(memory.block)

    def _close_slab(self, slab: AdversarialSlab) -> None:
        self._slabs.remove(slab)
        for *_, access in slab.uses:
            if self._host_clock.get(access.stream.index, 0) < access.tick:
                self._violation(f"a host slab was closed before the host knew that {access.what} is done", access.copy)

    # ---- streams and kernels

    def _add_stream(self, name: str, is_compute: bool) -> AdversarialStream:
        self._streams.append(AdversarialStream(len(self._streams), name, is_compute, self._running))
        return self._streams[-1]

    def _compute_stream(self, name: str) -> AdversarialStream:
        if name not in self._compute:
            self._compute[name] = self._add_stream(name, is_compute=True)
        return self._compute[name]

    def _run_operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        signature = self._signatures.get(func) or self._signatures.setdefault(func, _Signature.of(func))
        if signature.touches_no_bytes:
            return func(*args, **kwargs)
        stream = self._current
        tick = stream.tick()
        access = Access(stream, tick, signature.name, knows=dict(stream.clock) if len(self._compute) > 1 else None)
        written = {t.untyped_storage()._cdata for t in signature.written(args, kwargs)}
        for tensor in _tensors((args, tuple(kwargs.values()))):
            self._check_operand(tensor, access, written)
        result = func(*args, **kwargs)
        for tensor in _tensors((result,)):
            self._note_result(tensor, access, written)
        self._prune()
        return result

    def _check_operand(self, tensor: torch.Tensor, access: Access, written: set[int]) -> None:
        key = tensor.untyped_storage()._cdata
        memory = self._memories.get(key)
        if memory is None or not memory.is_watched:
            return
        if memory.is_empty:  # for real this is the end of the process
            text = f"{access.what} on {access.stream} uses a storage that was emptied"
            self._violation(text)
            raise RuntimeError(text)
        is_write = key in written
        before = len(self.hazards)
        self._require(access, "reads or writes a buffer", memory.writes)
        if is_write:
            self._check_write(tensor, access, [a for a in memory.reads.values() if a.copy is not None])
        else:
            memory.reads[access.stream.index, 0] = access
        if len(self.hazards) > before:
            memory.poison()

    def _check_write(self, tensor: torch.Tensor, access: Access, copies: list[Access]) -> None:
        if not _is_part(tensor):
            self._require(access, "overwrites a buffer", copies)
            return
        nbytes = tensor.element_size()
        for earlier in copies:
            if earlier.copy is not None and not self._knows(access.stream, earlier):
                earlier.copy.note_written(int(tensor.storage_offset()) * nbytes, tensor.numel() * nbytes)

    def _note_result(self, tensor: torch.Tensor, access: Access, written: set[int]) -> None:
        storage = tensor.untyped_storage()
        memory = self._memories.get(storage._cdata)
        if memory is None:
            memory = self._memories[storage._cdata] = Memory(access.stream, StorageWeakRef(storage))
        elif storage._cdata not in written:
            return
        memory.writes = [access]
        copies = {key: read for key, read in memory.reads.items() if read.copy is not None} if _is_part(tensor) else {}
        memory.reads = copies

    def _prune(self) -> None:
        self._num_operations += 1
        if self._num_operations % _PRUNE_EVERY == 0:
            gone = [key for key, memory in self._memories.items() if memory.ref is not None and memory.ref.expired()]
            for key in gone:
                del self._memories[key]


class _ObserveCompute(TorchDispatchMode):
    """Shows every operation to the device. Stays on inside `Tensor.backward()`, unlike a TorchFunctionMode."""

    def __init__(self, device: AdversarialDevice) -> None:
        super().__init__()
        self._device = device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # the wrapper that skips it imports all of the compiler, and costs more than the checks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._device._run_operation(func, args, kwargs or {})


class _Signature(NamedTuple):
    """What an operator's schema says about the memory it touches."""

    name: str
    touches_no_bytes: bool
    written_positions: tuple[int, ...]
    written_names: tuple[str, ...]

    @classmethod
    def of(cls, func: Any) -> _Signature:
        schema = func._schema
        written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments]
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        # set_ and resize_ change where a tensor points, not what is there.
        is_pointer = schema.name in ("aten::set_", "aten::resize_")
        return cls(
            schema.name,
            is_view or is_pointer,
            tuple(position for position, is_write in enumerate(written) if is_write),
            tuple(a.name for a, is_write in zip(schema.arguments, written, strict=True) if is_write),
        )

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
        if self.written_positions:
            found = [args[position] for position in self.written_positions if position < len(args)]
            yield from _tensors((*found, *(kwargs[name] for name in self.written_names if name in kwargs)))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:  # others have no storage of their own
                yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _slab_of(region: HostRegion) -> AdversarialSlab:
    assert isinstance(region.slab, AdversarialSlab)
    return region.slab


def _is_part(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is dense, and its storage has other bytes, too."""
    return tensor.is_contiguous() and tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()


def _describe(memory: Memory) -> str:
    span = memory.span()
    size = "a dropped buffer" if span is None else f"a buffer of {span[1]} bytes"
    return f"{size} of {memory.home}'s pool"


def _merge_into(clock: Clock, other: Clock) -> None:
    for index, tick in other.items():
        if clock.get(index, 0) < tick:
            clock[index] = tick


def _merged(clock: Clock, other: Clock) -> Clock:
    result = dict(clock)
    _merge_into(result, other)
    return result


def _includes(clock: Clock, other: Clock) -> bool:
    return all(clock.get(index, 0) >= tick for index, tick in other.items())
