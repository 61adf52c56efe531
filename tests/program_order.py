# SPDX-License-Identifier: Apache-2.0
"""Checks what is done around the replays of captured layers: uses of the same bytes are ordered, in two passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from offload_engine.captured_layers import CapturedLayers

PASSES = (0, 1)


class Node(NamedTuple):
    """A replay, or a batch of copies behind one."""

    kind: str
    """"replay", "out" or "in"."""
    of_pass: int
    number: int
    """Of the graph that is replayed, has saved, or reads."""


class Edge(NamedTuple):
    first: Node
    then: Node
    what: str


class ByteUse(NamedTuple):
    """A use of bytes of one memory, by its name: `begin` up to `end`."""

    memory: str
    begin: int
    end: int
    node: Node
    is_write: bool


def edges_of(captured: CapturedLayers) -> list[Edge]:
    """Return what comes before what, by the streams and by the waits."""
    found: list[Edge] = []
    last: dict[str, Node] = {}

    def issue(node: Node) -> Node:
        if node.kind in last:
            found.append(Edge(last[node.kind], node, "stream"))
        last[node.kind] = node
        return node

    for p in PASSES:
        for number, step in enumerate(captured.steps):
            replay = Node("replay", p, number)
            found += [Edge(Node("out", p, saved_by), replay, "left") for saved_by in step.left]
            found += [Edge(Node("in", p, number), replay, "reads")] if step.reads else []
            issue(replay)
            if step.copy_outs:
                found.append(Edge(replay, issue(Node("out", p, number)), "produced"))
            for copies in step.copy_ins:
                into = issue(Node("in", p, copies.number))
                found.append(Edge(replay, into, "free"))
                found += [Edge(Node("out", p, saved_by), into, "saved") for saved_by in copies.saved_by]
    return found


def unordered(
    captured: CapturedLayers, edges: list[Edge], of_kernels: Sequence[ByteUse] = ()
) -> list[tuple[ByteUse, ByteUse]]:
    """Return the pairs of uses of overlapping bytes, one of them a write, that no path of edges orders.

    Args:
        captured: the layers.
        edges: as `edges_of`, or fewer.
        of_kernels: the uses of kernels inside the graphs, where these are known.
    """
    uses = [*_uses(captured), *of_kernels]
    nodes = {use.node for use in uses} | {node for edge in edges for node in edge[:2]}
    number = {node: index for index, node in enumerate(nodes)}
    after = _reachable(len(nodes), [(number[edge.first], number[edge.then]) for edge in edges])

    def is_behind(one: ByteUse, other: ByteUse) -> bool:
        return bool(after[number[one.node]] >> number[other.node] & 1)

    by_memory: dict[str, list[ByteUse]] = defaultdict(list)
    for use in uses:
        by_memory[use.memory].append(use)
    return [
        (one, other)
        for of_memory in by_memory.values()
        for one, other in combinations(of_memory, 2)
        if one.begin < other.end
        and other.begin < one.end
        and (one.is_write or other.is_write)
        and one.node != other.node
        and not (is_behind(one, other) or is_behind(other, one))
    ]


def _reachable(count: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """Return, for each node, the nodes behind it, as the bits of a number."""
    following: list[list[int]] = [[] for _ in range(count)]
    num_before = [0] * count
    for source, target in edges:
        following[source].append(target)
        num_before[target] += 1
    order = [i for i in range(count) if not num_before[i]]
    for i in order:
        for j in following[i]:
            num_before[j] -= 1
            if not num_before[j]:
                order.append(j)
    after = [0] * count
    for i in reversed(order):
        for j in following[i]:
            after[i] |= after[j] | 1 << j
    return after


def _uses(captured: CapturedLayers) -> Iterator[ByteUse]:
    recording = captured.recording
    for p in PASSES:
        for number, step in enumerate(captured.steps):
            for source, region in step.copy_outs:
                begin, out = source.data_ptr(), Node("out", p, number)
                yield ByteUse("device", begin, begin + source.nbytes, out, False)
                for user in (number, recording.left_before[number]):  # the second stands for all graphs behind it
                    yield ByteUse("device", begin, begin + source.nbytes, Node("replay", p, user), True)
                yield ByteUse(f"host {id(region.slab)}", region.offset, region.offset + region.nbytes, out, True)
            for copies in step.copy_ins:
                into = Node("in", p, copies.number)
                for region, target in copies.copies:
                    yield ByteUse(f"host {id(region.slab)}", region.offset, region.offset + region.nbytes, into, False)
                    begin = target.data_ptr()
                    yield ByteUse("device", begin, begin + target.nbytes, into, True)
        for use in recording.uses:
            # The first stands for all graphs before it: the slot is of their memory. The second has it last.
            for user in (use.after, use.number):
                yield ByteUse("device", use.address, use.address + use.saved.nbytes, Node("replay", p, user), True)
