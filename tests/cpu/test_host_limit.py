# SPDX-License-Identifier: Apache-2.0
"""Groups that find no room on the host, and the return of host memory."""

from __future__ import annotations

import pytest
import torch

from offload_engine import OffloadConfig, OffloadEngine, OffloadError, group_commit
from tests.adversarial import AdversarialDevice

NBYTES = 4096


def make_engine(**settings: object) -> OffloadEngine:
    config = OffloadConfig.from_flags(min_tensor_bytes=0, max_inflight_bytes=0, horizon_bytes=0, **settings)
    return OffloadEngine(config, AdversarialDevice())


def run(engine: OffloadEngine, num_groups: int) -> torch.Tensor:
    x = torch.ones(NBYTES // 4, requires_grad=True)
    with engine.iteration():
        chunk, out = engine.start_chunk(), x
        for _ in range(num_groups):
            chunk.open_group("sine")
            with chunk.saved_tensors_hooks():
                out = out.sin()
            out = group_commit(out, chunk)
        out.sum().backward()
    assert x.grad is not None
    return x.grad


def test_by_default_a_group_without_room_stays() -> None:
    engine = make_engine(host_limit_bytes=2 * NBYTES)
    assert torch.equal(run(engine, 4), run(make_engine(), 4))
    assert (engine.stats.num_offloaded_groups, engine.stats.num_host_limit_groups) == (2, 2)
    engine.close()


def test_group_without_room_can_be_an_error_that_states_its_size() -> None:
    engine = make_engine(host_limit_bytes=2 * NBYTES, host_policy="error")
    told = (
        r"group 2 \(sine\) of chunk \(stage 0, microbatch 0\) needs 4,096 bytes of host memory, and at most 0 can be"
        r" lent at once \(the pool holds 8,192, of which 8,192 are lent\). Raise .* host_policy='keep'"
    )
    with pytest.raises(OffloadError, match=told):
        run(engine, 4)
    assert torch.equal(run(engine, 2), run(make_engine(), 2))  # a smaller step is right
    engine.close()


def test_host_memory_is_trimmed_on_request_and_at_the_end() -> None:
    engine = make_engine()
    run(engine, 4)
    held = engine.pool.slab_bytes_total
    engine.device.synchronize_all()  # type: ignore[attr-defined]  # no copy reads it any more
    assert held >= 4 * NBYTES and engine.trim_host_memory() == held
    assert engine.pool.slab_bytes_total == engine.device.host_bytes == 0  # type: ignore[attr-defined]
    run(engine, 4)
    engine.close()
    assert engine.device.host_bytes == 0  # type: ignore[attr-defined]
