# SPDX-License-Identifier: Apache-2.0
"""Steps that megatron-core captures as a whole, replayed with their copies: the same bits, and less memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.dist.launch import Pipeline
from tests.gpu.parity import check_bits, deterministic_algorithms
from tests.gpu.ranks import GpuRanks

NAMES = ["qkv_linear", "core_attn", "attn_proj", "mlp_fc1", "mlp_act", "mlp_fc2"]
SIZES = {"num_layers": 8, "hidden_size": 1024, "ffn_hidden_size": 2048, "num_attention_heads": 8}
WARMUP, NUM_MICROBATCHES = 3, 3


@pytest.mark.parametrize("num_ranks", [1, 2], ids=["alone", "1f1b"])
def test_replays_are_those_of_steps_without_offload(num_ranks: int, ranks_of: Callable[[int], GpuRanks]) -> None:
    ranks_of(num_ranks).run(_check, shape=Pipeline(num_ranks))


def _check() -> None:
    from megatron_patches import apply
    from offload_engine import OffloadConfig

    with deterministic_algorithms(warn_only=True):
        eager, captured = _Steps(False), _Steps(False)
        expected = [eager.run() for _ in range(WARMUP + 3)]
        check_bits(expected, [captured.run(is_captured=True) for _ in range(WARMUP + 3)])
        without = captured.reserved_bytes
        captured.reset()  # the wrapper keeps one graph for all: another model would replay it
        del eager, captured
        with apply(OffloadConfig()) as handle:
            steps = _Steps(True)
            check_bits(expected, [steps.run(is_captured=True) for _ in range(WARMUP + 3)])
            engine = handle.engine
            assert engine is not None and engine.stats.copied_out_bytes > 0
            (step,) = engine.graphs.steps
            assert step.host_bytes > 0 and steps.reserved_bytes < without
            steps.reset()
            check_bits(expected[:1], [steps.run(is_captured=True)])  # eagerly again
            assert not engine.graphs.steps
            steps.reset()


class _Steps:
    """Steps of one model, whose gradients and batches keep their places."""

    def __init__(self, is_offloaded: bool) -> None:
        from megatron.core.full_cuda_graph import FullCudaGraphWrapper
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from tests.gpu.small_gpt import keep_gradients, make_chunks, make_config

        torch.cuda.empty_cache()
        self._before = torch.cuda.memory_reserved()
        offload = {"offload_activation": True, "offload_modules": NAMES} if is_offloaded else {}
        # Between stages no host waits for a transfer: a capture does not allow it.
        graphs = {"cuda_graph_impl": "full_iteration", "batch_p2p_sync": False}
        self._chunks = make_chunks(make_config(**SIZES, **graphs, **offload))
        keep_gradients(self._chunks)
        self._wrapper = FullCudaGraphWrapper(get_forward_backward_func(), cuda_graph_warmup_steps=WARMUP)
        self._wrapper.static_loader = self._load
        self._batches: dict[int, torch.Tensor] = {}
        self.reserved_bytes = 0

    def run(self, is_captured: bool = False) -> dict[str, str]:
        from tests.dist.tiny import fingerprint
        from tests.gpu.small_gpt import run

        losses = run(self._chunks, NUM_MICROBATCHES, schedule=self._wrapper if is_captured else None)
        torch.cuda.synchronize()
        if self._wrapper.cuda_graph["training"] is not None:
            self.reserved_bytes = _trimmed_reserved_bytes() - self._before
        return fingerprint(self._chunks, losses)

    def reset(self) -> None:
        self._wrapper.reset_cuda_graph("training")

    def _load(self, tokens: torch.Tensor, stage: str, microbatch: int) -> torch.Tensor:
        return self._batches.setdefault(microbatch, torch.empty_like(tokens)).copy_(tokens)


def _trimmed_reserved_bytes() -> int:
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()
