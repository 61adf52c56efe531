# SPDX-License-Identifier: Apache-2.0
"""Ranges in profiles: their names, that profilers see them, and that they cost nothing where none listens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from offload_engine._observe.labels import Ranges, range_label
from offload_engine.planning.moves import DROP, IN, OUT
from offload_engine.schedule import ChunkKey

GROUP: Any = SimpleNamespace(chunk=ChunkKey(1, 3), name="core_attn")


def test_labels_have_the_coordinates() -> None:
    assert range_label(OUT, "core_attn", ChunkKey(1, 3)) == "Offload::copy_out (c1 m3 core_attn)"
    assert range_label(DROP, "mlp", ChunkKey(0, 0)) == "Offload::release (c0 m0 mlp)"
    assert range_label(IN, "mlp") == "Offload::copy_in (mlp)"
    assert range_label("wait", "mlp", ChunkKey(0, 12)) == "Offload::wait (c0 m12 mlp)"


def test_the_profiler_of_torch_shows_them() -> None:
    ranges = Ranges()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        with ranges.around(OUT, GROUP):
            torch.zeros(3)
    with ranges.around(IN, GROUP):
        pass
    names = {event.name for event in profile.events() if event.name.startswith("Offload")}
    assert names == {"Offload::copy_out (c1 m3 core_attn)"}


def test_nvtx_ranges_are_pushed_where_they_are_switched_on() -> None:
    nvtx = mock.Mock()
    with mock.patch.object(torch.cuda, "nvtx", nvtx):
        with Ranges().around(OUT, GROUP):
            pass
        assert not nvtx.mock_calls
        with pytest.raises(ValueError), Ranges(is_nvtx_on=True).around("wait", GROUP):
            raise ValueError
    assert nvtx.mock_calls == [mock.call.range_push("Offload::wait (c1 m3 core_attn)"), mock.call.range_pop()]
