# SPDX-License-Identifier: Apache-2.0
"""Storages that megatron-core holds outside autograd have no bytes between copy-out and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron_patches import Handle, apply
from megatron_patches._rows.runtime import unwrap
from offload_engine import FixedBounds, IterationStats, OffloadConfig
from tests.dist.launch import Pipeline, on_ranks, run_ranks
from tests.dist.models import LATENT
from tests.dist.parity import SAVES_COPIES, Case, actions, run_with, run_without
from tests.dist.tiny import NUM_LAYERS, forward_step, make_chunks, make_config, run

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.mark.parametrize("shape", [Pipeline(2), Pipeline(2, 2)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case("dense", ["attn_norm"]),
        Case("moe", ["attn_norm", "core_attn"]),
        Case("dense", ["layer_input"], settings=FULL),
    ],
    ids=["dense", "moe", "recomputed"],
)
@on_ranks()
def test_stage_inputs(shape: Pipeline, case: Case) -> None:
    """The schedule keeps them in `input_tensors` until the backward of their chunk."""
    num_microbatches = 6
    inputs: list[torch.Tensor] = []
    sizes: list[int] = []

    def step(batches: Iterator[torch.Tensor], model: torch.nn.Module, *more: Any) -> Any:
        result = forward_step(batches, model, *more)
        decoder = unwrap(model).decoder
        if not decoder.pre_process:
            inputs.append(decoder.input_tensor)  # the same tensor object that the schedule keeps
            sizes.append(decoder.input_tensor.untyped_storage().nbytes())
        return result

    with _applied() as handle:
        chunks = make_chunks(_config(case))
        run(chunks, num_microbatches, forward_step=step)
        stats = _stats(handle)
        # Kept is the last group of a chunk whose backward comes at once: the first layer's, where there is one only.
        kept = _at_once(case, num_microbatches) if len(unwrap(chunks[0]).decoder.layers) == 1 else frozenset()
        assert stats.num_viewed_storages == 0
        assert stats.num_emptied_storages == num_microbatches * len(chunks) - len(kept)
        assert sum(size > 0 for size in sizes) == len(kept)
        assert bool(inputs) == any(not unwrap(chunk).decoder.pre_process for chunk in chunks)
        assert all(x.grad is not None and x.untyped_storage().nbytes() > 0 for x in inputs)
    assert all(torch.isfinite(x).all() for x in inputs)


def test_embeddings_without_a_pipeline() -> None:
    """`GPTModel.forward` keeps them in a local variable while it computes the loss."""
    run_ranks(_check_embeddings, {}, True)
    run_ranks(_check_embeddings, {}, True, 1)


def test_embeddings_that_are_read_again_stay() -> None:
    run_ranks(_check_embeddings, {"config_logger_dir": "somewhere"}, False)


def _check_embeddings(settings: dict[str, Any], is_emptied: bool, micro_batch: int = 2) -> None:
    storages: list[torch.UntypedStorage] = []
    sizes: list[int] = []

    def enter_decoder(module: Any, args: Any, kwargs: Any) -> None:
        storages.append(kwargs["hidden_states"].untyped_storage())

    def note_size(module: Any, args: Any) -> None:
        sizes.append(storages[-1].nbytes())

    def step(batches: Iterator[torch.Tensor], model: torch.nn.Module, *more: Any) -> Any:
        return forward_step((batch[:micro_batch] for batch in batches), model, *more)

    with _applied() as handle:
        (chunk,) = make_chunks(_config(Case("dense", ["attn_norm"])))
        chunk.decoder.register_forward_pre_hook(_as_known(enter_decoder), with_kwargs=True)
        chunk.decoder.layers[1].register_forward_pre_hook(_as_known(note_size))
        chunk.output_layer.register_forward_pre_hook(note_size)
        chunk.config.config_logger_dir = settings.get("config_logger_dir", "")
        chunk.output_layer.register_forward_hook(lambda *_: setattr(chunk.config, "config_logger_dir", ""))
        run([chunk], 1, forward_step=step)
        stats = _stats(handle)
        assert (sizes == [0, 0]) == is_emptied and stats.num_viewed_storages == 0
        assert stats.num_emptied_storages == int(is_emptied)
        assert stats.copied_in_bytes == stats.copied_out_bytes > 0


def _as_known(hook: Any) -> Any:
    """A hook that looks in spite of everything: of one that is not megatron-core's, tensors would be left alone."""
    hook.__module__ = "megatron.core.tests"
    return hook


