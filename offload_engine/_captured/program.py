# SPDX-License-Identifier: Apache-2.0
"""Derives the waits and copies around each replay from what the captures have saved and read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from offload_engine._captured.saves import CapturedStorage
from offload_engine._devices.regions import HostRegion, storage_at, whole


class Use(NamedTuple):
    """Read by one capture of a storage that has left."""

    saved: CapturedStorage
    number: int
    """Number of the capture."""
    after: int
    """Number of the last capture that used the same bytes of the slot; -1: none."""
    address: int
    """Device address that it reads."""


class CopyIn(NamedTuple):
    """The copy-ins for one graph."""

    number: int
    """Number of the graph."""
    copies: list[tuple[HostRegion, torch.Tensor]]
    saved_by: tuple[int, ...]
    """Graphs whose copy-outs it must follow, because compute has not waited for them yet."""


@dataclass
class Step:
    """Waits and copies around the replays of one graph.

    Attributes:
        left: graphs whose copy-outs compute waits for, because this graph uses the bytes again.
        reads: whether compute waits for this graph's copy-ins.
        copy_outs: copies of what this graph has saved, after its replay.
        copy_ins: copies for later graphs, after its replay, in their order.
    """

    left: list[int] = field(default_factory=list)
    reads: bool = False
    copy_outs: list[tuple[torch.Tensor, HostRegion]] = field(default_factory=list)
    copy_ins: list[CopyIn] = field(default_factory=list)


def make_program(
    uses: Sequence[Use], left_before: Mapping[int, int], num_graphs: int, device: torch.device
) -> tuple[Step, ...]:
    """Return the steps of all graphs.

    A copy-in begins as soon as its slot is free and its bytes are on the device: after the last graph that used the
    slot, or after the graph that saved. Storages that no backward reads are not copied.

    Args:
        uses: reads of storages that have left, in the order of the captures.
        left_before: maps each capture whose storages have left to the capture before which they did.
        num_graphs: number of captured graphs.
        device: device of the addresses.
    """
    steps = tuple(Step() for _ in range(num_graphs))
    copied: set[CapturedStorage] = set()
    for saved in (use.saved for use in uses):
        if saved in copied:
            continue
        copied.add(saved)
        assert saved.region is not None
        step = steps[saved.number]
        if not step.copy_outs:
            steps[left_before[saved.number]].left.append(saved.number)
        step.copy_outs.append((_at(saved.address, saved.nbytes, device), saved.region))
    by_graph: defaultdict[int, list[Use]] = defaultdict(list)
    for use in uses:
        by_graph[use.number].append(use)
    for number, of_graph in by_graph.items():
        begin = max(max(use.after, use.saved.number) for use in of_graph)
        not_awaited = {use.saved.number for use in of_graph if left_before[use.saved.number] > begin}
        pairs = _joined([(use.saved.region, use.address) for use in of_graph if use.saved.region is not None])
        copies = [(region, _at(address, region.nbytes, device)) for region, address in pairs]
        steps[begin].copy_ins.append(CopyIn(number, copies, tuple(sorted(not_awaited))))
        steps[number].reads = True
    return steps


def _joined(pairs: list[tuple[HostRegion, int]]) -> list[tuple[HostRegion, int]]:
    """Merge pairs that are adjacent both on host and on the device: one copy takes the host less time.

    One graph reads from one slot only, so no copy crosses the end of an allocation.
    """
    found: list[tuple[HostRegion, int]] = []
    for region, address in sorted(pairs, key=lambda pair: pair[1]):
        if found:
            last, begin = found[-1]
            if (region.slab, region.offset, address) == (last.slab, last.offset + last.nbytes, begin + last.nbytes):
                found[-1] = HostRegion(last.slab, last.offset, last.nbytes + region.nbytes), begin
                continue
        found.append((region, address))
    return found


def _at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    return whole(storage_at(address, nbytes, device))
