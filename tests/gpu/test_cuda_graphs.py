# SPDX-License-Identifier: Apache-2.0
"""Layers of which TransformerEngine captures a part in CUDA graphs: what is not captured is offloaded, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import eq
from typing import TYPE_CHECKING

import pytest
import torch

from tests.gpu.parity import deterministic_algorithms, run_twice
from tests.gpu.ranks import GpuRanks

if TYPE_CHECKING:
    from megatron_patches import Handle

NUM_STEPS, NUM_WARMUP_STEPS = 4, 2  # captured between two steps, when the hooks are there
NUM_MICROBATCHES = 3


@pytest.mark.parametrize(
    ("scope", "names"),
    [("moe_router", ["qkv_linear", "core_attn", "attn_proj", "experts"]), ("attn", ["mlp_norm", "router", "experts"])],
)
def test_modules_outside_the_capture_are_offloaded(
    scope: str, names: list[str], ranks_of: Callable[[int], GpuRanks]
) -> None:
    ranks_of(1).run(_check, scope, names)


def _check(scope: str, names: Sequence[str]) -> None:
    from megatron_patches import apply
    from offload_engine import FixedBounds, OffloadConfig

    with deterministic_algorithms(warn_only=True):
        expected = run_twice(lambda: _train(scope), eq)
        with apply(
            OffloadConfig(min_tensor_bytes=1, policy=FixedBounds(max_inflight_bytes=0)), modules=names
        ) as handle:
            got = _train(scope, handle)
    wrong = [[name for name in a if a[name] != b[name]] for a, b in zip(expected, got, strict=True)]
    assert not any(wrong), f"steps differ from those without offload: {wrong}"


def _train(scope: str, handle: Handle | None = None) -> list[dict[str, str]]:
    """As megatron-core's own training loop: steps without graphs, the capture, and steps that replay."""
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
    from megatron.core.transformer.module import Float16Module

    from tests.dist.tiny import fingerprint
    from tests.gpu.small_gpt import MICRO_BATCH, SEQUENCE, make_chunks, make_config, run

    config = make_config(
        num_moe_experts=4,
        cuda_graph_impl="transformer_engine",
        cuda_graph_scope=[scope],
        cuda_graph_warmup_steps=NUM_WARMUP_STEPS,
    )
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    bare = make_chunks(config)
    # On a stream of its own, where the nodes that accumulate gradients stay: none can run on the default one while
    # something is captured.
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
        chunks = [DistributedDataParallel(config, settings, Float16Module(config, chunk)) for chunk in bare]
        torch.cuda.synchronize()
    calculator.init_num_microbatches_calculator(0, None, NUM_MICROBATCHES * MICRO_BATCH, MICRO_BATCH, 1)
    graphs = TECudaGraphHelper(chunks, config, SEQUENCE, MICRO_BATCH)
    steps = []
    try:
        for step in range(NUM_STEPS):
            if step == NUM_WARMUP_STEPS:
                graphs.create_cudagraphs()
                assert all(layer.cuda_graphs for layer in graphs.flattened_callables), "nothing was captured"
            steps.append(fingerprint(chunks, run(chunks, NUM_MICROBATCHES)))
            _check_stats(handle)
    finally:
        if graphs.graphs_created():
            graphs.delete_cuda_graphs()
        calculator.unset_num_microbatches_calculator()
    return steps


def _check_stats(handle: Handle | None) -> None:
    if handle is not None:
        stats = handle.stats
        assert stats is not None and 0 < stats.copied_in_bytes <= stats.copied_out_bytes
        assert stats.num_storages_left == 0
