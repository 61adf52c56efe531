# SPDX-License-Identifier: Apache-2.0
"""Steps captured as a whole by megatron-core's own wrapper: the engine is told, and host memory follows the graph.

The device knows what a capture refuses and notes it as a hazard. A replay runs nothing here; tests/gpu runs real ones.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from megatron_patches import Handle, apply
from megatron_patches._rows.registry import Patch, apply_patches
from offload_engine import OffloadConfig, OffloadError
from tests.adversarial import AdversarialStream
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.parity import Case, run_without
from tests.dist.streams import Cuda, used_by_megatron
from tests.dist.tiny import engine_of, make_chunks, make_config, run, step
from tests.graph_device import GraphDevice

NAMES = ["qkv_linear", "core_attn", "mlp_fc1"]
WARMUP = 3


class _Graph:
    def __init__(self) -> None:
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


class _GraphCuda(Cuda):
    def __init__(self, device: GraphDevice) -> None:
        super().__init__(device)
        self._graphs = device
        self.CUDAGraph = _Graph

    def Stream(self, *args: Any, **kwargs: Any) -> AdversarialStream:  # noqa: N802  # as torch.cuda has it
        with self._graphs.compute_stream("capture") as stream:
            self._graphs.synchronize_all()  # on this device a stream begins with an operation
            return stream

    def synchronize(self, *args: Any) -> None:
        self._graphs.synchronize_all()

    def graph_pool_handle(self) -> None: ...

    @contextmanager
    def graph(self, graph: _Graph, *, stream: AdversarialStream, **_: Any) -> Iterator[None]:
        with self.stream(stream), self._graphs.graph():
            yield


@contextmanager
def _graphs() -> Iterator[GraphDevice]:
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper

    device = GraphDevice()
    no_states = Patch(
        target="megatron.core.full_cuda_graph:get_all_rng_states", wrapper=lambda _: dict, why="there is no GPU"
    )
    with (
        used_by_megatron(device, _GraphCuda(device), ["full_cuda_graph"]),
        apply_patches([no_states]),
    ):
        yield device
    FullCudaGraphWrapper.cuda_graph["training"] = None
    assert not device.hazards, device.hazards[:3]


def _wrapper(warmup_steps: int = WARMUP) -> Any:
    from megatron.core.full_cuda_graph import FullCudaGraphWrapper
    from megatron.core.pipeline_parallel import get_forward_backward_func

    wrapper = FullCudaGraphWrapper(get_forward_backward_func(), cuda_graph_warmup_steps=warmup_steps)
    wrapper.static_loader = lambda inputs, stage, microbatch: inputs
    return wrapper


def _forget(wrapper: Any) -> None:
    """Reset the graph, as `reset_cuda_graph` does from megatron-core 0.19 on."""
    for of_stage, value in ((wrapper.cuda_graph, None), (wrapper.result, None), (wrapper.curr_iteration, 0)):
        of_stage["training"] = of_stage["validation"] = value


SHAPES = [(Pipeline(), 2), (Pipeline(2, 2), 4)]


@pytest.mark.parametrize(("shape", "num_microbatches"), SHAPES, ids=["alone", "interleaved"])
@on_ranks()
def test_steps_are_captured_with_their_copies(shape: Pipeline, num_microbatches: int) -> None:
    (expected,) = run_without(Case("dense", NAMES), [num_microbatches])
    with _graphs() as device, _handle() as handle:
        chunks, wrapper = make_chunks(_config()), _wrapper()
        for number in range(2):
            for warmup in range(WARMUP + 1):
                got = step(chunks, num_microbatches, schedule=wrapper)
                assert got == expected, (number, warmup)
                run(chunks, num_microbatches, forward_only=True, schedule=wrapper)
            engine = engine_of(handle)
            assert wrapper.cuda_graph["training"] is not None
            (captured,) = engine.graphs.steps
            assert captured.host_bytes > 0 and 0 < engine.stats.copied_in_bytes <= engine.stats.copied_out_bytes
            copies = device.num_copies.total()
            run(chunks, num_microbatches, schedule=wrapper)
            assert wrapper.cuda_graph["training"].num_replays == 2 and device.num_copies.total() == copies
            with pytest.raises(OffloadError, match=r"reset_cuda_graph\('training'\) first"):
                handle.remove()
            _forget(wrapper)
        assert step(chunks, num_microbatches, schedule=wrapper) == expected
        assert not engine.graphs.steps and captured.host_bytes == 0
        assert engine.pool.slab_bytes_total > 0


@on_ranks()
def test_a_process_that_ends_with_its_graph_closes_the_engine() -> None:
    with _graphs():
        handle = _handle()
        chunks, wrapper = make_chunks(_config()), _wrapper()
        for _ in range(WARMUP + 2):
            run(chunks, 1, schedule=wrapper)
        engine = handle.engine
        assert engine is not None and engine.graphs.steps
        del chunks
        gc.collect()
        assert not engine.graphs.steps
        handle.remove()


def _handle() -> Handle:
    return apply(OffloadConfig(min_tensor_bytes=1))


def _config(**more: Any) -> Any:
    return make_config("dense", offload_activation=True, offload_modules=NAMES, **more)
