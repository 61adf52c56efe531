"""Where in a history of torch's caching allocator the reserved memory grew, and what was free at that moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_RESERVES = ("segment_alloc", "segment_map")
_GIVES_BACK = ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class Growth:
    """The allocator reserved more, because it had no free block for a request. Sizes are in bytes."""

    nbytes: int
    request_bytes: int
    asked_by: str
    """The innermost line of Python outside torch that made the request; empty where the history has none."""
    reserved_bytes: int
    """Before it grew, as the next two."""
    allocated_bytes: int
    free_bytes: Sequence[int]
    """Every free stretch, largest first: no request may take parts of two."""


@dataclass(frozen=True)
class History:
    """One device over the time of a history."""

    peak_reserved_bytes: int
    peak_allocated_bytes: int
    growths: Sequence[Growth]


@dataclass
class _Memory:
    """What is reserved, as stretches of addresses, and the blocks in it that are allocated."""

    is_expandable: bool
    stretches: list[tuple[int, int]] = field(default_factory=list)
    blocks: dict[int, int] = field(default_factory=dict)
    reserved_bytes: int = 0
    allocated_bytes: int = 0

    def reserve(self, begin: int, nbytes: int) -> None:
        self.reserved_bytes += nbytes
        self.stretches = sorted([*self.stretches, (begin, begin + nbytes)])
        if self.is_expandable:  # else what lies side by side are segments, and no block reaches into the next
            self.stretches = list(_joined(self.stretches))

    def give_back(self, begin: int, nbytes: int) -> None:
        self.reserved_bytes -= nbytes
        pieces = [
            piece
            for low, high in self.stretches
            for piece in ((low, min(high, begin)), (max(low, begin + nbytes), high))
        ]
        self.stretches = [(low, high) for low, high in pieces if low < high]

    def allocate(self, begin: int, nbytes: int) -> None:
        self.blocks[begin] = nbytes
        self.allocated_bytes += nbytes

    def free(self, begin: int) -> None:
        self.allocated_bytes -= self.blocks.pop(begin, 0)

    def free_stretches(self) -> list[int]:
        """Largest first."""
        found, blocks = [], iter(sorted(self.blocks.items()))
        block = next(blocks, None)
        for low, high in self.stretches:
            while block is not None and block[0] < high:
                found.append(block[0] - low)
                low, block = block[0] + block[1], next(blocks, None)
            found.append(high - low)
        return sorted((nbytes for nbytes in found if nbytes > 0), reverse=True)


def read_history(file: Path) -> History:
    """The history of the device that has the longest one in a snapshot of torch's.

    Unpickles it: read only what you have written yourself.

    Raises:
        ValueError: if it holds no history of any device.
    """
    import pickle

    snapshot = pickle.loads(file.read_bytes())
    traces = snapshot.get("device_traces", ()) if isinstance(snapshot, dict) else ()
    if not any(traces):
        raise ValueError(f"{file} holds no history: call torch.cuda.memory._record_memory_history() before the step")
    device, events = max(enumerate(traces), key=lambda numbered: len(numbered[1]))
    return replay([s for s in snapshot["segments"] if s.get("device", device) == device], events)


def replay(segments: Iterable[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> History:
    """From what a snapshot holds: `segments` are those at the end, so the events are undone first."""
    memory = _at_the_end(segments, events)
    for event in reversed(events):
        _apply(memory, event, is_undone=True)
    reserved, allocated = memory.reserved_bytes, memory.allocated_bytes
    growths: list[Growth] = []
    pending: tuple[int, int, int, list[int]] | None = None
    for event in events:
        if event["action"] in _RESERVES:
            before = pending or (0, memory.reserved_bytes, memory.allocated_bytes, memory.free_stretches())
            pending = (before[0] + event["size"], *before[1:])
        elif event["action"] == "alloc" and pending is not None:
            grown, *state = pending
            growths.append(Growth(grown, event["size"], _asked_by(event.get("frames", ())), *state))
            pending = None
        _apply(memory, event)
        reserved, allocated = max(reserved, memory.reserved_bytes), max(allocated, memory.allocated_bytes)
    return History(reserved, allocated, growths)


def _at_the_end(segments: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]]) -> _Memory:
    memory = _Memory(is_expandable=any(event["action"] == "segment_map" for event in events))
    for segment in segments:
        memory.is_expandable |= bool(segment.get("is_expandable"))
        memory.reserve(segment["address"], segment["total_size"])
        address = segment["address"]
        for block in segment["blocks"]:
            if block["state"] != "inactive":  # one that waits for another stream is not free yet
                memory.allocate(address, block["size"])
            address += block["size"]
    return memory


def _apply(memory: _Memory, event: Mapping[str, Any], is_undone: bool = False) -> None:
    action, address, nbytes = event["action"], event["addr"], event["size"]
    if action in ("alloc", "free_completed"):
        if (action == "alloc") != is_undone:
            memory.allocate(address, nbytes)
        else:
            memory.free(address)
    elif action in _RESERVES or action in _GIVES_BACK:
        change = memory.reserve if (action in _RESERVES) != is_undone else memory.give_back
        change(address, nbytes)


def _joined(stretches: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What lies side by side becomes one; in order of addresses."""
    last: tuple[int, int] | None = None
    for low, high in stretches:
        if last is not None and low == last[1]:
            last = last[0], high
            continue
        if last is not None:
            yield last
        last = low, high
    if last is not None:
        yield last


def _asked_by(frames: Iterable[Mapping[str, Any]]) -> str:
    for frame in frames:  # innermost first
        path = Path(frame["filename"])
        if path.suffix == ".py" and "torch" not in path.parts:
            return f"{path.name}:{frame['line']} {frame['name']}"
    return ""
