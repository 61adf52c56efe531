# SPDX-License-Identifier: Apache-2.0
"""Settings of megatron-core under which its layers do without what offload needs: refused, and what is not works."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402
from megatron.core.transformer.moe.experts import TEGroupedMLP  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from megatron_patches import apply  # noqa: E402
from offload_engine import OffloadConfig  # noqa: E402
from tests.dist.launch import Pipeline, run_ranks  # noqa: E402
from tests.dist.models import GroupedProduct  # noqa: E402
from tests.dist.tiny import fingerprint, make_chunks, make_config, run  # noqa: E402

ALL = OffloadConfig(min_tensor_bytes=1, directory="none")
CUT_INPUTS = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "distribute_saved_activations": True,
}
FUSED_EXPERTS = {"moe_grouped_gemm": True, "use_transformer_engine_op_fuser": True}


def test_setting_that_one_stage_cannot_run_is_refused_on_all() -> None:
    for messages in run_ranks(_refusals_of_two_stages, pipeline=Pipeline(2), timeout_s=60):
        for name, message in zip(("mlp_fc1", "mlp_act"), messages, strict=False):
            assert f"'{name}'" in message and "use_transformer_engine_op_fuser=True" in message
        assert "distribute_saved_activations=True" in messages[-1]


@pytest.mark.skipif(
    not hasattr(TEGroupedMLP, "_make_fused_ops"), reason="before 0.19 no experts are fused like that: runs with 0.19.2"
)
def test_fused_experts_leave_as_a_whole_and_not_in_parts() -> None:
    run_ranks(_check_fused_experts)


def _refusals_of_two_stages() -> list[str]:
    cases: list[tuple[str, dict[str, Any]]] = [("mlp_fc1", {}), ("mlp_act", {}), ("layer_input", CUT_INPUTS)]
    return [_refusal(name, make_chunks(make_config(**settings), change=_fuse_last_mlp)) for name, settings in cases]


def _fuse_last_mlp(chunk: torch.nn.Module) -> None:
    """To the eye, as TransformerEngine's would be."""
    if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
        chunk.decoder.layers[-1].mlp._make_fused_impl = lambda: None


def _refusal(name: str, chunks: list[torch.nn.Module]) -> str:
    calls: list[int] = []
    chunks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    with apply(ALL, modules=[name]) as handle, pytest.raises((ValueError, NotImplementedError)) as raised:
        run(chunks, 2)
    assert handle.engine is None and not calls
    return str(raised.value)


class _Operations(torch.nn.Module):
    """What TransformerEngine makes of the experts' two projections, whose own forwards are not called."""

    def __init__(self, experts: Any) -> None:
        super().__init__()
        self.experts = (experts,)  # not a submodule

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor, probabilities: torch.Tensor, *_: Any) -> torch.Tensor:
        (experts,), sizes = self.experts, counts.tolist()
        inner = GroupedProduct.apply(tokens, sizes, False, *experts.linear_fc1.weights)
        inner = F.gelu(inner) * probabilities.unsqueeze(-1)
        return GroupedProduct.apply(inner, sizes, False, *experts.linear_fc2.weights)


def _make_operations(experts: Any) -> torch.nn.Module:
    operations = _Operations(experts)
    operations.register_forward_pre_hook(experts._make_fused_impl_pre_forward_hook())
    return operations


def _check_fused_experts() -> None:
    with (
        mock.patch.object(TEGroupedMLP, "_is_fused_impl_supported", lambda _: True),
        mock.patch.object(TEGroupedMLP, "_make_fused_ops", _make_operations),
        mock.patch("tests.dist.models.GroupedLinear.use_bias", False, create=True),
        mock.patch(
            f"{TEGroupedMLP.__module__}.skip_routed_expert_padding", lambda _: True
        ),  # a kernel pads, from 0.20 on
    ):
        make = lambda: make_chunks(make_config("moe", **FUSED_EXPERTS))  # noqa: E731
        for name in ("router_fc1", "dispatched_tokens", "moe_act", "router_fc2"):
            assert "offload 'experts'" in _refusal(name, make()), name
        chunks = make()
        expected = fingerprint(chunks, run(chunks, 3))
        for names in (["experts", "moe_act"], ["core_attn"], ["qkv_linear"], ["mlp_norm", "router"]):
            with apply(ALL, modules=names) as handle:
                chunks = make()
                for _ in range(2):
                    assert fingerprint(chunks, run(chunks, 3)) == expected, names
                assert handle.stats is not None and handle.stats.copied_out_bytes > 0, names
                assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None, names
