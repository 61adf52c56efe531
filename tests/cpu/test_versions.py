# SPDX-License-Identifier: Apache-2.0
"""One storage that is saved, written in place, and saved again: each save has the bytes of its own time."""

from __future__ import annotations

import pytest
import torch

from offload_engine import (
    CopyError,
    FixedBounds,
    GroupTraits,
    OffloadConfig,
    OffloadEngine,
    ResidencyMeter,
    group_commit,
    group_start,
)
from tests.adversarial import AdversarialDevice

CONFIG = OffloadConfig(
    min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=0)
)  # what a group saves leaves at once


def in_group(engine: OffloadEngine, function: object, x: torch.Tensor) -> torch.Tensor:
    chunk = engine.current_chunk or engine.start_chunk()
    x = group_start(x, chunk, "group")
    with chunk.saved_tensors_hooks():
        y = function(x)  # type: ignore[operator]
    return group_commit(y, chunk)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_storage_written_after_a_group_has_saved_it_is_saved_anew(seed: int | None) -> None:
    """The write is legal: no backward asks for what was saved before it."""
    x = torch.randn(64, requires_grad=True)
    engine = OffloadEngine(CONFIG, AdversarialDevice(seed))
    with engine.iteration():
        y = x * 1
        unused = in_group(engine, torch.sin, y)
        y.add_(1)
        in_group(engine, torch.cos, y).sum().backward()
        del unused
    assert x.grad is not None and torch.equal(x.grad, -(x.detach() + 1).sin())
    assert engine.stats.copied_out_bytes == 2 * x.nbytes
    engine.close()


def test_a_copy_in_that_no_backward_uses_gives_its_bytes_back_to_the_horizon() -> None:
    engine = OffloadEngine(CONFIG, AdversarialDevice())
    with engine.iteration():
        chunk = engine.start_chunk()
        chunk.open_group("group")
        handle = chunk.tensor_push(torch.ones(64))
        chunk.close_group()
        assert engine.device.drain() is None
        chunk.begin_backward()
        chunk.bulk_reload_group(0)
        assert engine.snapshot().prefetched_bytes == 256
        del handle
        assert engine.snapshot().prefetched_bytes == 0
    engine.close()


def test_a_failed_copy_of_a_dropped_tensor_is_raised_by_the_next_boundary() -> None:
    device = AdversarialDevice()
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=1 << 30)), device)
    engine.begin_iteration()
    chunk = engine.start_chunk()
    device.fail_next_copy("out")
    chunk.open_group("group")
    handle = chunk.tensor_push(torch.ones(64))
    chunk.close_group()
    del handle
    chunk.open_group("another")
    with pytest.raises(CopyError, match="copy of group 0 .group. .* failed"):
        chunk.close_group()
    engine.close()


def test_what_is_known_of_allocating_streams_ends_with_the_iteration() -> None:
    device = AdversarialDevice()
    engine = OffloadEngine(CONFIG, device)
    with device.compute_stream("comm") as comm:
        for _ in range(2):
            with engine.iteration():
                engine.set_allocation_stream(torch.ones(64), comm)
                assert len(engine._store.alloc_streams.streams) == 1
            assert not engine._store.alloc_streams.streams
        engine.set_allocation_stream(torch.ones(64), comm)  # outside of an iteration
        engine.begin_iteration()
        assert not engine._store.alloc_streams.streams
    engine.close()


def test_only_a_tensor_that_moves_and_is_not_saved_yet_starts_a_storage() -> None:
    engine = OffloadEngine(CONFIG.replace(min_tensor_bytes=64), AdversarialDevice())
    with engine.iteration():
        chunk, x = engine.start_chunk(), torch.ones(64)
        chunk.open_group("group")
        assert not chunk.hooks.would_start_storage(torch.ones(1))
        assert chunk.hooks.would_start_storage(x)
        handle = chunk.tensor_push(x)
        assert not chunk.hooks.would_start_storage(x[32:])
        x.add_(1)
        assert chunk.hooks.would_start_storage(x)
        chunk.close_group()
        del handle
    engine.close()


def test_bytes_that_are_handed_over_are_not_resident_any_more() -> None:
    engine = OffloadEngine(CONFIG, AdversarialDevice(), ResidencyMeter())
    with engine.iteration():
        chunk = engine.start_chunk()
        chunk.open_group("group", GroupTraits(read_once=True))
        handle = chunk.tensor_push(torch.ones(64))
        chunk.close_group()
        chunk.begin_backward()
        assert engine.meter is not None and engine.meter.current_bytes == 0
        tensor = chunk.tensor_pop(handle)
        assert engine.snapshot().resident_bytes == 0 == engine.meter.current_bytes and tensor.eq(1).all()
        del handle
        assert engine.snapshot().saved_bytes == 0
    engine.close()
