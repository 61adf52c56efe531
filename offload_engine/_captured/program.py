# SPDX-License-Identifier: Apache-2.0
"""What has to be done around each replay, from what the captures have saved and read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from offload_engine._captured.saves import CapturedStorage
from offload_engine._devices.regions import HostRegion, storage_at, whole


class Use(NamedTuple):
    """A capture that reads a storage which has left."""

    saved: CapturedStorage
    number: int
    """Of the capture."""
    after: int
    """The last capture that used the same bytes of the slot; -1: none."""
    address: int
    """Where it reads."""


class CopyIn(NamedTuple):
    """The copy-ins for one graph."""

    number: int
    """Of the graph."""
    copies: list[tuple[HostRegion, torch.Tensor]]
    saved_by: tuple[int, ...]
    """The graphs whose copy-outs it follows, because compute has not waited for them yet."""


@dataclass
class Step:
    """What is done around the replays of one graph.

    Attributes:
        left: graphs whose copy-outs compute waits for, because this graph uses the bytes again.
        reads: compute waits for this graph's copy-ins.
        copy_outs: of what this graph has saved, behind its replay.
        copy_ins: for later graphs, behind its replay, in their order.
    """

    left: list[int] = field(default_factory=list)
    reads: bool = False
    copy_outs: list[tuple[torch.Tensor, HostRegion]] = field(default_factory=list)
    copy_ins: list[CopyIn] = field(default_factory=list)


def make_program(
    uses: Sequence[Use], left_before: Mapping[int, int], num_graphs: int, device: torch.device
) -> tuple[Step, ...]:
    """Return the steps of all graphs.

    A copy-in begins as soon as its slot is free and its bytes are there: behind the last graph that used the slot, or
    the graph that saved. What no backward reads is not copied.

    Args:
        uses: in the order of the captures.
        left_before: of captures whose storages have left, the capture before which they did.
        num_graphs: that were captured.
        device: of the addresses.
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
    """Return regions and addresses with those as one that are adjacent in both: one copy takes the host less time.

    What one graph reads is in one slot, so no copy goes over the end of an allocation.
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
