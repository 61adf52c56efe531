# SPDX-License-Identifier: Apache-2.0
"""Modules that bypass the engine, with TransformerEngine's kernels on a GPU: no group saves a tensor of theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.gpu.ranks import GpuRanks


@pytest.mark.parametrize(
    "settings", [{}, {"num_moe_experts": 4}, {"qk_layernorm": True}], ids=["dense", "experts", "norms of query and key"]
)
def test_tensors_that_bypass_the_engine_are_in_no_group(
    settings: dict[str, Any], ranks_of: Callable[[int], GpuRanks]
) -> None:
    (num_passed,) = ranks_of(1).run(_count_passing, settings)
    assert num_passed > 0


def _count_passing(settings: dict[str, Any]) -> int:
    from tests.dist.saved_storages import num_passing
    from tests.gpu.small_gpt import make_chunks, make_config, run

    return num_passing(lambda offload: run(make_chunks(make_config(**settings, **offload)), 2))
