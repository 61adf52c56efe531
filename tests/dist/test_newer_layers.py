# SPDX-License-Identifier: Apache-2.0
"""Layers that came with megatron-core 0.20: the same bits. Steps of them run with that version only.

Mixers of GatedDeltaProduct have stand-ins for the kernels of FLA and mamba_ssm, which need a GPU. Layers with several
residual streams (mHC) are tested with and without their own recomputation.
"""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from tests.dist.launch import on_ranks, run_ranks
from tests.dist.models import HYBRID
from tests.dist.parity import Case, check_all, run_with, run_without
from tests.dist.settings import is_refused, selective
from tests.dist.tiny import HIDDEN, MICRO_BATCH, SEQUENCE

FROM_20 = pytest.mark.skipif(
    not find_spec("megatron.core.ssm.gated_delta_product"), reason="before 0.20 there are no such layers"
)

NUM_MICROBATCHES = 2
SETTINGS: dict[str, Any] = {**HYBRID, "mamba_num_heads": 4, "mamba_head_dim": 8, "gdp_num_householder": 2}
SETTINGS |= {"mamba_num_groups": 2, "mamba_state_dim": 4}


class GatedNorm(torch.nn.Module):
    """In place of mamba_ssm's, whose base class is a mock without it."""

    def __init__(self, size: int, eps: float, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, values: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        gated = values * torch.nn.functional.silu(gates)
        return torch.nn.functional.rms_norm(gated, gated.shape[-1:], self.weight, self.eps)


def kernel(
    q: Any, k: Any, v: Any, g: torch.Tensor, beta: torch.Tensor, num_householder: int, **_: Any
) -> tuple[torch.Tensor, None]:
    """Mix the sequence with the shapes of FLA's kernel, and save what it saves."""
    each = (*q.shape[:2], num_householder, q.shape[2], -1)  # batch, sequence, reflection, head
    scores = (q.unsqueeze(2) * k.view(each)).sum(-1, keepdim=True)
    mixed = (v.view(each) * beta.view(each) * scores).sum(2) * g.exp().unsqueeze(-1)
    return mixed.cumsum(1), None


def with_mixers(chunk: torch.nn.Module) -> None:
    """Give each Mamba layer such a mixer."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm import gated_delta_product as core

    submodules = core.GatedDeltaProductMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)
    stand_ins: dict[str, Any] = dict(
        HAVE_MAMBA_SSM=True,
        HAVE_FLA=True,
        ExtendedRMSNorm=GatedNorm,
        chunk_gated_delta_product=kernel,
        check_fla_sequence_packing_support=lambda: (True, ""),
        get_cuda_rng_tracker=lambda: SimpleNamespace(fork=nullcontext),
    )
    with mock.patch.multiple(core, create=True, **stand_ins), mock.patch("torch.cuda.current_device", lambda: "cpu"):
        for layer in chunk.modules():
            if isinstance(layer, MambaLayer):
                layer.mixer = core.GatedDeltaProductMixer(
                    layer.config,
                    submodules,
                    layer.config.hidden_size,
                    layer_number=layer.layer_number,
                    pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
                )
    core.l2_norm = torch.nn.functional.normalize


INPUT = SEQUENCE * MICRO_BATCH * HIDDEN * 4
"""Bytes of what a projection reads; the mixer's inner size is the hidden size."""

PROJECTED = INPUT * 132 // HIDDEN
"""Bytes of what the first projection writes, which the convolution saves."""


@FROM_20
@pytest.mark.parametrize(
    ("names", "recomputed"),
    [
        (["mamba_in_proj", "gdp_qkv", "mamba_out_proj"], []),
        (["mamba_mixer"], ["gdp_qkv", "gdp_in_proj"]),
        (["mamba_in_proj"], ["gdp_in_proj", "gdp_qkv"]),
        (["mamba_in_proj", "mamba_out_proj"], ["gdp_qkv"]),
    ],
    ids=str,
)
@on_ranks()
def test_mixers(names: list[str], recomputed: list[str]) -> None:
    case = Case("moe", names, settings=selective(*recomputed, **SETTINGS), change=with_mixers)
    (stats,) = run_with(case, [NUM_MICROBATCHES], run_without(case, [NUM_MICROBATCHES]), is_evaluated=True)
    assert stats.copied_in_bytes == stats.copied_out_bytes == stats.managed_bytes
    if {*names} <= {"mamba_in_proj", "mamba_out_proj"}:
        assert stats.copied_out_bytes == NUM_MICROBATCHES * len(names) * INPUT
    else:
        assert stats.copied_out_bytes > NUM_MICROBATCHES * PROJECTED


# ---- several residual streams ----------------------------------------------------------------------------------------

STREAMS: dict[str, Any] = dict(enable_mhc_connections=True, mhc_num_residual_streams=2)
BEHIND_NORMS = {"qkv_linear", "mlp_fc1"}
PARTS = ["qkv_linear", "core_attn", "attn_proj", "mlp_fc1", "mlp_act", "mlp_fc2"]


@FROM_20
@pytest.mark.parametrize("recomputed", [[], ["mhc"], ["mhc", "core_attn"], ["mhc", "layernorm"]], ids=str)
def test_residual_streams(recomputed: list[str]) -> None:
    parts = [name for name in PARTS if "layernorm" not in recomputed or name not in BEHIND_NORMS]
    names = [["self_attn", "mlp_act"], parts]
    names += [] if recomputed else [["layer_input", "self_attn", "mlp_norm"], ["attn_norm"]]
    numbers = (None, 2) if recomputed else (None,)
    settings = [selective(*recomputed, **STREAMS, mhc_recompute_layer_num=number) for number in numbers]
    run_ranks(check_all, [Case("dense", each, settings=more) for more in settings for each in names], [2])


@pytest.mark.parametrize(
    ("module", "refused", "offered"),
    [
        ("gdp_in_proj", ["gdp_qkv"], ["mamba_in_proj"]),
        ("mhc", ["layer_input", "attn_norm", "mlp_norm"], ["core_attn", "attn_proj", "mlp_act"]),
    ],
)
def test_what_is_computed_again_cannot_move(module: str, refused: list[str], offered: list[str]) -> None:
    recomputing = SimpleNamespace(**selective(module))
    assert all(is_refused(recomputing, name, frozenset()) for name in refused)
    assert not any(is_refused(recomputing, name, frozenset()) for name in offered)
