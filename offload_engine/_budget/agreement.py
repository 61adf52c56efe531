# SPDX-License-Identifier: Apache-2.0
"""Makes several ranks decide alike: they exchange their measurements, and each takes the worst of each figure."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple

from offload_engine.planning.clocks import Link
from offload_engine.planning.memory import MemoryModel
from offload_engine.planning.moves import Boundary
from offload_engine.planning.other_bytes import OtherBytes, moment_of
from offload_engine.planning.recompute import RecomputeOption
from offload_engine.planning.shapes import ChunkShape, Shapes

Agree = Callable[[tuple[int, ...]], tuple[int, ...]]
"""Returns the largest of each number over the ranks."""

_GROUP_TIMES: Final = ("forward_ms", "backward_ms", "lead_backward_ms")
_CHUNK_TIMES: Final = ("head_ms", "head_backward_ms", "rest_ms", "rest_backward_ms")
_NS: Final = 1e6
_UNKNOWN: Final = -(1 << 62)
"""Less than any number of bytes."""


def are_alike(agree: Agree, text: str) -> bool:
    """Return whether every rank has this text."""
    number = zlib.crc32(text.encode())
    high, low = agree((number, -number))
    return high == -low


def most_of(agree: Agree, own: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    """Return the largest of each number over the ranks, and whether every rank has all of them."""
    agreed = agree((*own, *(-each for each in own)))
    most, least = agreed[: len(own)], tuple(-each for each in agreed[len(own) :])
    return most, most == least


def text_of_shapes(shapes: Shapes | None) -> str:
    """Return the groups as text: ranks that exchange figures of chunks must have the same."""
    return str([[(group.name, group.layer) for group in shape.groups] for shape in shapes or ()])


def agreed_options(agree: Agree, options: tuple[RecomputeOption, ...]) -> tuple[RecomputeOption, ...]:
    """Return options with the least bytes freed, and the most computed again and the highest cost, of all ranks.

    None if ranks have other options.
    """
    if not are_alike(agree, str([(option.name, sorted(option.replaces)) for option in options])):
        return ()
    own = ((-each.freed_bytes, each.output_bytes, round(_NS * each.milliseconds)) for each in options)
    numbers = iter(agree(tuple(number for each in own for number in each)))
    return tuple(
        dataclasses.replace(
            each, freed_bytes=-next(numbers), output_bytes=next(numbers), milliseconds=next(numbers) / _NS
        )
        for each in options
    )


def agreed_numbers(agree: Agree, *numbers: float) -> list[float]:
    """Return the largest of each number over all ranks: the longest time, for instance."""
    return [number / _NS for number in agree(tuple(round(_NS * number) for number in numbers))]


class AgreedJob(NamedTuple):
    """Shapes by which ranks decide alike."""

    shapes: Shapes
    most_share: float
    """Of all their bytes, the most that one rank has."""
    are_own: bool
    """Whether this rank has all of them."""


def agreed_job(agree: Agree, shapes: Shapes) -> AgreedJob:
    """Return shapes with the largest bytes of all ranks, and times.

    Experts of one rank have more tokens in one layer, those of another rank in the next. Each group must fit on every
    rank, but none has all of these bytes, and none computes for as long as the longest times of all groups: while one
    has much to do, the others wait for it, and that is part of their times. So together they are as long as on the rank
    on which they are longest. (8 layers of experts on two H200s, in the third step of a training: 281 and 350 ms; the
    longest of each group come to 466.)

    Args:
        agree: with the other ranks, all of which must have as many groups.
        shapes: of this rank.
    """
    own = [group.nbytes for shape in shapes for group in shape.groups]
    *sizes, most = agree((*own, sum(own)))
    next_size, next_time = iter(sizes), iter(agreed_times(agree, _times_of(shapes)))
    agreed = tuple(_with(shape, next_size, next_time) for shape in shapes)
    return AgreedJob(agreed, most / sum(sizes) if any(sizes) else 1.0, sizes == own)


def agreed_model(agree: Agree, model: MemoryModel, boundaries: Iterable[Boundary]) -> MemoryModel:
    """Return the model that holds on every rank: the most for all else, the least that is released early.

    One rank may reserve much in vain where another one does not. What is outside of their allocators is alike, so both
    are agreed, and not their sum: a replay tells another one of the two. (Experts on two H200s: 5.0 and 2.0 GiB.)

    Args:
        agree: with the other ranks.
        model: of this rank, which may have come to other boundaries than another one.
        boundaries: of a step of these ranks, in order.
    """
    known = tuple(dict.fromkeys(at for boundary in boundaries for at in (boundary, moment_of(boundary))))
    others = [model.others.before.get(at, _UNKNOWN) for at in known]
    early = [-model.others.early[at] if at in model.others.early else _UNKNOWN for at in known]
    always = _UNKNOWN if model.others.always is None else model.others.always
    outside = model.overhead_bytes - model.wasted_bytes
    own = model.between_bytes, outside, model.wasted_bytes, -model.floor_peak_bytes, always
    between, outside, wasted, floor_peak, always, *rest = agree((*own, *others, *early))
    others, early = rest[: len(known)], rest[len(known) :]
    return dataclasses.replace(
        model,
        between_bytes=between,
        overhead_bytes=outside + wasted,
        wasted_bytes=wasted,
        floor_peak_bytes=-floor_peak,
        others=OtherBytes(
            {at: n for at, n in zip(known, others, strict=True) if n != _UNKNOWN},
            {at: -n for at, n in zip(known, early, strict=True) if n != _UNKNOWN},
            None if always == _UNKNOWN else always,
        ),
    )


def agreed_link(agree: Agree, link: Link, share: float) -> Link:
    """Return the slowest link of all ranks, as fast as it seems if it copies only a share of the bytes."""
    out, into = agree((-round(1e6 * link.out_gbps), -round(1e6 * link.in_gbps)))
    out_gbps, in_gbps = (max(1, -each) / 1e6 / share for each in (out, into))
    return dataclasses.replace(link, out_gbps=out_gbps, in_gbps=in_gbps)


def agreed_times(agree: Agree, milliseconds: tuple[float, ...]) -> tuple[float, ...]:
    """Return the longest of each time, together as long as on the rank where they are longest; see `agreed_job`."""
    own = [round(_NS * each) for each in milliseconds]
    *longest, most = agree((*own, sum(own)))
    share = most / max(1, sum(longest))
    return tuple(share * each / _NS for each in longest)


def _times_of(shapes: Shapes) -> tuple[float, ...]:
    """Return all times of groups and chunks, in the order in which `_with` takes them."""
    return tuple(
        milliseconds
        for shape in shapes
        for milliseconds in (
            *(getattr(group, name) for group in shape.groups for name in _GROUP_TIMES),
            *(getattr(shape, name) for name in _CHUNK_TIMES),
        )
    )


def _with(shape: ChunkShape, sizes: Iterator[int], times: Iterator[float]) -> ChunkShape:
    """Return a shape with the next bytes and times."""

    def next_of(names: Iterable[str]) -> dict[str, Any]:
        return {name: next(times) for name in names}

    groups = (dataclasses.replace(each, nbytes=next(sizes), **next_of(_GROUP_TIMES)) for each in shape.groups)
    return dataclasses.replace(shape, groups=tuple(groups), **next_of(_CHUNK_TIMES))
