# SPDX-License-Identifier: Apache-2.0
"""Layers of which TransformerEngine captures a part in CUDA graphs: that and the rest are offloaded, bit by bit.

Among the cases are those of megatron-core's own test of its offload beside graphs, as recipes that are taken over.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import pytest
import torch

from tests.dist.launch import Pipeline
from tests.dist.settings import selective
from tests.gpu.parity import RELEASED_AT_ONCE, check_bits, deterministic_algorithms, run_twice
from tests.gpu.ranks import GpuRanks
from tests.gpu.test_module_names import LATENT, needs_mamba
from tests.program_order import edges_of, unordered

if TYPE_CHECKING:
    from megatron_patches import Handle

LEAST_FALL = 0.5  # of what captured modules of one microbatch save, less where it is read: the last saves stay
NUM_STEPS, NUM_WARMUP_STEPS = 4, 2  # captured between two steps, when the hooks are there
NUM_MICROBATCHES = 4
SIZES: dict[str, Any] = {"num_layers": 6, "hidden_size": 1024, "ffn_hidden_size": 2048, "num_attention_heads": 8}
EXPERTS: dict[str, Any] = {"num_moe_experts": 4, "moe_ffn_hidden_size": 1024}
DENSE: dict[str, Any] = {name: None for name in EXPERTS}
OVERLAP: dict[str, Any] = {"overlap_moe_expert_parallel_comm": True}
# Mamba, attention, dense and experts, six times; the last two are eager.
HYBRID: dict[str, Any] = {"num_layers": 24, "is_hybrid_model": True, "mamba_num_heads": 32}
_WITH_NORMS = ["layernorm", "moe_act"]
_ATTENTION, _ALL = ["core_attn", "attn_proj"], ["core_attn", "attn_proj", "expert_fc1", "moe_act"]
_ROUTER, _PREPROCESS = ["attn", "moe_router"], ["attn", "moe_router", "moe_preprocess"]

ATTENTION = ["qkv_linear", "core_attn", "attn_proj"]
OF_DENSE = [*ATTENTION, "mlp_fc1", "mlp_act", "mlp_fc2"]
# Captured scopes, names, and settings of the model.
OUTSIDE: dict[str, tuple[Pipeline, list[str], list[str], dict[str, Any]]] = {
    "attention": (Pipeline(), ["moe_router"], [*ATTENTION, "experts"], {}),
    "router": (Pipeline(), ["attn"], ["mlp_norm", "router", "experts"], {}),
    "experts": (Pipeline(), _PREPROCESS, ["expert_fc1", "moe_act"], {}),
}
INSIDE: dict[str, tuple[Pipeline, list[str], list[str], dict[str, Any]]] = {
    "attention": (Pipeline(), ["attn"], ATTENTION, {}),
    "attention, eager experts": (Pipeline(), _ROUTER, [*ATTENTION, "expert_fc1", "moe_act"], {}),
    "recomputed norms": (Pipeline(), _PREPROCESS, [*_ATTENTION, "mlp_norm", "moe_act"], selective(*_WITH_NORMS)),
    "recomputed projections from latents": (
        *(Pipeline(), _PREPROCESS, ["attn_proj", "mlp_norm", "expert_fc1", "moe_act"]),
        selective(*_WITH_NORMS, "mla_up_proj", **LATENT),
    ),
    "dense layers": (Pipeline(), ["attn", "mlp"], OF_DENSE, DENSE),
    "whole layers": (Pipeline(), [], OF_DENSE, DENSE),
    # Not with `delay_wgrad_compute`: two runs of these graphs differ without offload.
    # Six layers a stage: the last stage has one microbatch at a time, and two slots besides, a layer each.
    "1F1B": (Pipeline(2), ["attn", "mlp"], OF_DENSE, {**DENSE, "num_layers": 12}),
    "interleaved": (Pipeline(2, 2), ["attn", "mlp"], OF_DENSE, {**DENSE, "num_layers": 8}),
    "overlap": (Pipeline(expert=2), _ROUTER, [*ATTENTION, "moe_act"], OVERLAP),
}
WITH_MAMBA: dict[str, tuple[list[str], list[str]]] = {
    "mixers": (["mamba"], ["mamba_mixer"]),
    "their projections, eager attention": (["mamba"], ["mamba_in_proj", "mamba_out_proj", *ATTENTION]),
    "mixers and attention": (["mamba", "attn"], ["mamba_mixer", *ATTENTION]),
    "attention beside mixers that stay": (["mamba", "attn"], ATTENTION),
}
# Of megatron-core's own test: captured scopes, names, whether attention has latents, the fraction to offload, and
# whether copies wait for the next replay.
UPSTREAM = [
    (_ROUTER, _ATTENTION, False, 1.0, True),
    (_PREPROCESS, ["expert_fc1", "moe_act"], False, 1.0, True),
    (_ROUTER, [*_ATTENTION, "expert_fc1"], False, 1.0, True),
    (_ROUTER, _ALL, False, 1.0, True),
    (_PREPROCESS, ["core_attn", "expert_fc1", "moe_act"], False, 1.0, True),
    (_PREPROCESS, _ALL, True, 1.0, True),
    (_ROUTER, [*_ATTENTION, "expert_fc1"], False, 0.0, True),
    (_ROUTER, [*_ATTENTION, "expert_fc1"], False, 0.5, True),
    (_ROUTER, [*_ATTENTION, "expert_fc1"], False, 1.0, False),
]


@pytest.mark.parametrize("row", OUTSIDE)
def test_modules_outside_the_captures_are_offloaded(row: str, ranks_of: Callable[[int], GpuRanks]) -> None:
    shape, *job = OUTSIDE[row]
    ranks_of(1).run(_check, *job, False, shape=shape)


@pytest.mark.parametrize("row", INSIDE)
def test_captured_modules_are_offloaded(row: str, ranks_of: Callable[[int], GpuRanks]) -> None:
    shape, *job = INSIDE[row]
    ranks_of(shape.num_ranks).run(_check, *job, True, shape=shape)


@needs_mamba
@pytest.mark.parametrize("row", WITH_MAMBA)
def test_captured_mamba_layers_are_offloaded(row: str, ranks_of: Callable[[int], GpuRanks]) -> None:
    ranks_of(1).run(_check, *WITH_MAMBA[row], HYBRID, True)


@pytest.mark.parametrize(("scopes", "names", "has_latents", "fraction", "is_delayed"), UPSTREAM)
def test_recipes_beside_graphs(
    scopes: list[str],
    names: list[str],
    has_latents: bool,
    fraction: float,
    is_delayed: bool,
    ranks_of: Callable[[int], GpuRanks],
) -> None:
    recipe = {
        **{"fine_grained_activation_offloading": True, "offload_modules": names, "min_offloaded_tensor_size": 1024},
        **{"activation_offload_fraction": fraction, "delay_offload_until_cuda_graph": is_delayed},
    }
    ranks_of(1).run(_check_recipe, scopes, recipe, LATENT if has_latents else {})


def _check_recipe(scopes: Sequence[str], settings: dict[str, Any], model: dict[str, Any]) -> None:
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as incumbent

    from megatron_patches import apply
    from offload_engine import OffloadConfig

    with deterministic_algorithms(warn_only=True):
        interface = incumbent.FineGrainedActivationOffloadingInterface
        interface.reset_instance()
        # That of 0 ends in an assertion of its own where a step has several microbatches.
        theirs = _train(scopes, {**model, **settings}) if settings["activation_offload_fraction"] else None
        interface.reset_instance()
        expected = run_twice(lambda: _train(scopes, model), lambda a, b: a.bits == b.bits)
        with apply(OffloadConfig(), replace_fine_grained=True) as handle:
            got = _train(scopes, {**model, **settings}, handle)
    check_bits(expected.bits, got.bits)
    others = [expected] if theirs is None else [expected, theirs]
    peaks = [(one.held_bytes, one.peak_bytes) for one in (got, *others)]
    assert all(got.held_bytes + got.peak_bytes <= other.held_bytes + other.peak_bytes for other in others), peaks


def _check(scopes: Sequence[str], names: Sequence[str], settings: dict[str, Any], is_inside: bool) -> None:
    from megatron_patches import apply

    with deterministic_algorithms(warn_only=True):
        expected = run_twice(lambda: _train(scopes, settings), lambda a, b: a.bits == b.bits)
        with apply(RELEASED_AT_ONCE, modules=names) as handle:
            got = _train(scopes, settings, handle)
    assert got.is_inside == is_inside
    check_bits(expected.bits, got.bits)
    if is_inside:
        fallen, left = expected.held_bytes - got.held_bytes, got.copied_bytes - got.slot_bytes
        assert left > 0
        assert fallen > (0 if torch.distributed.get_world_size() > 1 else LEAST_FALL * left), (fallen, left)


class _Trained(NamedTuple):
    bits: list[dict[str, str]]
    held_bytes: int = 0
    """The peak of what was allocated in the captures, above what was there before; see `_peak_of_captures`."""
    is_inside: bool = False
    """Captured modules are offloaded."""
    copied_bytes: int = 0
    """That captured modules save in a pass."""
    slot_bytes: int = 0
    peak_bytes: int = 0
    """The most that was allocated in the last step, above what was there when it began.

    Not what is reserved: a segment of the allocator holds ten of these tensors, and how many there are depends on what
    was there before. Memory of the graphs' pool does not count here, as no tensor has it between replays.
    """


def _train(scopes: Sequence[str], settings: dict[str, Any], handle: Handle | None = None) -> _Trained:
    """As megatron-core's own training loop: steps without graphs, the capture, and steps that replay."""
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
    from megatron.core.transformer.module import Float16Module

    from tests.dist.tiny import fingerprint
    from tests.gpu.small_gpt import MICRO_BATCH, SEQUENCE, make_chunks, make_config, run

    config = make_config(
        cuda_graph_impl="transformer_engine",
        cuda_graph_scope=list(scopes),
        cuda_graph_warmup_steps=NUM_WARMUP_STEPS,
        **{**SIZES, **EXPERTS, **settings},
    )
    data_parallel = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    bare = make_chunks(config)
    # On a stream of its own, where the nodes that accumulate gradients stay: none can run on the default one while
    # something is captured.
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
        chunks = [DistributedDataParallel(config, data_parallel, Float16Module(config, chunk)) for chunk in bare]
        torch.cuda.synchronize()
    calculator.init_num_microbatches_calculator(0, None, NUM_MICROBATCHES * MICRO_BATCH, MICRO_BATCH, 1)
    graphs = TECudaGraphHelper(chunks, config, SEQUENCE, MICRO_BATCH)
    steps: list[dict[str, str]] = []
    found = _Trained(steps)
    before = 0
    try:
        for step in range(NUM_STEPS):
            if step == NUM_WARMUP_STEPS:
                with _peak_of_captures() as peak:
                    graphs.create_cudagraphs()
                found = found._replace(held_bytes=peak())
                assert all(layer.cuda_graphs for layer in graphs.flattened_callables), "nothing was captured"
            if step == NUM_STEPS - 1:
                gc.collect()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            steps.append(fingerprint(chunks, run(chunks, NUM_MICROBATCHES)))
            assert handle is None or (handle.stats is not None and handle.stats.num_storages_left == 0)
        found = found._replace(peak_bytes=torch.cuda.max_memory_allocated() - before)
        if handle is not None and handle.engine is not None:
            for layers in handle.engine.graphs.layers:
                assert not unordered(layers, edges_of(layers))
                found = found._replace(
                    is_inside=True, copied_bytes=layers.copied_out_bytes, slot_bytes=layers.slot_bytes
                )
    finally:
        if graphs.graphs_created():
            graphs.delete_cuda_graphs()
        calculator.unset_num_microbatches_calculator()
    return found


@contextmanager
def _peak_of_captures() -> Iterator[Callable[[], int]]:
    """Yield what returns how many bytes were allocated at the most in captures, above what was before the first.

    Not what is reserved: these tensors are so small that a segment of the allocator holds ten of them, and whether one
    segment more or less is there depends on what the tests before have left.
    """
    found: list[int] = []

    class NotingGraph(torch.cuda.CUDAGraph):
        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            if not found:
                found.append(torch.cuda.memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            super().capture_begin(*args, **kwargs)

        def capture_end(self) -> None:
            super().capture_end()
            found.append(torch.cuda.max_memory_allocated())

    with mock.patch.object(torch.cuda, "CUDAGraph", NotingGraph):
        yield lambda: max(found) - found[0]
