# SPDX-License-Identifier: Apache-2.0
"""Ranges in profiles: their names, that profilers see them, and that they cost nothing where none listens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from offload_engine import FixedBounds, OffloadConfig, OffloadEngine
from offload_engine._observe.labels import Ranges, range_label
from offload_engine.planning.moves import IN, OUT
from offload_engine.schedule import ChunkKey
from tests.adversarial import AdversarialDevice

GROUP: Any = SimpleNamespace(chunk=ChunkKey(1, 3), name="core_attn")


def test_a_profile_shows_the_moves_and_the_wait_of_each_group(device: AdversarialDevice) -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=0)), device)
    with torch.profiler.profile() as profile, engine.iteration():
        chunk = engine.start_chunk()
        chunk.open_group("attention")
        handle = chunk.tensor_push(torch.ones(64))
        group = chunk.close_group()
        chunk.on_group_commit_backward(group)
        chunk.tensor_pop(handle)
        del handle
    names = {event.key for event in profile.key_averages()}
    labels = {f"Offload::{what} (c0 m0 attention)" for what in ("copy_out", "release", "copy_in", "wait")}
    assert labels <= names
    assert range_label(IN, "mlp") == "Offload::copy_in (mlp)"


def test_nvtx_ranges_are_pushed_where_they_are_switched_on() -> None:
    nvtx = mock.Mock()
    with mock.patch.object(torch.cuda, "nvtx", nvtx):
        with Ranges().around(OUT, GROUP):
            pass
        assert not nvtx.mock_calls
        with pytest.raises(ValueError), Ranges(is_nvtx_on=True).around("wait", GROUP):
            raise ValueError
    assert nvtx.mock_calls == [mock.call.range_push("Offload::wait (c1 m3 core_attn)"), mock.call.range_pop()]
