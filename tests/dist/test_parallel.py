"""Sequence parallelism, and the distributed optimizer with overlapped reductions and gathers: the same bits.

Context parallelism needs an attention kernel of TransformerEngine, which needs a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402

from megatron_patches import apply  # noqa: E402
from offload_engine import OffloadConfig  # noqa: E402
from tests.dist.launch import Pipeline, run_ranks  # noqa: E402
from tests.dist.parity import Case, check_all  # noqa: E402
from tests.dist.tiny import fingerprint, make_chunks, make_config, run  # noqa: E402

NAMES = ["layer_input", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"]
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "use_distributed_optimizer": True}


@pytest.mark.parametrize("pipeline", [Pipeline(tensor=2), Pipeline(2, 2, tensor=2)], ids=str)
def test_sequence_parallel(pipeline: Pipeline) -> None:
    settings = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    cases = [Case("dense", [name], settings=settings) for name in ("qkv_linear", "mlp_fc1")]
    cases += [Case("dense", NAMES, settings=settings), Case("dense", ["self_attn", "mlp_act"], settings=settings)]
    run_ranks(check_all, cases, [2 * pipeline.size], pipeline=pipeline, timeout_s=240.0)


@pytest.mark.parametrize(
    ("pipeline", "world_size", "kind"), [(Pipeline(), 2, "dense"), (Pipeline(2, 2, expert=2), 4, "moe")]
)
def test_distributed_optimizer_with_overlap(pipeline: Pipeline, world_size: int, kind: str) -> None:
    """Gradients are reduced during the backward, and parameters gathered during the next forward."""
    run_ranks(_check_steps, kind, pipeline, pipeline=pipeline, world_size=world_size, timeout_s=240.0)


def _check_steps(kind: str, pipeline: Pipeline) -> None:
    settings = {"expert_model_parallel_size": pipeline.expert}
    expected = _train(kind, 2 * pipeline.size, settings)
    names = ["layer_input", "core_attn", "attn_proj", *(["router_fc1", "moe_act"] if kind == "moe" else ["mlp_fc1"])]
    with apply(OffloadConfig(min_tensor_bytes=1, directory="none")) as handle:
        asked = {"offload_activation": True, "offload_modules": names}
        got = _train(kind, 2 * pipeline.size, {**settings, **asked})
        assert handle.stats is not None
        has_left = handle.stats.num_groups > handle.stats.num_kept_groups
        assert (handle.stats.copied_out_bytes > 0) == has_left
    assert got == expected
    assert expected[0] != expected[-1], "nothing was learned"


def _train(kind: str, num_microbatches: int, settings: dict[str, Any]) -> list[dict[str, str]]:
    """Three steps; what each leaves in the gradients' buffers, and its losses."""
    config = make_config(kind, torch.bfloat16, **settings)
    chunks = _wrapped(config, make_chunks(config))
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=0.01,
        bf16=True,
        params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
    )
    optimizer = get_megatron_optimizer(optimizer_config, chunks)
    config.grad_scale_func = optimizer.scale_loss
    steps = []
    for _ in range(3):
        losses = run(chunks, num_microbatches)
        steps.append(fingerprint(chunks, losses))
        assert optimizer.step()[0]
    return steps


def _wrapped(config: Any, chunks: Sequence[torch.nn.Module]) -> list[Any]:
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, bucket_size=2000, **OVERLAP)
    wrapped = [DistributedDataParallel(config, settings, Float16Module(config, chunk)) for chunk in chunks]
    config.finalize_model_grads_func = finalize_model_grads
    for name, function in (
        ("no_sync_func", "no_sync"),
        ("grad_sync_func", "start_grad_sync"),
        ("param_sync_func", "start_param_sync"),
    ):
        functions = [getattr(chunk, function) for chunk in wrapped]
        setattr(config, name, functions if len(functions) > 1 else functions[0])
    return wrapped
