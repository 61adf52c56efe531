# SPDX-License-Identifier: Apache-2.0
"""What the engine spends on a group on the host, counted in calls: time differs from run to run, calls do not."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import offload_engine
from benchmarks.group_cost import forward_groups
from offload_engine import OffloadConfig, OffloadEngine
from tests import adversarial
from tests.adversarial import AdversarialDevice

PACKAGE = str(Path(offload_engine.__file__).parent)
# Python functions of the engine that a group with three saved tensors runs, forward and backward. Of them 9 read
# tensors, and are in C where the core is compiled (`_compat/reads.py`).
MAX_CALLS = 224
MAX_DEVICE_CALLS = 29  # of which 7 ask for the current stream, 6 are told of a release, 3 ask whether a thread copies
NUMEL = 64


def run(engine: OffloadEngine, num_groups: int) -> None:
    tensors = [[torch.ones(NUMEL) for _ in range(3)] for _ in range(num_groups)]
    with engine.iteration():
        forward_groups(torch.zeros(4, requires_grad=True), tensors, engine.start_chunk()).sum().backward()


def count_calls(engine: OffloadEngine, num_groups: int) -> tuple[Counter[str], Counter[str]]:
    """Count calls of functions of the engine, and of the device by the engine, by name."""
    calls: Counter[str] = Counter()
    device_calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_qualname] += 1
        elif event == "call" and frame.f_code.co_filename == adversarial.__file__:
            if frame.f_back is not None and frame.f_back.f_code.co_filename.startswith(PACKAGE):
                device_calls[frame.f_code.co_qualname] += 1

    gc.collect()
    gc.disable()  # else it calls destructors of others
    sys.setprofile(note)
    try:
        run(engine, num_groups)
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls, device_calls


def test_calls_of_a_group(device: AdversarialDevice) -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), device)
    for _ in range(4):  # the pool grows, tensors that are made once are made, goals are checked for the first time
        run(engine, 30)
    (few, few_of_device), (many, many_of_device) = count_calls(engine, 20), count_calls(engine, 30)
    assert engine.stats.num_offloaded_groups == 30 and engine.stats.copied_in_bytes > 25 * 3 * NUMEL * 4
    assert engine.stats.prefetch_misses == 0
    engine.close()
    calls, device_calls = many - few, many_of_device - few_of_device
    assert 0 < calls.total() <= 10 * MAX_CALLS, calls.most_common()
    assert 0 < device_calls.total() <= 10 * MAX_DEVICE_CALLS, device_calls.most_common()
