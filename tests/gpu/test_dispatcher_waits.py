# SPDX-License-Identifier: Apache-2.0
"""A copy in flight makes no host wait longer in the dispatch of tokens to experts, on real GPUs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.overrides import TorchFunctionMode

from offload_engine._devices.host_read import MappedRead
from tests.dist.launch import Pipeline
from tests.gpu.ranks import GpuRanks

COPY_BYTES = 512 << 20  # on its way for about 9 ms
LONGEST_WAIT_S = 0.1e-3
# Of the dispatch as a whole: the host itself works more slowly beside a copy. One that waits for it takes 8 ms longer.
LONGEST_DELAY_S = 1e-3
NUM_ROUNDS = 12
# All that makes the host wait for the device on the way of the tokens, in megatron-core and in what replaces it.
READS = (torch.Tensor.cpu, torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.masked_select)
WAITS = [(torch.cuda.Event, "synchronize"), (torch.cuda.Stream, "synchronize"), (MappedRead, "wait")]


class Dispatch(NamedTuple):
    """From the router's end to the first expert's begin, in seconds."""

    waited: float
    """Of the host, for the device."""
    whole: float


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


def _check(ranks: GpuRanks, settings: dict[str, Any]) -> None:
    shape = Pipeline(expert=ranks.num_ranks)
    for longer in ranks.run(_measure, settings, True, shape=shape):
        assert longer.waited < LONGEST_WAIT_S and longer.whole < LONGEST_DELAY_S, longer
    # The same offload without the rows for MoE layers: what is measured does wait for copies.
    for longer in ranks.run(_measure, settings, False, shape=shape):
        assert min(longer) > 10 * LONGEST_WAIT_S, longer


def _measure(settings: dict[str, Any], has_rows: bool) -> Dispatch:
    """Return by how much the shortest dispatches behind a copy are longer than the shortest others.

    After a step to warm up, every other microbatch of a step finds a copy in its way.
    """
    import megatron_patches
    from offload_engine import OffloadConfig
    from tests.gpu.small_gpt import make_chunks, make_config, run

    with _with_rows(has_rows), megatron_patches.apply(OffloadConfig(min_tensor_bytes=1)) as handle:
        offload = {"offload_activation": True, "offload_modules": ["core_attn"]}
        chunks = make_chunks(make_config(num_moe_experts=8, **settings, **offload))
        run(chunks, 2)
        stopwatch = _Stopwatch(chunks[0].decoder.layers[0].mlp)
        with stopwatch.timing_waits():
            run(chunks, 2 * NUM_ROUNDS)
        assert handle.stats is not None and handle.stats.copied_out_bytes > 0
    alone, behind = (map(min, zip(*stopwatch.dispatches[first::2], strict=True)) for first in (0, 1))
    return Dispatch(*(b - a for a, b in zip(alone, behind, strict=True)))


def _with_rows(has_rows: bool) -> AbstractContextManager[object]:
    import megatron_patches._handle

    return nullcontext() if has_rows else mock.patch.object(megatron_patches._handle, "moe_rows", return_value=[])


class _Stopwatch:
    """Times the dispatch of one MoE layer; in front of every other one it issues a large copy to the host."""

    def __init__(self, layer: Any) -> None:
        self.dispatches: list[Dispatch] = []
        self._begin = self._waited = 0.0
        self._stream = torch.cuda.Stream()
        self._source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda")
        self._target = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        layer.router.register_forward_hook(self._after_router)
        layer.experts.linear_fc1.register_forward_pre_hook(self._before_experts)

    @contextmanager
    def timing_waits(self) -> Iterator[None]:
        """While entered, `dispatches` says of how long the host waited."""
        with ExitStack() as stack:
            for owner, name in WAITS:
                stack.enter_context(mock.patch.object(owner, name, self._timed(getattr(owner, name))))
            stack.enter_context(_TimedReads(self._timed))
            yield

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(wait)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return wait(*args, **kwargs)
            finally:
                self._waited += time.perf_counter() - begin

        return timed

    def _after_router(self, *_: Any) -> None:
        torch.distributed.barrier()
        torch.cuda.synchronize()  # neither the router nor the copy before is waited for
        if len(self.dispatches) % 2:
            with torch.cuda.stream(self._stream):
                self._target.copy_(self._source, non_blocking=True)
        self._begin, self._waited = time.perf_counter(), 0.0

    def _before_experts(self, *_: Any) -> None:
        self.dispatches.append(Dispatch(self._waited, time.perf_counter() - self._begin))


class _TimedReads(TorchFunctionMode):
    """Times the reads that no other mode, entered later, has replaced."""

    def __init__(self, timed: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        super().__init__()
        self._timed = timed

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_read = func in READS and args[0].is_cuda
        return (self._timed(func) if is_read else func)(*args, **(kwargs or {}))
