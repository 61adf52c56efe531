# SPDX-License-Identifier: Apache-2.0
"""Moves bytes between the device and the host tier: streams and events, and every rule that orders them.

[Rules of order] "Compute" is the stream that ran the model's kernels and whose memory pool owns the buffer.

 1. Produce, then copy out. Copy-out reads what compute wrote: the copy-out stream waits for an event recorded on
    compute, the stream that saved the tensor, when the group commits. (Not when the copy is issued, which may be later:
    the copy would then wait for compute work queued in between.)
 2. Reuse of a lease. Earlier copies may still touch host bytes that are lent again. The pool lends them together with
    the events of those copies, and the copy-out stream waits for each before the first byte.
 3. Copy, then release the buffer. The allocator gives a released buffer to compute at once. Compute therefore waits
    for the last copy that touched it (a copy-out reading it, or an unused copy-in) before the reference is dropped.
 4. Allocate, then copy in. The buffer of a copy-in comes from compute's pool, where kernels issued earlier may still
    use the same bytes: the copy-in stream waits for an event recorded on compute after the allocation.
 5. Copy in, then use. A stream that reads a copied-in buffer waits for its copy first.
 6. Read elsewhere, then release the buffer. If another compute stream read a copied-in buffer, or read a storage for
    its holders for the last time, the stream whose pool gets the bytes back waits for that reader first.
 7. Allocated elsewhere. The bytes of a storage that one compute stream allocated and another saved go back to the pool
    of the first: that stream, too, waits for the copy-out (3) and for the last read (6).

A copy-in needs no wait of its own for its copy-out: the bytes are on host only after the buffer was released, that is,
after compute waited for the copy-out (3), and the copy-in waits for compute (4).

A buffer that is handed over to its one reader is freed when that reader drops it: on compute, which has waited by then
for the last copy that touched it (3, 5), and no other stream reads it (6, 7). Its host bytes stay lent, for another
copy-in into another buffer, and are returned with the event of the last one (2).

A storage held by outside references that are not read before its backward is emptied where any other would be released,
and refilled where any other would be allocated: "release" and "allocate" above stand for both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from offload_engine._devices.base import CopyError, Device, Event, Stream
from offload_engine._devices.regions import whole
from offload_engine._host.leases import GroupLease
from offload_engine._observe.labels import Ranges
from offload_engine._observe.record import Awaited
from offload_engine._observe.recorder import Recorder
from offload_engine._saved.storage import SavedStorage
from offload_engine.planning.moves import IN, OUT


class TransferContext:
    """Owns the device and the two copy streams that all chunks share."""

    def __init__(self, device: Device) -> None:
        self.device: Device = device
        self.recorder: Recorder | None = None  # while a step is recorded
        self.is_captured: bool = False  # a capture has been announced: the next step becomes a CUDA graph
        self.ranges: Ranges = Ranges()
        # Called just before a buffer is released. From then on its storage may be reused, unless the engine has another
        # buffer over it, saved again after a write. Only the tests' adversarial device has this hook.
        self.on_release: Callable[[torch.Tensor], None] | None = getattr(device, "on_release", None)
        # Two streams: in one queue, a copy-in that the backward waits for would queue behind copy-outs.
        self.copy_out_stream: Stream = device.new_stream("copy_out")  # trails the forward
        self.copy_in_stream: Stream = device.new_stream("copy_in")  # runs ahead of the backward


def fork_copy_streams(context: TransferContext) -> None:
    """Make both copy streams wait for the current one, so that a capture of that stream records them as well."""
    device = context.device
    for stream in (context.copy_out_stream, context.copy_in_stream):
        device.wait_stream(stream, device.current_stream())


def join_copy_streams(context: TransferContext) -> None:
    """Make the current stream wait for both copy streams; a capture of it cannot end otherwise.

    This also orders replays: copy-outs of the next replay write the host bytes that copy-ins of this one read.
    """
    device = context.device
    for stream in (context.copy_out_stream, context.copy_in_stream):
        device.wait_stream(device.current_stream(), stream)


def record_produced(storages: list[SavedStorage], context: TransferContext) -> list[Event]:
    """Record the events that the copy-out of `storages` has to wait for: all work queued on their streams by now."""
    return [context.device.record_event(compute) for compute in _streams_of(storages)]


def copy_out(
    storages: list[SavedStorage], lease: GroupLease, produced: Sequence[Event] | None, context: TransferContext
) -> Event:
    """Issue the copy-out of `storages` into their regions of `lease`; return the event after the last byte.

    Args:
        storages: of one group.
        lease: of their host bytes.
        produced: what `record_produced` returned when the group committed; None: it commits now.
        context: device and copy streams.
    """
    device, stream, recorder = context.device, context.copy_out_stream, context.recorder
    if produced is None:
        for compute in _streams_of(storages):
            device.wait_stream(stream, compute)  # Rule 1
    else:
        for event in produced:
            device.wait_event(stream, event)  # Rule 1
    for event in lease.ready_after:
        with suppress(CopyError):  # the copy failed, but it is over, and its data is no longer needed
            device.wait_event(stream, event)  # Rule 2
    copies = []
    for storage in storages:
        assert storage.region is not None and storage.buffer is not None
        copies.append((storage.buffer, storage.region))
    begin = None if recorder is None else recorder.mark(stream)
    try:
        copied_out = device.copy_out(stream, copies)
        if recorder is not None:
            recorder.note_copy(OUT, storages[0].group, sum([s.nbytes for s in storages]), begin, recorder.mark(stream))
        return copied_out
    except BaseException:
        _finish(stream, device)
        raise


def copy_in(storages: list[SavedStorage], context: TransferContext) -> Event:
    """Allocate a buffer for each of `storages` and issue its copy-in; return the event after the last byte."""
    device, stream, recorder = context.device, context.copy_in_stream, context.recorder
    copies = []
    for storage in storages:
        assert storage.region is not None
        if storage.emptied is None:
            buffer = device.allocate(storage.nbytes, storage.stream, storage.spec)
        else:
            buffer = device.restore(storage.emptied, storage.nbytes, storage.stream)
        copies.append((storage.region, buffer))
    for compute in _streams_of(storages):
        device.wait_stream(stream, compute)  # Rule 4
    begin = None if recorder is None else recorder.mark(stream)
    try:
        copied_in = device.copy_in(stream, copies)
        for i, storage in enumerate(storages):
            if storage.emptied is not None:  # refilled in place: the tensors over it keep their own shapes
                storage.spec = None
            storage.buffer, storage.emptied, storage.alloc_stream = copies[i][1], None, None
            storage.arrived_version = copies[i][1]._version
        if recorder is not None:
            recorder.note_copy(IN, storages[0].group, sum([s.nbytes for s in storages]), begin, recorder.mark(stream))
        return copied_in
    except BaseException:
        _finish(stream, device)
        copies.clear()  # keeps the buffers alive until here: compiled code drops variables after their last use
        raise


def wait_for_last_copy(storages: list[SavedStorage], context: TransferContext) -> None:
    """Make compute wait for the last copy that touched each buffer of `storages`, before they are released.

    Raises:
        CopyError: if such a copy failed.
    """
    device = context.device
    settled: Event | None = None
    settled_on: Stream = None  # a group may have saved on several streams
    for storage in storages:
        pending = storage.pending
        if pending is None:
            continue
        if (pending is not settled or storage.stream != settled_on) and not device.is_complete(pending):
            recorder = context.recorder
            begin = None if recorder is None else recorder.mark(storage.stream)
            device.wait_event(storage.stream, pending)  # Rule 3
            if recorder is not None:
                recorder.note_wait(Awaited.COPY_OUT, storage.group, begin, recorder.mark(storage.stream))
        settled, settled_on = pending, storage.stream
        storage.pending = None


def release_buffer(storage: SavedStorage, context: TransferContext) -> None:
    """Release the device bytes of `storage`; call it after compute has waited for its last copy."""
    if storage.readers or storage.last_read is not None or storage.alloc_stream is not None:
        _follow_readers(storage, context.device)
    assert storage.buffer is not None
    if context.on_release is not None:
        context.on_release(storage.buffer)
    storage.aliases = storage.views = None
    storage.buffer = storage.storage = None


def hand_over_buffer(storage: SavedStorage) -> None:
    """Hand the buffer over to its one reader, on the current stream, which is `storage.stream`."""
    storage.aliases = storage.views = None
    storage.buffer = storage.storage = storage.copied_in = None


def empty_buffer(storage: SavedStorage, context: TransferContext) -> None:
    """Empty a buffer that outside references hold: its storage keeps its identity and has no bytes from now on."""
    _follow_readers(storage, context.device)
    assert storage.storage is not None
    storage.emptied = storage.storage
    storage.aliases = None
    storage.buffer = storage.storage = None
    context.device.empty(storage.emptied)


def refill(storage: SavedStorage, context: TransferContext) -> torch.Tensor:
    """Issue a copy-in into the storage that outside references hold, emptied or about to be; return its bytes."""
    assert storage.emptied is not None and storage.region is not None
    device, stream = context.device, context.copy_in_stream
    if storage.emptied.nbytes():
        target = whole(storage.emptied)
    else:
        target = device.restore(storage.emptied, storage.nbytes, storage.stream)
    device.wait_stream(stream, storage.stream)  # Rule 4
    device.copy_in(stream, [(storage.region, target)])
    return target


def await_copy_in(storages: list[SavedStorage], context: TransferContext) -> None:
    """Make the current stream, which is about to read `storages`, wait for their copy-in, issued together.

    Raises:
        CopyError: if it failed.
    """
    device = context.device
    reader = device.current_stream()
    awaited: Event | None = None
    for storage in storages:
        copied_in = storage.copied_in
        if copied_in is not awaited:
            recorder = context.recorder
            begin = None if recorder is None else recorder.mark(reader)
            device.wait_event(reader, copied_in)  # Rule 5
            if recorder is not None:
                recorder.note_wait(Awaited.COPY_IN, storage.group, begin, recorder.mark(reader))
            awaited = copied_in
        storage.ready_on = reader
        if reader == storage.stream:
            storage.pending = None
        elif reader not in storage.readers:
            storage.readers = (*storage.readers, reader)


def record_last_read(storage: SavedStorage, context: TransferContext) -> None:
    """Record the last read of `storage`: work already queued on the current stream."""
    reader = context.device.current_stream()
    if reader != storage.stream or storage.alloc_stream is not None:
        storage.last_read = context.device.record_event(reader)


def _finish(stream: Stream, device: Device) -> None:
    """Block the host until copies that have no event are over: a fault or an interrupt came between copy and event."""
    with suppress(CopyError):
        device.synchronize(device.record_event(stream))


def _follow_readers(storage: SavedStorage, device: Device) -> None:
    for reader in storage.readers:
        device.wait_stream(storage.stream, reader)  # Rule 6
    storage.readers = ()
    if storage.last_read is not None:
        device.wait_event(storage.stream, storage.last_read)  # Rule 6
    if storage.alloc_stream is not None:
        for event in (storage.copied_out, storage.last_read):
            if event is not None:
                device.wait_event(storage.alloc_stream, event)  # Rule 7
    storage.last_read = None


def _streams_of(storages: list[SavedStorage]) -> list[Stream]:
    """Return each compute stream of `storages` once; storages of one group nearly always share theirs."""
    found = [storages[0].stream]
    for storage in storages:
        if storage.stream not in found:
            found.append(storage.stream)
    return found
