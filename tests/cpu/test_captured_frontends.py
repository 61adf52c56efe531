# SPDX-License-Identifier: Apache-2.0
"""A step of each front-end is captured as a whole, on a device that knows what a capture refuses."""

from __future__ import annotations

import pytest
import torch

from offload_engine import OffloadError
from tests.graph_device import GraphDevice
from tests.interrupts.jobs import JOBS
from tests.lookups import present


@pytest.mark.parametrize("name", JOBS)
def test_a_step_is_captured(name: str) -> None:
    device, expected = GraphDevice(), JOBS[name](None).step()
    with device.observe_compute():
        job = JOBS[name](device)
        engine = present(job.engine)
        for _ in range(2):
            assert all(map(torch.equal, expected, job.step()))
        copies = device.num_copies.total()
        with engine.graphs.capture(device.graph()) as captured:
            assert all(map(torch.equal, expected, job.step()))
        assert engine.stats.copied_in_bytes > 0 and device.num_copies.total() > copies and captured.host_bytes > 0
        assert all(map(torch.equal, expected, job.step()))
        with pytest.raises(OffloadError, match="captured steps still use"):
            engine.close()
        captured.release()
        job.close()
    assert not device.hazards
