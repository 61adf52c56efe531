"""A copy in flight makes no host wait longer in the dispatch of tokens to experts, on real GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch

from tests.dist.launch import Pipeline
from tests.gpu.ranks import GpuRanks

COPY_BYTES = 512 << 20  # on its way for about 9 ms
LONGEST_WAIT_S = 0.1e-3
NUM_ROUNDS = 12

# Of megatron-core's flex dispatcher -> what it needs, by flag in `fused_a2a` and by package.
BACKENDS = {"deepep": ("HAVE_DEEP_EP", "deep_ep"), "hybridep": ("HAVE_HYBRIDEP", "deep_ep")}


class Times(NamedTuple):
    """Shortest time of the host from the router's end to the first expert's begin, in seconds."""

    alone: float
    behind_a_copy: float


@pytest.fixture(params=[1, 2], ids=["1 GPU", "2 GPUs"])
def ranks(request: pytest.FixtureRequest, ranks_of: Callable[[int], GpuRanks]) -> GpuRanks:
    if (num_gpus := torch.cuda.device_count()) < request.param:
        pytest.skip(
            f"needs {request.param} GPUs of one machine, there are {num_gpus}; ranks that share one wait for it"
        )
    return ranks_of(request.param)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_no_wait_behind_a_copy(dispatcher: str, ranks: GpuRanks) -> None:
    _check(ranks, {"moe_token_dispatcher_type": dispatcher})


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_wait_behind_a_copy_in_the_flex_dispatcher(backend: str, ranks: GpuRanks) -> None:
    flag, package = BACKENDS[backend]
    if find_spec(package) is None:
        pytest.skip(f"needs {package}, which is not installed")
    if not ranks.run(_has, flag)[0]:
        pytest.skip(f"the {package} that is installed has no {backend} ({flag} is False in megatron-core's fused_a2a)")
    if ranks.num_ranks == 1:
        pytest.skip("the flex dispatcher needs 2 ranks of experts: run it on 2 GPUs")
    flex = {"moe_token_dispatcher_type": "flex", "moe_flex_dispatcher_backend": backend}
    _check(ranks, {**flex, "moe_router_dtype": "fp32"})


def _has(flag: str) -> bool:
    from megatron.core.transformer.moe import fused_a2a

    return bool(getattr(fused_a2a, flag, False))


def _check(ranks: GpuRanks, settings: dict[str, Any]) -> None:
    shape = Pipeline(expert=ranks.num_ranks)
    for ours in ranks.run(_measure, settings, True, shape=shape):
        assert ours.behind_a_copy - ours.alone < LONGEST_WAIT_S, ours
    # The same offload without the rows for MoE layers: what is measured does wait for copies.
    for plain in ranks.run(_measure, settings, False, shape=shape):
        assert plain.behind_a_copy - plain.alone > 10 * LONGEST_WAIT_S, plain


def _measure(settings: dict[str, Any], has_rows: bool) -> Times:
    """One step to warm up, and one in which every other microbatch finds a copy in its way."""
    import megatron_patches
    from offload_engine import OffloadConfig
    from tests.gpu.small_gpt import make_chunks, make_config, run

    with _with_rows(has_rows), megatron_patches.apply(OffloadConfig(min_tensor_bytes=1)) as handle:
        offload = {"offload_activation": True, "offload_modules": ["core_attn"]}
        chunks = make_chunks(make_config(num_moe_experts=8, **settings, **offload))
        run(chunks, 2)
        stopwatch = _Stopwatch(chunks[0].decoder.layers[0].mlp)
        run(chunks, 2 * NUM_ROUNDS)
        assert handle.stats is not None and handle.stats.copied_out_bytes > 0
        return Times(min(stopwatch.times[0::2]), min(stopwatch.times[1::2]))


def _with_rows(has_rows: bool) -> AbstractContextManager[object]:
    import megatron_patches._handle

    return nullcontext() if has_rows else mock.patch.object(megatron_patches._handle, "moe_rows", return_value=[])


class _Stopwatch:
    """Times the dispatch of one MoE layer; in front of every other one it issues a large copy to the host."""

    def __init__(self, layer: Any) -> None:
        self.times: list[float] = []
        self._begin = 0.0
        self._num_calls = 0
        self._stream = torch.cuda.Stream()
        self._source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
        self._target = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        layer.router.register_forward_hook(self._after_router)
        layer.experts.linear_fc1.register_forward_pre_hook(self._before_experts)

    def _after_router(self, *_: Any) -> None:
        torch.distributed.barrier()
        torch.cuda.synchronize()  # neither the router nor the copy before is waited for
        if self._num_calls % 2:
            with torch.cuda.stream(self._stream):
                self._target.copy_(self._source, non_blocking=True)
        self._num_calls += 1
        self._begin = time.perf_counter()

    def _before_experts(self, *_: Any) -> None:
        self.times.append(time.perf_counter() - self._begin)
