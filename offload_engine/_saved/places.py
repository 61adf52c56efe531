# SPDX-License-Identifier: Apache-2.0
"""Compares places: which bytes of a storage a tensor has."""

from __future__ import annotations

from offload_engine._devices.regions import TensorSpec as Place


def covers(saved: Place, other: Place) -> bool:
    """Return whether a save of the bytes at `saved` also saves those at `other`.

    Either `saved` has each byte of `other`, or both have gaps and are interleaved, like the parts of a split along an
    inner dimension: one kernel wrote all of these before the first was saved. Consecutive slices, by contrast, may be
    written one by one, each between the saves of others.
    """
    if saved == other or 0 in other[1]:
        return True
    begin, end = _span(other)
    saved_begin, saved_end = _span(saved)
    if _is_dense(saved):
        return saved_begin <= begin and end <= saved_end
    return saved_begin < end and begin < saved_end and not _is_dense(other)


def overlaps(first: Place, second: Place) -> bool:
    """Return whether two places have a byte in common.

    Exact for the parts of a split along any dimension. For other places with gaps, it may be True although they have
    none.
    """
    if 0 in first[1] or 0 in second[1]:
        return False
    begin, end = _span(first)
    other_begin, other_end = _span(second)
    if end <= other_begin or other_end <= begin:
        return False
    return not any([_are_apart(first, second, row) for row in {*_steps(first), *_steps(second)}])


def _are_apart(first: Place, second: Place, row: int) -> bool:
    """Return whether two places have different columns of a matrix whose rows have `row` bytes."""
    columns, other_columns = _columns(first, row), _columns(second, row)
    if columns is None or other_columns is None:
        return False
    return columns[1] <= other_columns[0] or other_columns[1] <= columns[0]


def _columns(place: Place, row: int) -> tuple[int, int] | None:
    """Return the first column of a place and the one after its last, in bytes; None if it is no range of columns."""
    offset, shape, strides, dtype = place
    begin: int = offset * dtype.itemsize % row
    inner = [(size, stride) for size, stride in zip(shape, strides) if stride * dtype.itemsize % row]  # noqa: B905
    end = begin + sum([(size - 1) * stride for size, stride in inner]) * dtype.itemsize + dtype.itemsize
    return (begin, end) if end <= row else None


def _steps(place: Place) -> list[int]:
    """Return the strides, in bytes, of the dimensions that have several elements."""
    _, shape, strides, dtype = place
    return [stride * dtype.itemsize for size, stride in zip(shape, strides) if size > 1 and stride]  # noqa: B905


def _span(place: Place) -> tuple[int, int]:
    """Return the first byte of a place, and the one after its last."""
    offset, shape, strides, dtype = place
    last: int = offset
    for size, stride in zip(shape, strides):  # noqa: B905  (as many by construction)
        last += (size - 1) * stride
    return offset * dtype.itemsize, (last + 1) * dtype.itemsize


def _is_dense(place: Place) -> bool:
    """Return whether a place has all bytes of its span."""
    _, shape, strides, _ = place
    dense = 1  # number of contiguous elements that the dimensions so far cover
    for stride, size in sorted(zip(strides, shape)):  # noqa: B905
        if size == 0 or stride > dense:
            return False
        if size > 1 and stride == dense:
            dense *= size
        elif size > 1 and stride > 0:
            return False  # elements overlap, which is rare and hard to analyze
    return True
