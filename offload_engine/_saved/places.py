# SPDX-License-Identifier: Apache-2.0
"""Places: which bytes of a storage a tensor has."""

from __future__ import annotations

from offload_engine._devices.regions import TensorSpec as Place


def covers(saved: Place, other: Place) -> bool:
    """Return whether a save of the bytes at `saved` is one of those at `other` as well.

    Either each byte at `other` is also at `saved`, or both have gaps and lie within each other, as the parts of a split
    along an inner dimension do: one kernel has written all of them before the first was saved. Slices that follow one
    another may be written one by one, each between the saves of others.
    """
    if saved == other or 0 in other[1]:
        return True
    begin, end = _span(other)
    saved_begin, saved_end = _span(saved)
    if _is_dense(saved):
        return saved_begin <= begin and end <= saved_end
    return saved_begin < end and begin < saved_end and not _is_dense(other)


def _span(place: Place) -> tuple[int, int]:
    """Return the first byte of a place, and the one behind its last."""
    offset, shape, strides, dtype = place
    last: int = offset
    for size, stride in zip(shape, strides):  # noqa: B905  (as many by construction)
        last += (size - 1) * stride
    return offset * dtype.itemsize, (last + 1) * dtype.itemsize


def _is_dense(place: Place) -> bool:
    """Return whether a place has all bytes of its span."""
    _, shape, strides, _ = place
    dense = 1  # number of elements in a row that the dimensions so far have
    for stride, size in sorted(zip(strides, shape)):  # noqa: B905
        if size == 0 or stride > dense:
            return False
        if size > 1 and stride == dense:
            dense *= size
        elif size > 1 and stride > 0:
            return False  # elements overlap: seldom, and not easy to tell
    return True