@on_ranks()
def test_held_storage_is_readable_after_an_exception() -> None:
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def enter_decoder(module: Any, args: Any, kwargs: Any) -> None:
        held.append((kwargs["hidden_states"], kwargs["hidden_states"].detach().clone()))

    def enter_loss(module: Any, args: Any) -> None:
        assert held[-1][0].untyped_storage().nbytes() == 0
        raise KeyError("in forward")

    with _applied() as handle:
        (chunk,) = make_chunks(_config(Case("dense", ["attn_norm"])))
        chunk.decoder.register_forward_pre_hook(_as_known(enter_decoder), with_kwargs=True)
        hook = chunk.output_layer.register_forward_pre_hook(enter_loss)
        with pytest.raises(KeyError, match="in forward"):
            run([chunk], 1)
        assert all(torch.equal(tensor.detach(), before) for tensor, before in held)
        hook.remove()
        run([chunk], 2)
        assert _stats(handle).num_emptied_storages == 2


def test_inputs_of_recomputation_are_emptied() -> None:
    """`CheckpointWithoutOutput` saves detached leaves, which the graph keeps; the numbers are those without offload."""
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
    run_ranks(_check_recomputed_from, Case("dense", ["self_attn"], settings={**LATENT, **recompute}))


def test_inputs_of_a_recomputed_mtp_layer_are_emptied() -> None:
    """The layer inside it is a layer like any other: as many storages are emptied for it. (Those of the last stay.)"""
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
    counts = [
        run_ranks(_check_recomputed_from, Case("dense", ["self_attn"], settings={**LATENT, **recompute, **more}))
        for more in ({}, {"mtp_num_layers": 2})
    ]
    (plain,), (ahead,) = counts
    assert ahead == plain + 2 * plain // (NUM_LAYERS - 1)


def test_detached_inputs_of_recomputation_are_emptied() -> None:
    """The part has no bytes, and no writes, of its own: it is no other save than that of the whole."""
    recompute = {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]}
    run_ranks(_check_recomputed_from, Case("dense", ["qk_norm"], settings={**LATENT, **recompute}))


@pytest.mark.skipif(SAVES_COPIES, reason="before 0.20 the graph keeps copies, which are emptied in place")
@on_ranks()
def test_inputs_of_recomputation_are_gone() -> None:
    inputs: list[StorageWeakRef] = []
    left: list[int] = []

    def note(module: Any, args: Any) -> None:
        inputs.append(StorageWeakRef(args[0].untyped_storage()))

    recompute = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    with _applied():
        (chunk,) = make_chunks(_config(Case("dense", ["attn_norm"], settings=recompute)))
        for layer in chunk.decoder.layers:
            layer.input_layernorm.register_forward_pre_hook(_as_known(note))
        chunk.output_layer.register_forward_pre_hook(
            lambda *_: left.append(sum(not storage.expired() for storage in inputs))
        )
        run([chunk], 1)
    assert len(inputs) == 2 * NUM_LAYERS
    assert left == [
        2
    ]  # the first layer's, which the model keeps and which is emptied, and the last layer's, which stays


@on_ranks()
def test_an_input_of_recomputation_that_other_code_keeps_stays() -> None:
    """Its holders are counted: of what no one knows of, one too many would be taken for a copy of megatron-core's."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(module: Any, args: Any) -> None:
        kept.append((args[0].detach(), args[0].detach().clone()))

    recompute = {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    with _applied() as handle:
        (chunk,) = make_chunks(_config(Case("dense", ["attn_norm"], settings=recompute)))
        for layer in chunk.decoder.layers:
            layer.input_layernorm.register_forward_pre_hook(_as_known(keep))
        chunk.output_layer.register_forward_pre_hook(lambda *_: assert_kept(kept))
        run([chunk], 1)
        assert _stats(handle).num_offloaded_groups > 0


def assert_kept(kept: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    assert kept and all(torch.equal(tensor, before) for tensor, before in kept)


def _check_recomputed_from(case: Case) -> int:
    run_with(case, [2], run_without(case, [2]))
    with _applied() as handle:
        chunks = make_chunks(_config(case))
        run(chunks, 2)
        stats = _stats(handle)
        assert stats.num_viewed_storages == 0 and (stats.num_emptied_storages > 0) == SAVES_COPIES
        return stats.num_emptied_storages


def _applied() -> Handle:
    # Released as soon as they are copied: what is empty is so at once.
    return apply(OffloadConfig(min_tensor_bytes=1, directory="none", policy=FixedBounds(max_inflight_bytes=0)))


def _config(case: Case) -> Any:
    return make_config(case.kind, **case.settings, offload_activation=True, offload_modules=list(case.names))


def _stats(handle: Handle) -> IterationStats:
    assert handle.stats is not None
    return handle.stats


def _at_once(case: Case, num_microbatches: int) -> frozenset[Any]:
    from offload_engine.schedule import backward_at_once

    return backward_at_once(actions(case, num_microbatches))
