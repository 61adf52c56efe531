# SPDX-License-Identifier: Apache-2.0
"""What the engine spends on a group on the host, counted in calls: time differs from run to run, calls do not."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch

import offload_engine
from benchmarks.group_cost import forward_groups
from offload_engine import OffloadConfig, OffloadEngine
from tests import adversarial, graph_device
from tests.adversarial import AdversarialDevice
from tests.graph_device import GraphDevice
from tests.toy_graphs import GraphedChunk, Layer, ToyPool

DEVICES = (adversarial.__file__, graph_device.__file__)
PACKAGE = str(Path(offload_engine.__file__).parent)
# Python functions of the engine that a group with three saved tensors runs, forward and backward. Of them 9 read
# tensors, and are in C where the core is compiled (`_compat/reads.py`).
MAX_CALLS = 224
MAX_DEVICE_CALLS = 29  # of which 7 ask for the current stream, 6 are told of a release, 3 ask whether a thread copies
# Python functions of the engine that the replay of a captured graph runs, without CUDA's routines.
MAX_CALLS_OF_REPLAY = 3
NUMEL = 64


def run(engine: OffloadEngine, num_groups: int) -> None:
    tensors = [[torch.ones(NUMEL) for _ in range(3)] for _ in range(num_groups)]
    with engine.iteration():
        forward_groups(torch.zeros(4, requires_grad=True), tensors, engine.start_chunk()).sum().backward()


def count_calls(call: Callable[[], Any]) -> tuple[Counter[str], Counter[str]]:
    """Count calls of functions of the engine, and of the device by the engine, by name, in a call of a function."""
    calls: Counter[str] = Counter()
    device_calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code.co_name == "<listcomp>":  # no calls any more from Python 3.12 on
            return
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls[frame.f_code.co_qualname] += 1
        elif event == "call" and frame.f_code.co_filename in DEVICES and not frame.f_code.co_name.startswith("_"):
            if frame.f_back is None or frame.f_back.f_code.co_filename not in DEVICES:  # compiled code has no frames
                device_calls[frame.f_code.co_qualname] += 1

    gc.collect()
    gc.disable()  # else it calls destructors of others
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls, device_calls


def test_calls_of_a_group(device: AdversarialDevice) -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), device)
    for _ in range(4):  # the pool grows, tensors that are made once are made, goals are checked for the first time
        run(engine, 30)
    few, few_of_device = count_calls(partial(run, engine, 20))
    many, many_of_device = count_calls(partial(run, engine, 30))
    assert engine.stats.num_offloaded_groups == 30 and engine.stats.copied_in_bytes > 25 * 3 * NUMEL * 4
    assert engine.stats.prefetch_misses == 0
    engine.close()
    calls, device_calls = many - few, many_of_device - few_of_device
    assert 0 < calls.total() <= 10 * MAX_CALLS, calls.most_common()
    assert 0 < device_calls.total() <= 10 * MAX_DEVICE_CALLS, device_calls.most_common()


def test_calls_of_a_captured_replay() -> None:
    device = GraphDevice()
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1), device)
    pool = ToyPool()
    owner = SimpleNamespace(CUDAGraph=pool.graph_class())
    chunk = GraphedChunk([Layer(pool, NUMEL, 0.5) for _ in range(6)], owner)
    with engine.graphs.capture_layers(owner=owner) as layers:
        chunk.capture_forward()
        chunk.capture_backward()
    for _ in range(2):
        calls, device_calls = count_calls(lambda: chunk.backward(chunk.forward(torch.ones(NUMEL))))
        del calls["Replays._begin"]  # once a pass
        assert 0 < calls.total() <= MAX_CALLS_OF_REPLAY * layers.num_graphs, calls.most_common()
        # The stream once, and what is before a replay and after it: nothing is asked or waited for between passes.
        assert device_calls.pop("GraphDevice.settle") == 1  # once a pass
        assert set(device_calls) == {"AdversarialDevice.current_stream", "GraphRoutine.run"}, device_calls
        assert device_calls.total() <= 3 * layers.num_graphs
    layers.release()
    engine.close()
