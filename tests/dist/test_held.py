# SPDX-License-Identifier: Apache-2.0
"""Storages that megatron-core holds outside autograd have no bytes between copy-out and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megatron_patches import Handle, apply
from offload_engine import FixedBounds
from offload_engine.schedule import backward_at_once
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.models import LATENT
from tests.dist.parity import SAVES_COPIES, Case, actions, run_with, run_without
from tests.dist.settings import full, selective
from tests.dist.tiny import ALL, NUM_LAYERS, decoder_of, forward_step, make_chunks, make_config, run, stats_of


@pytest.mark.parametrize("shape", [Pipeline(2), Pipeline(2, 2)], ids=str)
@on_ranks()
def test_stage_inputs(shape: Pipeline) -> None:
    """The schedule keeps them in `input_tensors` until the backward of their chunk."""
    num_microbatches = 6
    for case in (Case("moe", ["attn_norm", "core_attn"]), Case("dense", ["layer_input"], settings=full())):
        seen: list[tuple[torch.Tensor, int]] = []

        def looking(batches: Any, model: Any, *more: Any, seen: list[tuple[torch.Tensor, int]] = seen) -> Any:
            result = forward_step(batches, model, *more)
            decoder = decoder_of(model)
            if not decoder.pre_process:  # the same tensor object that the schedule keeps
                seen.append((decoder.input_tensor, decoder.input_tensor.untyped_storage().nbytes()))
            return result

        with _applied() as handle:
            chunks = make_chunks(_config(case))
            run(chunks, num_microbatches, forward_step=looking)
            stats = stats_of(handle)
            # Kept is the last group of a chunk whose backward comes at once: the first layer's, if there is only one.
            has_one_layer = len(decoder_of(chunks[0]).layers) == 1
            num_kept = len(backward_at_once(actions(case, num_microbatches))) if has_one_layer else 0
            assert stats.num_viewed_storages == 0
            assert stats.num_emptied_storages == num_microbatches * len(chunks) - num_kept
            assert sum(size > 0 for _, size in seen) == num_kept
            assert bool(seen) == any(not decoder_of(chunk).pre_process for chunk in chunks)
            assert all(x.grad is not None and x.untyped_storage().nbytes() > 0 for x, _ in seen)
        assert all(torch.isfinite(x).all() for x, _ in seen)


@pytest.mark.parametrize(
    ("logger", "micro_batch"),
    [
        pytest.param("", 2, id="emptied"),
        pytest.param("", 1, id="emptied, of one sequence"),
        pytest.param("somewhere", 2, id="read again: they stay"),
    ],
)
@on_ranks()
def test_embeddings_without_a_pipeline(logger: str, micro_batch: int) -> None:
    """`GPTModel.forward` keeps them in a local variable while it computes the loss, and logs them if it is asked to."""
    storages: list[torch.UntypedStorage] = []
    sizes: list[int] = []

    def enter_decoder(module: Any, args: Any, kwargs: Any) -> None:
        storages.append(kwargs["hidden_states"].untyped_storage())

    def note_size(module: Any, args: Any) -> None:
        sizes.append(storages[-1].nbytes())

    def some(batches: Iterator[torch.Tensor], model: torch.nn.Module, *more: Any) -> Any:
        return forward_step((batch[:micro_batch] for batch in batches), model, *more)

    with _applied() as handle:
        (chunk,) = _chunks(["attn_norm"])
        chunk.decoder.register_forward_pre_hook(_as_known(enter_decoder), with_kwargs=True)
        chunk.decoder.layers[1].register_forward_pre_hook(_as_known(note_size))
        chunk.output_layer.register_forward_pre_hook(note_size)
        chunk.config.config_logger_dir = logger
        chunk.output_layer.register_forward_hook(lambda *_: setattr(chunk.config, "config_logger_dir", ""))
        run([chunk], 1, forward_step=some)
        stats = stats_of(handle)
        assert (sizes == [0, 0]) == (not logger) and stats.num_viewed_storages == 0
        assert stats.num_emptied_storages == int(not logger)
        assert stats.copied_in_bytes == stats.copied_out_bytes > 0


def _as_known(hook: Any) -> Any:
    """A hook that looks in spite of everything: of one that is not megatron-core's, tensors would be left alone."""
    hook.__module__ = "megatron.core.tests"
    return hook


@on_ranks()
def test_inputs_of_recomputation_are_emptied() -> None:
    """`CheckpointWithoutOutput` saves detached leaves, which the graph keeps; the numbers are those without offload.

    The layer inside an MTP layer is a layer like any other: as many storages are emptied for it. (Those of the last
    stay.) A part of detached inputs has no bytes, and no writes, of its own: it is no other save than the whole.
    """
    settings = selective("mla_up_proj", **LATENT)
    counts = []
    for name, more in (("self_attn", {}), ("self_attn", {"mtp_num_layers": 2}), ("qk_norm", {})):
        case = Case("dense", [name], settings={**settings, **more})
        run_with(case, [2], run_without(case, [2]))
        with _applied() as handle:
            chunks = make_chunks(_config(case))
            run(chunks, 2)
            stats = stats_of(handle)
            assert stats.num_viewed_storages == 0 and (stats.num_emptied_storages > 0) == SAVES_COPIES
            counts.append(stats.num_emptied_storages)
    assert counts[1] == counts[0] + 2 * counts[0] // (NUM_LAYERS - 1)


@on_ranks()
def test_an_input_of_recomputation_that_other_code_keeps_stays() -> None:
    """Its holders are counted: of what no one knows of, one too many would be taken for a copy of megatron-core's."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    are_equal: list[bool] = []

    def keep(module: Any, args: Any) -> None:
        kept.append((args[0].detach(), args[0].detach().clone()))

    with _applied() as handle:
        (chunk,) = _chunks(["attn_norm"], selective("layernorm"))
        for layer in chunk.decoder.layers:
            layer.input_layernorm.register_forward_pre_hook(_as_known(keep))
        chunk.output_layer.register_forward_pre_hook(lambda *_: are_equal.extend(torch.equal(*pair) for pair in kept))
        run([chunk], 1)
        assert are_equal and all(are_equal) and stats_of(handle).num_offloaded_groups > 0


def _applied() -> Handle:
    # Released as soon as they are copied: what is empty is so at once.
    return apply(ALL.replace(policy=FixedBounds(max_inflight_bytes=0)))


def _chunks(names: list[str], settings: dict[str, Any] = {}) -> list[Any]:  # noqa: B006
    return make_chunks(_config(Case("dense", names, settings=settings)))


def _config(case: Case) -> Any:
    return make_config(case.kind, **case.settings, offload_activation=True, offload_modules=list(case.names))
