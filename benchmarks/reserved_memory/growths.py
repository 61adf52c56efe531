# SPDX-License-Identifier: Apache-2.0
"""Where in a history of torch's caching allocator the reserved memory grew, and what was free at that moment."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

_RESERVES = ("segment_alloc", "segment_map")
_GIVES_BACK = ("segment_free", "segment_unmap")
_BLOCK_BYTES = 512  # sizes of blocks are multiples of it; events have those that were asked for
_SMALLEST_BYTES = 1 << 20  # of a free stretch that counts: what is left of a large block is not given out below that


@dataclass(frozen=True)
class Growth:
    """The allocator reserved more, because it had no free block for a request. Sizes are in bytes."""

    nbytes: int
    request_bytes: int
    asked_by: str
    """The innermost line of Python outside torch that made the request; empty where the history has none."""
    reserved_bytes: int
    """On the device before it grew, as the next one."""
    allocated_bytes: int
    """What waits for another stream to be done with it included."""
    free_bytes: Sequence[int]
    """Every free stretch of the request's stream from 1 MiB on, largest first: no request may take parts of two."""


@dataclass(frozen=True)
class History:
    """One device over the time of a history."""

    peak_reserved_bytes: int
    peak_allocated_bytes: int
    growths: Sequence[Growth]


class _Stretch(NamedTuple):
    begin: int
    end: int
    stream: int


@dataclass
class _Memory:
    """What is reserved, as stretches of addresses, and the blocks in it that are allocated."""

    is_expandable: bool
    stretches: list[_Stretch] = field(default_factory=list)
    blocks: dict[int, int] = field(default_factory=dict)
    reserved_bytes: int = 0
    allocated_bytes: int = 0

    def reserve(self, begin: int, nbytes: int, stream: int) -> None:
        self.reserved_bytes += nbytes
        self.stretches = sorted([*self.stretches, _Stretch(begin, begin + nbytes, stream)])
        if self.is_expandable:  # else what lies side by side are segments, and no block reaches into the next
            self.stretches = _joined(self.stretches)

    def give_back(self, begin: int, nbytes: int) -> None:
        self.reserved_bytes -= nbytes
        left: list[_Stretch] = []
        for stretch in self.stretches:
            left.append(stretch._replace(end=min(stretch.end, begin)))
            left.append(stretch._replace(begin=max(stretch.begin, begin + nbytes)))
        self.stretches = [stretch for stretch in left if stretch.begin < stretch.end]

    def allocate(self, begin: int, nbytes: int) -> None:
        self.blocks[begin] = -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES
        self.allocated_bytes += self.blocks[begin]

    def free(self, begin: int) -> None:
        if begin not in self.blocks:
            raise ValueError(f"no block at {begin:#x}: the events and the segments are not of one snapshot")
        self.allocated_bytes -= self.blocks.pop(begin)

    def free_stretches(self, stream: int) -> list[int]:
        """Return the free stretches, largest first."""
        found, blocks = [], iter(sorted(self.blocks.items()))
        block = next(blocks, None)
        for begin, end, owner in self.stretches:
            free: list[int] = []
            while block is not None and block[0] < end:
                free.append(block[0] - begin)
                begin, block = block[0] + block[1], next(blocks, None)
            found += [*free, end - begin] if owner == stream else []
        return sorted((nbytes for nbytes in found if nbytes >= _SMALLEST_BYTES), reverse=True)


def read_history(file: Path) -> History:
    """Read the history of the device that has the longest one in a snapshot of torch's.

    Unpickles it: read only what you have written yourself.

    Raises:
        ValueError: if it is no snapshot, holds no history of any device, or one that does not fit its segments.
    """
    try:
        snapshot = pickle.loads(file.read_bytes())
        segments, traces = snapshot["segments"], snapshot["device_traces"]
    except Exception as error:  # a pickle of something else may raise anything
        raise ValueError(f"{file} is no snapshot of torch's allocator: {error!r}") from error
    if not any(traces):
        raise ValueError(
            f"{file} holds no history: call torch.cuda.memory._record_memory_history() before the step, and write the "
            "snapshot before you stop the recording"
        )
    device, events = max(enumerate(traces), key=lambda numbered: len(numbered[1]))
    return replay([segment for segment in segments if segment.get("device", device) == device], events)


def replay(segments: Iterable[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> History:
    """Undo the events of a snapshot, whose `segments` are those at the end, and run them again.

    Raises:
        ValueError: if the events do not lead to the segments.
    """
    memory = _at_the_end(segments, events)
    for event in reversed(events):
        _apply(memory, event, is_undone=True)
    reserved, allocated = memory.reserved_bytes, memory.allocated_bytes
    growths: list[Growth] = []
    pending: tuple[int, int, int, list[int]] | None = None
    for event in events:
        if event["action"] in _RESERVES:
            free = memory.free_stretches(event["stream"])
            before = pending or (0, memory.reserved_bytes, memory.allocated_bytes, free)
            pending = (before[0] + event["size"], *before[1:])
        elif event["action"] == "alloc" and pending is not None:
            grown, *state = pending
            growths.append(Growth(grown, event["size"], _asked_by(event.get("frames", ())), *state))
            pending = None
        elif event["action"] == "oom":  # nothing has come of what was reserved for it
            pending = None
        _apply(memory, event)
        reserved, allocated = max(reserved, memory.reserved_bytes), max(allocated, memory.allocated_bytes)
    return History(reserved, allocated, growths)


def _at_the_end(segments: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> _Memory:
    memory = _Memory(is_expandable=any(event["action"] == "segment_map" for event in events))
    for segment in segments:
        address = segment["address"]
        memory.reserve(address, segment["total_size"], segment["stream"])
        for block in segment["blocks"]:
            if block["state"] != "inactive":  # one that waits for another stream is not free yet
                memory.allocate(address, block["size"])
            address += block["size"]
    return memory


def _apply(memory: _Memory, event: Mapping[str, Any], is_undone: bool = False) -> None:
    action = event["action"]
    if action in ("alloc", "free_completed"):
        if (action == "alloc") != is_undone:
            memory.allocate(event["addr"], event["size"])
        else:
            memory.free(event["addr"])
    elif action in _RESERVES or action in _GIVES_BACK:
        if (action in _RESERVES) != is_undone:
            memory.reserve(event["addr"], event["size"], event["stream"])
        else:
            memory.give_back(event["addr"], event["size"])


def _joined(stretches: Iterable[_Stretch]) -> list[_Stretch]:
    """Merge adjacent stretches; return them in order of addresses."""
    found: list[_Stretch] = []
    for stretch in stretches:
        if found and (found[-1].end, found[-1].stream) == (stretch.begin, stretch.stream):
            found[-1] = found[-1]._replace(end=stretch.end)
        else:
            found.append(stretch)
    return found


def _asked_by(frames: Iterable[Mapping[str, Any]]) -> str:
    for frame in frames:  # innermost first
        path = Path(frame["filename"])
        if path.suffix == ".py" and "-packages/torch/" not in path.as_posix():
            return f"{path.name}:{frame['line']} {frame['name']}"
    return ""
