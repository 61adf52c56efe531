# SPDX-License-Identifier: Apache-2.0
"""benchmarks/gpu/copies.py: what was on the host, and there only, when the most device memory was allocated."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("tqdm")


from benchmarks.gpu import copies

GROUP_BYTES, NUM_GROUPS = 256, 8


def test_the_stretch_with_the_most_memory_counts() -> None:
    peaks = iter((5, 9, 9, 7))
    found = copies.HostAtPeak(lambda: next(peaks))
    for host_bytes in (1, 2, 3, 4):
        found.mark(host_bytes)
    assert (found.peak_allocated_bytes, found.host_bytes) == (9, 2)


def test_a_copy_counts_when_its_twin_on_the_device_is_gone_or_empty() -> None:
    held = copies.HostCopies()
    dropped, emptied, kept = (torch.ones(8) for _ in range(3))
    twins = [tensor.clone() for tensor in (dropped, emptied, kept)]
    for copy, source in zip(twins, (dropped, emptied, kept), strict=True):
        held.add(copy, source)
    assert held.only_bytes == 0
    del dropped, source
    assert held.only_bytes == 32
    emptied.untyped_storage().resize_(0)
    assert held.only_bytes == 64
    held.remove(twins[0])
    held.remove(twins[0])
    assert held.only_bytes == 32
    assert kept.sum() == 8
