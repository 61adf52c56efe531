# SPDX-License-Identifier: Apache-2.0
"""Inputs of stages, layers and recomputation leave, although megatron-core holds them: the same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_patches import Handle, apply
from offload_engine import ChunkOffloadHandler, FixedBounds
from offload_engine.schedule import backward_at_once
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.models import LATENT
from tests.dist.parity import Case, actions, run_ordered, run_with, run_without
from tests.dist.settings import GROUPED, SHARED, full, selective
from tests.dist.tiny import (
    ALL,
    HIDDEN,
    MICRO_BATCH,
    SEQUENCE,
    decoder_of,
    forward_step,
    make_chunks,
    make_config,
    run,
    stats_of,
)

# -- storages held outside autograd have no bytes between copy-out and backward ----------------------------------------


@pytest.mark.compat
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

        with _applied(case.names) as handle:
            chunks = make_chunks(make_config(case.kind, **case.settings))
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


@pytest.mark.compat
@on_ranks()
def test_embeddings_without_a_pipeline() -> None:
    """`GPTModel.forward` keeps them in a local variable while it computes the loss, and logs them if it is asked to."""
    for logger, micro_batch in (("", 2), ("", 1), ("somewhere", 2)):

        def some(batches: Iterator[torch.Tensor], model: Any, *more: Any, number: int = micro_batch) -> Any:
            return forward_step((batch[:number] for batch in batches), model, *more)

        with _applied(["attn_norm"]) as handle:
            (chunk,) = chunks = make_chunks(make_config())
            config: Any = chunk.config
            config.config_logger_dir = logger
            chunk.output_layer.register_forward_hook(lambda *_, config=config: setattr(config, "config_logger_dir", ""))
            run(chunks, 1, forward_step=some)
            stats = stats_of(handle)
            assert (stats.num_emptied_storages, stats.num_viewed_storages) == (int(not logger), 0)
            assert stats.copied_in_bytes == stats.copied_out_bytes > 0


def _as_known(hook: Any) -> Any:
    """A hook that looks in spite of everything: of one that is not megatron-core's, tensors would be left alone."""
    hook.__module__ = "megatron.core.tests"
    return hook


@on_ranks()
def test_an_input_of_recomputation_that_other_code_keeps_stays() -> None:
    """Its holders are counted: of what no one knows of, one too many would be taken for a copy of megatron-core's."""
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    are_equal: list[bool] = []

    def keep(module: Any, args: Any) -> None:
        kept.append((args[0].detach(), args[0].detach().clone()))

    with _applied(["attn_norm"]) as handle:
        (chunk,) = make_chunks(make_config(**selective("layernorm")))
        for layer in chunk.decoder.layers:
            layer.input_layernorm.register_forward_pre_hook(_as_known(keep))
        chunk.output_layer.register_forward_pre_hook(lambda *_: are_equal.extend(torch.equal(*pair) for pair in kept))
        run([chunk], 1)
        assert are_equal and all(are_equal) and stats_of(handle).num_offloaded_groups > 0


def _applied(names: Sequence[str]) -> Handle:
    # Released as soon as they are copied: what is empty is so at once.
    return apply(ALL.replace(policy=FixedBounds(max_inflight_bytes=0)), modules=names)


# -- what selective recomputation starts from leaves, each by its name -------------------------------------------------

TOKENS = SEQUENCE * MICRO_BATCH
INPUT = TOKENS * HIDDEN * 4  # bytes of a hidden activation
ROUTED = 2 * TOKENS  # to two experts each
LATENTS = TOKENS * 4 * (16 + (8 + 8) + 8) + SEQUENCE * 8 * 4  # of queries, of keys with their position, normed; rotary

# Name, what is recomputed, the model, groups that leave in two microbatches, and bytes of each.
INPUTS: list[tuple[str, str, str, dict[str, Any], int, int]] = [
    ("attn_norm", "layernorm", "mixed", {}, 6, INPUT),
    ("layer_input", "layernorm", "mixed", {}, 6, INPUT),
    ("mlp_norm", "layernorm", "mixed", {}, 6, INPUT),
    ("mlp_fc1", "mlp", "mixed", {}, 2, INPUT),
    ("router", "moe", "moe", SHARED, 6, INPUT),
    ("shared_fc1", "shared_experts", "moe", SHARED, 6, INPUT),
    ("shared_experts", "shared_experts", "moe", SHARED, 6, INPUT),
    ("moe_act", "moe_act", "moe", GROUPED, 6, ROUTED * (HIDDEN + 1) * 4),
    ("mla_up_proj", "mla_up_proj", "dense", LATENT, 6, LATENTS),
]


@pytest.mark.compat
@on_ranks()
def test_it_leaves() -> None:
    for name, module, kind, model, num, nbytes in INPUTS:
        case = Case(kind, [name], settings=selective(module, **model))
        (stats,) = run_ordered(case, [2])
        assert (stats.num_offloaded_groups, stats.copied_out_bytes) == (num, num * nbytes), name
        assert (stats.copied_in_bytes, stats.prefetch_misses) == (stats.copied_out_bytes, 0), name
        assert stats.num_viewed_storages == 0, name  # or it would not be freed
        assert stats.peak_resident_bytes <= 3 * nbytes < stats.managed_bytes or name == "mlp_fc1", name


@pytest.mark.compat
@on_ranks()
def test_more_than_an_input_leaves() -> None:
    """With queries, keys and values a number stays that the host reads; `qkv_linear` has all projections of latents."""
    mask = SEQUENCE * SEQUENCE
    for kind, name, settings, least, most in (
        ("mixed", "core_attn", selective("core_attn"), 3 * INPUT, 3 * INPUT + mask + 4),
        ("dense", "qkv_linear", selective("mla_up_proj", **LATENT), LATENTS + INPUT - 1, 2 * (LATENTS + INPUT)),
    ):
        case = Case(kind, [name], settings=settings)
        (stats,) = run_with(case, [2], run_without(case, [2]))
        assert 6 * least < stats.copied_out_bytes == stats.copied_in_bytes <= 6 * most, name
        assert stats.num_viewed_storages == 0


@pytest.mark.compat
@on_ranks()
def test_discarded_tensors_are_never_copied() -> None:
    """The bits do not tell: what was copied of it is not what its backward reads."""
    discarding = (
        ("core_attn", "mixed", selective("mla_up_proj", **LATENT)),
        ("experts", "moe", selective("layernorm")),
    )
    for name, kind, settings in discarding:
        (stats,) = run_ordered(Case(kind, [name], settings=settings), [2])
        assert stats.copied_out_bytes > 0


@on_ranks()
def test_the_input_is_needed_when_the_recomputation_begins() -> None:
    """That is before the rest of the layer, whose groups would otherwise be copied in all at once."""
    order: list[str] = []
    begin = ChunkOffloadHandler.on_group_commit_backward

    def note(chunk: ChunkOffloadHandler, group: Any = None) -> None:
        order.append(group.name)
        begin(chunk, group)

    with (
        mock.patch.object(ChunkOffloadHandler, "on_group_commit_backward", note),
        apply(ALL, modules=["attn_norm", "core_attn", "attn_proj"]),
    ):
        run(make_chunks(make_config("mixed", **selective("layernorm"))), 1)
    assert order == 4 * ["attn_norm", "attn_proj", "core_attn"]
