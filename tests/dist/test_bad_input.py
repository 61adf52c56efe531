# SPDX-License-Identifier: Apache-2.0
"""Bad input is refused on every rank, before the first forward, and the model trains on once it is corrected."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP
from torch.nn import functional as F  # noqa: N812

from megatron_patches import Handle, apply
from offload_engine import CopyError, OffloadConfig
from offload_engine._devices.file_slab import FileSlab
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.models import GroupedProduct
from tests.dist.settings import full, selective
from tests.dist.tiny import (
    ALL,
    decoder_of,
    engine_of,
    innermost_hooks,
    make_chunks,
    make_config,
    messages,
    run,
    stats_of,
    step,
)

# With a bias megatron-core's own recomputation of the MLP never ends: the bias becomes an output of the checkpoint.
MLP = selective("mlp", add_bias_linear=False)

NO_GROUP = "offload_min_tensor_bytes has moe_act=1,024, but 'moe_act' has no group of its own here"
# kind of model, names, settings, what the message must hold
REFUSED: list[tuple[str, list[str], dict[str, Any], list[str]]] = [
    ("dense", ["core_attn", "moe_act", "router"], {}, ["'moe_act' needs", "'router' needs layers with experts"]),
    ("moe", ["mlp_fc1"], {}, ["'mlp_fc1' needs layers with a dense MLP", "router_fc1", "mlp: MoELayer"]),
    ("moe", ["shared_fc1"], {}, ["'shared_fc1' needs layers with shared experts"]),
    ("dense", ["qkv_linear"], full(), ["'qkv_linear'", "recompute_granularity='full'", "layer_input"]),
    ("dense", ["mlp_act"], MLP, ["'mlp_act'", "recompute_modules has 'mlp'"]),
    ("moe", ["router_fc1"], selective("moe"), ["'router_fc1'", "recompute_modules has 'moe'"]),
    ("dense", ["qkv_linear"], selective("layernorm"), ["'qkv_linear'", "discards and recomputes"]),
    ("dense", ["core_attn"], {"offload_host_limit_bytes": 2048}, ["2,048", "one hidden activation of 4,096 bytes"]),
    ("dense", ["core_attn"], {"offload_dir": "/nonexistent/directory"}, ["/nonexistent/directory"]),
    ("dense", [], {"offload_gpu_budget": "1MiB", "offload_min_tensor_bytes": "moe_act=1KiB"}, [NO_GROUP]),
    ("dense", [], {"offload_num_layers": 1, "offload_min_tensor_bytes": "moe_act=1KiB"}, [NO_GROUP]),
]


@pytest.mark.compat
@on_ranks(Pipeline(2, 2), timeout_s=60)
def test_refused_before_the_first_forward() -> None:
    for kind, names, settings, parts in REFUSED:
        offload = {"offload_activation": True, "offload_modules": names, **settings}
        with apply(OffloadConfig(min_tensor_bytes=1)) as handle:
            chunks = make_chunks(make_config(kind, **offload))
            message = _refusal(handle, chunks)
            assert all(part in message for part in parts), (names, settings, message)
            vars(chunks[0].config).update(dict.fromkeys(name for name in offload if name.startswith("offload_")))
            run(chunks, 2)


def _refusal(handle: Handle, chunks: list[torch.nn.Module]) -> str:
    called = mock.Mock(return_value=None)
    with ExitStack() as hooks, pytest.raises((ValueError, NotImplementedError, OSError)) as raised:
        for chunk in chunks:
            hooks.enter_context(chunk.register_forward_pre_hook(called))
        run(chunks, 2)
    assert handle.engine is None and not called.called
    return str(raised.value)


@pytest.mark.compat
@on_ranks(Pipeline(2), timeout_s=60)
def test_a_setting_that_one_stage_cannot_run_is_refused_on_all() -> None:
    """To the eye, its last MLP is fused as TransformerEngine's would be."""

    def fuse(chunk: torch.nn.Module) -> None:
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            decoder_of(chunk).layers[-1].mlp._make_fused_impl = lambda: None

    for name in ("mlp_fc1", "mlp_act"):
        with apply(ALL, modules=[name]) as handle:
            message = _refusal(handle, make_chunks(make_config(), change=fuse))
        assert f"'{name}'" in message and "use_transformer_engine_op_fuser=True" in message
    with apply(ALL, modules=["layer_input"]) as handle:
        message = _refusal(handle, make_chunks(make_config(**full(), distribute_saved_activations=True)))
    assert "distribute_saved_activations=True" in message


@on_ranks(Pipeline(2))
def test_a_fault_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    rank = torch.distributed.get_rank()
    where = str(tmp_path) if rank == 0 else f"{tmp_path}/missing"
    with apply(OffloadConfig(min_tensor_bytes=1)) as handle:
        chunks = make_chunks(make_config(offload_activation=True, offload_modules=["core_attn"], offload_dir=where))
        message = _refusal(handle, chunks)
    assert "missing" in message and (rank == 1 or "pipeline rank 1" in message)


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


