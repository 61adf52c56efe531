# SPDX-License-Identifier: Apache-2.0
"""Checks a captured graph offline: whether each two uses of the same bytes have a path between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Node = dict[str, Any]
Edge = tuple[int, int]


@dataclass
class Checked:
    """What a check has found. Nodes are numbers of the graph's list."""

    host_pairs: int = 0
    """Pairs of copies that share host bytes, of which one writes them."""
    device_pairs: int = 0
    """Pairs of a copy and another node that share device bytes."""
    unread_kernels: int = 0
    """Kernels in whose parameters no address was found: the check does not see what they use."""
    unordered: list[tuple[str, int, int]] = field(default_factory=list)
    """Pairs without a path: what they share, "host" or "device", and both nodes."""
    unfilled: list[int] = field(default_factory=list)
    """Copies to the device whose host bytes no single copy before them has written."""
    unawaited: list[int] = field(default_factory=list)
    """Copies for which nothing waits, not even the end of the graph."""

    @property
    def is_right(self) -> bool:
        """Return whether no fault was found."""
        return not (self.unordered or self.unfilled or self.unawaited)


def check(nodes: Sequence[Node], edges: Sequence[Edge]) -> Checked:
    """Check the order of all uses of what copies touch.

    A copy node has `kind`, "out" or "in", and the spans `host` and `device`, each first byte and end; other nodes may
    have `addresses`, at which they use device memory.
    """
    after = reachable(len(nodes), edges)
    found = Checked(unread_kernels=sum(n["type"] == "kernel" and not n.get("addresses") for n in nodes))
    for i, j in _host_pairs(nodes):
        found.host_pairs += 1
        if not _ordered(after, i, j):
            found.unordered.append(("host", i, j))
    for i, j in _device_pairs(nodes):
        found.device_pairs += 1
        if not _ordered(after, i, j):
            found.unordered.append(("device", i, j))
    copies = [i for i, node in enumerate(nodes) if node.get("kind")]
    found.unfilled = [i for i in copies if nodes[i]["kind"] == "in" and not _is_filled(nodes, after, i)]
    found.unawaited = [i for i in copies if not after[i]]
    return found


@dataclass(frozen=True)
class TakenOut:
    """What becomes of a graph when edges from and to copies are taken out, one at a time."""

    noticed: list[Edge]
    """The check finds a fault without it."""
    superfluous: list[Edge]
    """Another path has the same ends, so nothing is lost."""
    between_copies: list[Edge]
    """Both ends are copies of one direction that share no bytes: only their order is lost."""
    unnoticed: list[Edge]
    """All others: an order is lost that the check does not see, or that nothing needs."""


def take_out(nodes: Sequence[Node], edges: Sequence[Edge]) -> TakenOut:
    """Check the graph without each edge of its copies."""
    taken = TakenOut([], [], [], [])
    spare = set(superfluous(len(nodes), edges))
    for edge in edges_of_copies(nodes, edges):
        one, other = (nodes[i].get("kind") for i in edge)
        if not check(nodes, [each for each in edges if each != edge]).is_right:
            taken.noticed.append(edge)
        elif edge in spare:
            taken.superfluous.append(edge)
        else:
            (taken.between_copies if one == other else taken.unnoticed).append(edge)
    return taken


def edges_of_copies(nodes: Sequence[Node], edges: Sequence[Edge]) -> list[Edge]:
    """Return the edges from and to copies between host and device."""
    return [edge for edge in edges if any(nodes[i].get("kind") for i in edge)]


def superfluous(count: int, edges: Sequence[Edge]) -> list[Edge]:
    """Return the edges beside which another path has the same ends."""
    after = reachable(count, edges)
    targets: dict[int, list[int]] = {}
    for source, target in edges:
        targets.setdefault(source, []).append(target)
    return [(a, b) for a, b in edges if any(after[c] >> b & 1 for c in targets[a] if c != b)]


def reachable(count: int, edges: Sequence[Edge]) -> list[int]:
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


def _host_pairs(nodes: Sequence[Node]) -> Iterator[Edge]:
    copies = [(i, node) for i, node in enumerate(nodes) if node.get("kind")]
    for number, (i, one) in enumerate(copies):
        for j, other in copies[number + 1 :]:
            if "out" in (one["kind"], other["kind"]) and _overlap(one["host"], other["host"]):
                yield i, j


def _device_pairs(nodes: Sequence[Node]) -> Iterator[Edge]:
    for i, one in enumerate(nodes):
        if not one.get("kind"):
            continue
        for j, other in enumerate(nodes):
            if other.get("kind"):
                if i < j and "in" in (one["kind"], other["kind"]) and _overlap(one["device"], other["device"]):
                    yield i, j
            elif _touches(other, one["device"]):
                yield i, j


def _is_filled(nodes: Sequence[Node], after: list[int], copy_in: int) -> bool:
    """Return whether the last copy to these host bytes before `copy_in` has written all of them."""
    begin, end = nodes[copy_in]["host"]
    writers = [
        i
        for i, node in enumerate(nodes)
        if node.get("kind") == "out" and after[i] >> copy_in & 1 and _overlap(node["host"], [begin, end])
    ]
    last = [i for i in writers if not any(after[i] >> j & 1 for j in writers)]
    return len(last) == 1 and nodes[last[0]]["host"][0] <= begin and end <= nodes[last[0]]["host"][1]


def _overlap(one: Sequence[int], other: Sequence[int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _touches(node: Node, span: Sequence[int]) -> bool:
    return any(span[0] <= address < span[1] for address in node.get("addresses", ()))


def _ordered(after: list[int], i: int, j: int) -> bool:
    return bool(after[i] >> j & 1 or after[j] >> i & 1)
