# SPDX-License-Identifier: Apache-2.0
"""Layers with several residual streams (mHC), with and without their own recomputation: the same bits."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from tests.dist.launch import run_ranks
from tests.dist.names import is_refused
from tests.dist.parity import Case, check_all

pytestmark = pytest.mark.skipif(
    not find_spec("megatron.core.transformer.hyper_connection"), reason="before 0.20 there are no such layers"
)

STREAMS: dict[str, Any] = dict(enable_mhc_connections=True, mhc_num_residual_streams=2)
BEHIND_NORMS = {"qkv_linear", "mlp_fc1"}
PARTS = ["qkv_linear", "core_attn", "attn_proj", "mlp_fc1", "mlp_act", "mlp_fc2"]


def test_nothing_recomputed() -> None:
    names = [["layer_input", "self_attn", "mlp_norm"], PARTS, ["attn_norm"]]
    run_ranks(check_all, [Case("dense", each, settings=STREAMS) for each in names], [2])


@pytest.mark.parametrize("recompute", [["mhc"], ["mhc", "core_attn"], ["mhc", "layernorm"]], ids=str)
@pytest.mark.parametrize("layers", [None, 2])
def test_recomputed(recompute: list[str], layers: int | None) -> None:
    settings = {**STREAMS, "recompute_granularity": "selective", "recompute_modules": recompute}
    cases = [
        ["self_attn", "mlp_act"],
        [name for name in PARTS if "layernorm" not in recompute or name not in BEHIND_NORMS],
    ]
    run_ranks(
        check_all,
        [Case("dense", each, settings={**settings, "mhc_recompute_layer_num": layers}) for each in cases],
        [2],
    )


def test_inputs_of_norms_are_computed_again() -> None:
    recomputing = SimpleNamespace(recompute_granularity="selective", recompute_modules=["mhc"])
    assert all(is_refused(recomputing, name, frozenset()) for name in ("layer_input", "attn_norm", "mlp_norm"))
    assert not any(is_refused(recomputing, name, frozenset()) for name in ("core_attn", "attn_proj", "mlp_act"))
