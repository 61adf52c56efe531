# SPDX-License-Identifier: Apache-2.0
"""Captures by megatron-core: of whole steps, and of layers by TransformerEngine; host memory follows the graph.

The device knows what a capture refuses and notes it as a hazard. A replay runs nothing here; tests/gpu runs real ones.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.full_cuda_graph import FullCudaGraphWrapper
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import cuda_graphs
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_patches import apply
from megatron_patches._rows.registry import Patch, apply_patches
from offload_engine import OffloadConfig, OffloadError
from tests.adversarial import AdversarialStream
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.models import HYBRID
from tests.dist.parity import Case, run_without
from tests.dist.streams import Cuda, used_by_megatron
from tests.dist.tiny import ALL, HIDDEN, MICRO_BATCH, SEQUENCE, engine_of, make_chunks, make_config, run, stats_of, step
from tests.graph_device import GraphDevice, GraphWithoutReplay

NAMES = ["qkv_linear", "core_attn", "mlp_fc1"]
WARMUP = 3


class _GraphCuda(Cuda):
    CUDAGraph = mock.Mock

    def __init__(self, device: GraphDevice) -> None:
        super().__init__(device)
        self._graphs = device

    def Stream(self, *args: Any, **kwargs: Any) -> AdversarialStream:  # noqa: N802  # as torch.cuda has it
        with self._graphs.compute_stream("capture") as stream:
            self._graphs.synchronize_all()  # on this device a stream begins with an operation
            return stream

    def synchronize(self, *args: Any) -> None:
        self._graphs.synchronize_all()

    def graph_pool_handle(self) -> None: ...

    @contextmanager
    def graph(self, graph: Any, *, stream: AdversarialStream, **_: Any) -> Iterator[None]:
        with self.stream(stream), self._graphs.graph():
            yield


@contextmanager
def _graphs() -> Iterator[GraphDevice]:
    device = GraphDevice()
    no_states = Patch(
        target="megatron.core.full_cuda_graph:get_all_rng_states", wrapper=lambda _: dict, why="there is no GPU"
    )
    with used_by_megatron(device, _GraphCuda(device), ["full_cuda_graph"]), apply_patches([no_states]):
        yield device
    FullCudaGraphWrapper.cuda_graph["training"] = None
    assert not device.hazards, device.hazards[:3]


def _wrapper() -> Any:
    wrapper = FullCudaGraphWrapper(get_forward_backward_func(), cuda_graph_warmup_steps=WARMUP)
    wrapper.static_loader = lambda inputs, stage, microbatch: inputs
    return wrapper


def _forget(wrapper: Any) -> None:
    """Reset the graph, as `reset_cuda_graph` does from megatron-core 0.19 on."""
    for of_stage, value in ((wrapper.cuda_graph, None), (wrapper.result, None), (wrapper.curr_iteration, 0)):
        of_stage["training"] = of_stage["validation"] = value


SHAPES = [(Pipeline(), 2), (Pipeline(2, 2), 4)]


@pytest.mark.compat
@pytest.mark.parametrize(("shape", "num_microbatches"), SHAPES, ids=["alone", "interleaved"])
@on_ranks()
def test_steps_are_captured_with_their_copies(shape: Pipeline, num_microbatches: int) -> None:
    (expected,) = run_without(Case("dense", NAMES), [num_microbatches])
    with _graphs() as device, apply(ALL, modules=NAMES) as handle:
        chunks, wrapper = make_chunks(make_config()), _wrapper()
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
            assert wrapper.cuda_graph["training"].replay.call_count == 2 and device.num_copies.total() == copies
            with pytest.raises(OffloadError, match=r"reset_cuda_graph\('training'\) first"):
                handle.remove()
            _forget(wrapper)
        assert step(chunks, num_microbatches, schedule=wrapper) == expected
        assert not engine.graphs.steps and captured.host_bytes == 0
        assert engine.pool.slab_bytes_total > 0


@on_ranks()
def test_a_process_that_ends_with_its_graph_closes_the_engine() -> None:
    with _graphs():
        handle = apply(ALL, modules=NAMES)
        chunks, wrapper = make_chunks(make_config()), _wrapper()
        for _ in range(WARMUP + 2):
            run(chunks, 1, schedule=wrapper)
        engine = engine_of(handle)
        assert engine.graphs.steps
        del chunks
        gc.collect()
        assert not engine.graphs.steps
        handle.remove()


# -- layers, which TransformerEngine captures: what leaves, and to where, is decided in the captures -------------------

ROW_BYTES = SEQUENCE * MICRO_BATCH * 4
ACTIVATION = ROW_BYTES * HIDDEN
OF_LAYER = ACTIVATION + ROW_BYTES * 4 * HIDDEN  # the inputs of the projection and of the second linear layer
# Mamba, attention, dense and experts, twice; with a stand-in for the mixer, whose kernels need a GPU.
EIGHT = {**HYBRID, "num_layers": 8}
# Kind of the model, names, captured scopes, settings; the forwards whose saved tensors leave, and the bytes of these
# and of their slots.
CAPTURED: dict[str, tuple[str, list[str], list[str], dict[str, Any], list[int], int, int]] = {
    "all layers but the last": ("dense", ["attn_proj", "mlp_fc2"], [], {}, [0, 1, 2], 3 * OF_LAYER, 2 * OF_LAYER),
    "mamba": ("moe", ["mamba_in_proj", "mamba_out_proj"], ["mamba"], EIGHT, [0, 3], 4 * ACTIVATION, 4 * ACTIVATION),
    # Of six forwards, each second of three.
    "attention beside mamba": ("moe", ["attn_proj"], ["mamba", "attn"], EIGHT, [1, 4], 2 * ACTIVATION, 2 * ACTIVATION),
}


class _Helper:
    """Captures layers of a chunk as TransformerEngine does: all forwards, then all backwards.

    Without experts: what runs there is not captured.
    """

    def __init__(self, chunk: Any, config: Any) -> None:
        self.model = [chunk]
        self.config = config
        self.graphs: list[Any] = []

    def create_cudagraphs(self) -> None:
        layers = [layer for layer in self.model[0].decoder.layers if not hasattr(getattr(layer, "mlp", 0), "experts")]
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
        outputs = list[torch.Tensor]()
        for layer in layers:
            x = torch.rand(SEQUENCE, MICRO_BATCH, HIDDEN, requires_grad=True)
            with self._captured():
                output = layer(x, attention_mask=mask)
            outputs.append(output if isinstance(output, torch.Tensor) else output[0])
        for output in reversed(outputs):
            with self._captured():
                output.backward(torch.ones_like(output))

    @contextmanager
    def _captured(self) -> Iterator[None]:
        graph: Any = torch.cuda.CUDAGraph()
        self.graphs.append(graph)
        graph.capture_begin()
        yield
        graph.capture_end()


def _capture(config: Any, scopes: list[str]) -> None:
    vars(config).update(cuda_graph_impl="transformer_engine", cuda_graph_scope=scopes, cuda_graph_modules=scopes)


@pytest.mark.compat
@pytest.mark.parametrize("row", CAPTURED)
@on_ranks()
def test_named_modules_of_captured_layers_leave(row: str) -> None:
    """A step runs before the capture, and one behind it."""
    kind, names, scopes, settings, left, copied_bytes, slot_bytes = CAPTURED[row]
    device = GraphDevice()
    with (
        used_by_megatron(device, Cuda(device)),
        mock.patch.object(torch.cuda, "CUDAGraph", GraphWithoutReplay),
        mock.patch.object(cuda_graphs, "TECudaGraphHelper", _Helper),
        apply(OffloadConfig(min_tensor_bytes=1), modules=names) as handle,
    ):
        config = make_config(kind, cuda_graph_impl="none", **settings)
        chunks = make_chunks(config)
        run(chunks, 1)
        helper = _Helper(chunks[0], config)
        helper.create_cudagraphs()
        engine = engine_of(handle)
        assert not engine.graphs.layers  # the configuration captures nothing
        # A copy: the layers themselves read theirs, and would replay.
        helper.config = copy.copy(config)
        _capture(helper.config, scopes)
        helper.create_cudagraphs()
        (layers,) = engine.graphs.layers
        assert [number for number, step in enumerate(layers.steps) if step.copy_outs] == left
        assert (layers.copied_out_bytes, layers.slot_bytes) == (copied_bytes, slot_bytes)
        run(chunks, 1)
        with pytest.raises(OffloadError, match="captured layers still use"):
            handle.remove()
        for graph in helper.graphs:
            graph.reset()
    assert not device.hazards


@on_ranks()
def test_layers_that_are_captured_get_no_hooks() -> None:
    """TransformerEngine refuses to capture modules with hooks."""
    with apply(ALL, modules=["core_attn"]) as handle:
        chunks = make_chunks(make_config("moe"))
        modules = [module for chunk in chunks for module in chunk.modules()]
        for module in modules:
            if isinstance(module, GraphableMegatronModule):
                _capture(module.config, ["moe_router"])
                module.cuda_graphs = []
        run(chunks, 2)
        assert stats_of(handle).copied_in_bytes > 0
        layers = [module for module in modules if isinstance(module, TransformerLayer)]
        assert layers and not any((*layer._forward_pre_hooks, *layer._forward_hooks) for layer in layers)