@pytest.mark.compat
@pytest.mark.skipif(
    not hasattr(TEGroupedMLP, "_make_fused_ops"), reason="before 0.19 no experts are fused like that: runs with 0.19.2"
)
@on_ranks()
def test_fused_experts_leave_as_a_whole_and_not_in_parts() -> None:
    padding = f"{TEGroupedMLP.__module__}.skip_routed_expert_padding"  # by a kernel, from 0.20 on
    with (
        mock.patch.object(TEGroupedMLP, "_is_fused_impl_supported", lambda _: True),
        mock.patch.object(TEGroupedMLP, "_make_fused_ops", _make_operations),
        mock.patch("tests.dist.models.GroupedLinear.use_bias", False, create=True),
        mock.patch(padding, lambda _: True),
    ):
        make = lambda: make_chunks(make_config("moe", moe_grouped_gemm=True, use_transformer_engine_op_fuser=True))  # noqa: E731
        for name in ("router_fc1", "dispatched_tokens", "moe_act", "router_fc2"):
            with apply(ALL, modules=[name]) as handle:
                assert "offload 'experts'" in _refusal(handle, make()), name
        expected = step(make(), 3)
        for names in (["experts", "moe_act"], ["core_attn"], ["qkv_linear"], ["mlp_norm", "router"]):
            with apply(ALL, modules=names) as handle:
                chunks = make()
                assert [step(chunks, 3) for _ in range(2)] == [expected, expected], names
                assert stats_of(handle).copied_out_bytes > 0, names
                assert innermost_hooks(True) is None, names


# -- errors in a step --------------------------------------------------------------------------------------------------


@on_ranks()
def test_an_exception_in_the_model_leaves_nothing_behind() -> None:
    expected = step(make_chunks(make_config()), 3)
    with apply(ALL, modules=["self_attn", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"]) as handle:
        chunks: Any = make_chunks(make_config())
        layers = chunks[0].decoder.layers
        places = [
            (layers[1].self_attention.core_attention, "forward"),
            (layers[2].mlp.linear_fc1, "forward"),
            (layers[2].mlp.linear_fc2, "forward"),
            (layers[3].pre_mlp_layernorm, "forward"),
            (chunks[0].output_layer, "forward"),
            (layers[1].mlp, "activation_func"),
        ]
        for owner, name in (*places, (layers[1].mlp.linear_fc1.weight, "")):
            if name:
                fault: Any = mock.patch.object(owner, name, _failing_after(1, getattr(owner, name), _Fault()))
            else:  # in a backward
                fault = owner.register_hook(_failing_after(1, lambda grad: grad, _Fault()))
            with fault, pytest.raises(_Fault):
                run(chunks, 3)
            assert innermost_hooks(True) is None
            assert engine_of(handle).pool.num_leases == 0 and not engine_of(handle).is_active
            assert step(chunks, 3) == expected, (owner, name)


class _Fault(Exception):
    pass


def _failing_after(number: int, function: Callable[..., Any], error: Exception) -> Callable[..., Any]:
    """Return a function that raises the error behind so many calls."""
    calls = itertools.count()

    def call(*args: Any, **kwargs: Any) -> Any:
        if next(calls) >= number:
            raise error
        return function(*args, **kwargs)

    return call


@on_ranks()
def test_a_full_disk_stops_the_step_and_no_more(tmp_path: Path) -> None:
    expected = step(make_chunks(make_config()), 3)
    with apply(OffloadConfig(min_tensor_bytes=1, directory=str(tmp_path)), modules=["core_attn", "mlp_fc1"]) as handle:
        chunks = make_chunks(make_config())
        weights = [parameter.detach().clone() for parameter in chunks[0].parameters()]
        full = OSError(errno.ENOSPC, "No space left on device")
        for num_written in (0, 4, 11):
            with mock.patch.object(FileSlab, "write", _failing_after(num_written, FileSlab.write, full)):
                with pytest.raises(CopyError, match=r"(core_attn|mlp_fc1).*microbatch[^\0]*No space left"):
                    run(chunks, 3)
            assert engine_of(handle).pool.num_leases == 0
            assert all(map(torch.equal, chunks[0].parameters(), weights))
            assert step(chunks, 3) == expected


@pytest.mark.parametrize(("shape", "least"), [(Pipeline(), None), (Pipeline(2), 1)], ids=["nothing", "on one stage"])
@on_ranks()
def test_a_request_that_moves_nothing_says_why_once(shape: Pipeline, least: int | None) -> None:
    """Not on a stage of one layer, which stays, while another moves its own."""
    logged = messages()
    with apply(ALL.replace(min_tensor_bytes=least or OffloadConfig().min_tensor_bytes), modules=["core_attn"]):
        chunks = make_chunks(make_config(num_layers=2))
        for _ in range(2):
            run(chunks, 2)
    assert len(logged) == (least is None)
    assert all("offload_min_tensor_bytes=1,048,576" in message for message in logged)
