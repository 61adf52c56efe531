# SPDX-License-Identifier: Apache-2.0
"""Layers that TransformerEngine captures under megatron-core: the rows announce their captures to the engine.

There is no GPU, so nothing is replayed: what leaves, and to where, is decided in the captures.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.module import GraphableMegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron_patches import apply
from offload_engine import OffloadConfig, OffloadError
from offload_engine.captured_layers import CapturedLayers
from tests.dist.launch import on_ranks
from tests.dist.models import HYBRID
from tests.dist.streams import Cuda, used_by_megatron
from tests.dist.tiny import HIDDEN, MICRO_BATCH, NUM_LAYERS, SEQUENCE, make_chunks, make_config, run
from tests.graph_device import GraphDevice, GraphWithoutReplay

NAMES = ["attn_proj", "mlp_fc2"]
ROW_BYTES = SEQUENCE * MICRO_BATCH * 4
ACTIVATION_BYTES = ROW_BYTES * HIDDEN


class _Helper:
    """Captures layers of a chunk as TransformerEngine does: all forwards, then all backwards.

    Without experts: what runs there is not captured.
    """

    def __init__(self, chunk: Any, config: Any) -> None:
        self.model = [chunk]
        self.config = config
        self.graphs: list[Any] = []

    def create_cudagraphs(self) -> None:
        layers = [layer for layer in self.model[0].decoder.layers if not _has_experts(layer)]
        mask = torch.ones(1, 1, SEQUENCE, SEQUENCE).triu(1).bool()
        outputs = []
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


def _has_experts(layer: torch.nn.Module) -> bool:
    return hasattr(getattr(layer, "mlp", None), "experts")


@contextmanager
def _captured(
    kind: str, names: list[str], scopes: list[str], **settings: Any
) -> Iterator[tuple[CapturedLayers, TransformerConfig]]:
    """Capture the layers of a model whose named modules are offloaded; run a step before and one behind it."""
    from megatron.core.transformer import cuda_graphs

    device = GraphDevice()
    with (
        used_by_megatron(device, Cuda(device), []),
        mock.patch.object(torch.cuda, "CUDAGraph", GraphWithoutReplay),
        mock.patch.object(cuda_graphs, "TECudaGraphHelper", _Helper),
        apply(OffloadConfig(min_tensor_bytes=1), modules=names) as handle,
    ):
        config = make_config(kind, cuda_graph_impl="none", **settings)
        chunks = make_chunks(config)
        run(chunks, 1)
        helper = _Helper(chunks[0], config)
        helper.create_cudagraphs()
        engine = handle.engine
        assert engine is not None and not engine.graphs.layers  # the configuration captures nothing
        # A copy: the layers themselves read theirs, and would replay.
        helper.config = copy.copy(config)
        vars(helper.config).update(
            cuda_graph_impl="transformer_engine", cuda_graph_scope=scopes, cuda_graph_modules=scopes
        )
        helper.create_cudagraphs()
        (layers,) = engine.graphs.layers
        yield layers, config
        run(chunks, 1)
        with pytest.raises(OffloadError, match="captured layers still use"):
            handle.remove()
        for graph in helper.graphs:
            graph.reset()
    assert not device.hazards


@on_ranks()
def test_named_modules_of_captured_layers_leave() -> None:
    with _captured("dense", NAMES, []) as (layers, config):
        # The inputs of the projection and of the second linear layer, of all layers but the last.
        assert layers.copied_out_bytes == (NUM_LAYERS - 1) * ROW_BYTES * (HIDDEN + config.ffn_hidden_size)
        assert layers.slot_bytes == 2 * ROW_BYTES * (HIDDEN + config.ffn_hidden_size)


@on_ranks()
def test_named_modules_of_captured_mamba_layers_leave() -> None:
    """With a stand-in for the mixer, whose kernels need a GPU."""
    names = ["mamba_in_proj", "mamba_out_proj"]
    with _captured("moe", names, ["mamba"], **HYBRID, num_layers=8) as (layers, _):
        # Mamba, attention, dense and experts, twice. The inputs of both projections of two layers.
        assert layers.copied_out_bytes == 4 * ACTIVATION_BYTES
        assert layers.slot_bytes == 2 * 2 * ACTIVATION_BYTES


@on_ranks()
def test_captured_mamba_layers_without_a_name_stay_beside_attention_that_leaves() -> None:
    with _captured("moe", ["attn_proj"], ["mamba", "attn"], **HYBRID, num_layers=8) as (layers, _):
        assert layers.copied_out_bytes == 2 * ACTIVATION_BYTES
        left = [number for number, step in enumerate(layers.steps) if step.copy_outs]
        assert left == [1, 4]  # of six forwards, each second of three


@on_ranks()
def test_layers_that_are_captured_get_no_hooks() -> None:
    """TransformerEngine refuses to capture modules with hooks."""
    with apply(OffloadConfig(min_tensor_bytes=1, directory="none"), modules=["core_attn"]) as handle:
        chunks = make_chunks(make_config("moe"))
        modules = [module for chunk in chunks for module in chunk.modules()]
        for module in modules:
            if isinstance(module, GraphableMegatronModule):
                module.config.cuda_graph_impl = "transformer_engine"
                module.config.cuda_graph_modules = module.config.cuda_graph_scope = ["moe_router"]
                module.cuda_graphs = []
        run(chunks, 2)
        assert handle.stats is not None and handle.stats.copied_in_bytes > 0
        layers = [module for module in modules if isinstance(module, TransformerLayer)]
        assert layers and not any((*layer._forward_pre_hooks, *layer._forward_hooks) for layer in layers)
