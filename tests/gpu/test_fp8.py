# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's modules in FP8, on a real GPU: the same bits, quantized bytes move, weights do not."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch

from offload_engine import ChunkOffloadHandler, OffloadConfig, OffloadEngine, group_commit
from tests.checkpointed import all_equal
from tests.gpu.parity import run_twice
from tests.lookups import import_or_skip

HIDDEN, TOKENS = 256, 512
BYTE_DTYPES = {torch.uint8, torch.int8}

te = import_or_skip("transformer_engine.pytorch")
recipes = import_or_skip("transformer_engine.common.recipe")

RECIPES = ("Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling")
MODULES: dict[str, Callable[..., Any]] = {
    "Linear": lambda **more: te.Linear(HIDDEN, HIDDEN, bias=False, **more),
    "LayerNormLinear": lambda **more: te.LayerNormLinear(HIDDEN, HIDDEN, bias=False, **more),
    "LayerNormMLP": lambda **more: te.LayerNormMLP(HIDDEN, 2 * HIDDEN, bias=False, **more),
}


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=4096))
    yield engine
    engine.close()


def _recipe(name: str) -> Any:
    if not hasattr(recipes, name):
        pytest.skip(f"this TransformerEngine has no {name}")
    is_there = te.is_fp8_block_scaling_available if "Block" in name else te.is_fp8_available
    is_available, why = is_there(return_reason=True)
    if not is_available:
        pytest.skip(f"{name}: {why}")
    return getattr(recipes, name)()


def _autocast(recipe: Any) -> AbstractContextManager[None]:
    if hasattr(te, "autocast"):
        return te.autocast(enabled=True, recipe=recipe)
    return te.fp8_autocast(enabled=True, fp8_recipe=recipe)


def _layers(make: Callable[..., Any], **more: Any) -> torch.nn.ModuleList:
    torch.manual_seed(1)
    return torch.nn.ModuleList(make(params_dtype=torch.bfloat16, **more) for _ in range(3)).cuda()


def _step(layers: torch.nn.ModuleList, recipe: Any, engine: OffloadEngine | None) -> list[torch.Tensor]:
    """Two microbatches, the weights quantized in the first only; gradients of inputs, then of weights."""
    generator = torch.Generator(device="cuda").manual_seed(2)
    inputs = []
    for microbatch in range(2):
        chunk = engine.start_chunk() if engine is not None else None
        hidden = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()
        inputs.append(hidden)
        with _autocast(recipe):
            for layer in layers:
                hidden = _call(layer, hidden, microbatch == 0, chunk)
        hidden.float().square().mean().backward()
    grads = [tensor.grad for tensor in inputs]
    for parameter in layers.parameters():  # beside a fused gradient, `grad` is uninitialized memory
        grads.append(getattr(parameter, "main_grad", parameter.grad))
    return [grad.clone() for grad in grads if grad is not None]  # a later step adds to them in place


def _call(layer: Any, hidden: torch.Tensor, is_first: bool, chunk: ChunkOffloadHandler | None) -> torch.Tensor:
    if chunk is None:
        return layer(hidden, is_first_microbatch=is_first)
    chunk.open_group(type(layer).__name__)
    with chunk.saved_tensors_hooks():
        output = layer(hidden, is_first_microbatch=is_first)
    return group_commit(output, chunk)


@contextlib.contextmanager
def _copied_out(engine: OffloadEngine) -> Iterator[list[tuple[torch.dtype, int]]]:
    """Yield types and addresses of what is copied out."""
    sources: list[tuple[torch.dtype, int]] = []
    issue: Any = engine.device.copy_out

    def note(stream: Any, copies: Any) -> Any:
        sources.extend((source.dtype, source.untyped_storage().data_ptr()) for source, _ in copies)
        return issue(stream, copies)

    with mock.patch.object(engine.device, "copy_out", note):
        yield sources


def _workspaces(layers: torch.nn.ModuleList) -> list[Any]:
    return [copy for layer in layers.modules() for copy in getattr(layer, "_fp8_workspaces", {}).values()]


def _parts(tensor: Any) -> list[torch.Tensor]:
    if not hasattr(tensor, "get_data_tensors"):
        return [tensor]
    return [part for part in tensor.get_data_tensors() if part is not None]


def _compare(make: Callable[..., Any], recipe: Any, engine: OffloadEngine, prepare: Any = None, **more: Any) -> Any:
    """Compare a step with offload and without; return the layers of the first, and the types of what moved."""

    def prepared() -> torch.nn.ModuleList:
        layers = _layers(make, **more)
        if prepare is not None:
            prepare(layers)
        return layers

    plain = run_twice(lambda: _step(prepared(), recipe, None), all_equal)
    layers = prepared()
    with engine.iteration(weights=list(layers.parameters())), _copied_out(engine) as first:
        moved = _step(layers, recipe, engine)
    assert _workspaces(layers), "the weights were quantized once and kept"
    # In a second step weights and their copies are where they were: no activation can have had their addresses.
    with engine.iteration(weights=list(layers.parameters())), _copied_out(engine) as second:
        _step(layers, recipe, engine)
    weights = [part for tensor in (*layers.parameters(), *_workspaces(layers)) for part in _parts(tensor)]
    assert not {part.untyped_storage().data_ptr() for part in weights} & {address for _, address in second}
    assert plain and all_equal(plain, moved)
    stats = engine.stats
    assert stats.copied_out_bytes > 0 and stats.copied_in_bytes > 0 and stats.num_storages_left == 0
    return layers, {dtype for dtype, _ in first}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("name", RECIPES)
def test_bitwise_equal(name: str, module: str, engine: OffloadEngine) -> None:
    _, moved = _compare(MODULES[module], _recipe(name), engine)
    assert moved & BYTE_DTYPES


@pytest.mark.parametrize("name", RECIPES)
def test_fused_weight_gradients(name: str, engine: OffloadEngine) -> None:
    """They are added to `main_grad` of the same parameter object, which says so."""

    def prepare(layers: torch.nn.ModuleList) -> None:
        parameter: Any
        for parameter in layers.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False

    layers, moved = _compare(MODULES["Linear"], _recipe(name), engine, prepare, fuse_wgrad_accumulation=True)
    assert moved & BYTE_DTYPES
    assert all(p.grad_added_to_main_grad and p.main_grad.any() for p in layers.parameters())


@pytest.mark.parametrize("name", RECIPES)
def test_weights_in_fp8(name: str, engine: OffloadEngine) -> None:
    recipe = _recipe(name)
    init = getattr(te, "quantized_model_init", None) or te.fp8_model_init
    results = []
    for offload in (None, engine):
        with init(enabled=True, recipe=recipe):
            layers = _layers(MODULES["Linear"])
        if offload is None:
            results.append(_step(layers, recipe, None))
        else:
            with offload.iteration(weights=list(layers.parameters())):
                results.append(_step(layers, recipe, offload))
    assert all_equal(*results)
    assert engine.stats.copied_out_bytes > 0
