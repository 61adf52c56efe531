# SPDX-License-Identifier: Apache-2.0
"""Inputs of stages, layers and recomputation leave, although megatron-core holds them: the same bits.

Among the cases are those of megatron-core's own test of its offload, as recipes that are taken over.
"""

from __future__ import annotations

import copy
import logging
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core.transformer.identity_op import IdentityOp

from megatron_patches import Handle, apply
from megatron_patches._model.candidates import find_among, find_candidates
from megatron_patches._versions import installed_version, is_in_range
from offload_engine import ChunkOffloadHandler, FixedBounds, OffloadConfig
from offload_engine.schedule import backward_at_once
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.models import LATENT
from tests.dist.parity import SAVES_COPIES, Case, actions, run_ordered, run_with, run_without
from tests.dist.settings import GROUPED, OVERLAP, SHARED, full, selective
from tests.dist.tiny import (
    ALL,
    HIDDEN,
    MICRO_BATCH,
    NUM_LAYERS,
    SEQUENCE,
    decoder_of,
    forward_step,
    make_chunks,
    make_config,
    messages,
    run,
    stats_of,
    step,
)

# -- storages held outside autograd have no bytes between copy-out and backward ----------------------------------------


@pytest.mark.parametrize("shape", [Pipeline(2), Pipeline(2, 2)], ids=str)
@pytest.mark.compat
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


@pytest.mark.parametrize(("logger", "micro_batch"), [("", 2), ("", 1), ("it reads them again", 2)])
@pytest.mark.compat
@on_ranks()
def test_embeddings_without_a_pipeline(logger: str, micro_batch: int) -> None:
    """`GPTModel.forward` keeps them in a local variable while it computes the loss, and logs them if it is asked to."""
    storages, sizes = list[torch.UntypedStorage](), list[int]()

    def enter_decoder(module: Any, args: Any, kwargs: Any) -> None:
        storages.append(kwargs["hidden_states"].untyped_storage())

    def note_size(*_: Any) -> None:
        sizes.append(storages[-1].nbytes())

    with _applied() as handle:
        (chunk,) = _chunks(["attn_norm"])
        chunk.decoder.register_forward_pre_hook(_as_known(enter_decoder), with_kwargs=True)
        for module in (chunk.decoder.layers[1], chunk.output_layer):
            module.register_forward_pre_hook(_as_known(note_size))
        chunk.config.config_logger_dir = logger
        chunk.output_layer.register_forward_hook(lambda *_: setattr(chunk.config, "config_logger_dir", ""))
        batch = torch.zeros(micro_batch, SEQUENCE, dtype=torch.int64)
        run([chunk], 1, make_batches=lambda _: iter([batch]))
        stats = stats_of(handle)
        assert (sizes == [0, 0]) == (not logger) and stats.num_viewed_storages == 0
        assert stats.num_emptied_storages == int(not logger)
        assert stats.copied_in_bytes == stats.copied_out_bytes > 0


def _as_known(hook: Any) -> Any:
    """A hook that looks in spite of everything: of one that is not megatron-core's, tensors would be left alone."""
    hook.__module__ = "megatron.core.tests"
    return hook


@on_ranks()
def test_an_input_of_recomputation_that_other_code_keeps_stays() -> None:
    """Its holders are counted: of what no one knows of, one too many would be taken for a copy of megatron-core's."""
    kept, are_equal = list[tuple[torch.Tensor, torch.Tensor]](), list[bool]()

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
        (stats,) = run_ordered(Case(kind, [name], settings=selective(module, **model)), [2])
        assert (stats.num_offloaded_groups, stats.copied_out_bytes) == (num, num * nbytes), name
        assert (stats.copied_in_bytes, stats.prefetch_misses) == (stats.copied_out_bytes, 0), name
        assert stats.num_viewed_storages == 0, name  # or it would not be freed
        assert stats.peak_resident_bytes <= 3 * nbytes < stats.managed_bytes or name == "mlp_fc1", name
    for name, module, kind, model, least, most in (
        # With queries, keys and values leave a mask, and a number that the host reads: on a GPU that is on no device.
        ("core_attn", "core_attn", "mixed", {}, 3 * INPUT + 1, 3 * INPUT + SEQUENCE**2 + 4),
        # All projections: the input of those to the latents, and what the recomputed ones start from.
        ("qkv_linear", "mla_up_proj", "dense", LATENT, LATENTS + INPUT, 99 * INPUT),
    ):
        case = Case(kind, [name], settings=selective(module, **model))
        (stats,) = run_with(case, [2], run_without(case, [2]))
        assert 6 * least <= stats.copied_in_bytes == stats.copied_out_bytes <= 6 * most, name
        assert stats.num_viewed_storages == 0, name


def _cases(of_latents: list[str], of_experts: list[str]) -> list[tuple[bool, bool, list[str]]]:
    """List cases of models with experts, whose attention has latents or not."""
    rows = [(True, names) for names in of_latents] + [(False, names) for names in of_experts]
    return [(True, has_latents, names.split()) for has_latents, names in rows]


OWN_NORM = "attn_norm core_attn attn_proj mlp_norm expert_fc1 moe_act"
# What megatron-core's own test offloads, with norms and, in models with experts, the activation recomputed: whether the
# model has experts, whether its attention has latents, and the names; alone, and under the overlap.
UPSTREAM = [
    (False, True, ["attn_norm"]),
    *_cases(["core_attn attn_proj"], ["qkv_linear", "core_attn", "mlp_norm", "expert_fc1", "moe_act"]),
]
UPSTREAM_OVERLAP = _cases(
    ["attn_norm", "core_attn", "attn_norm core_attn attn_proj", "mlp_norm", OWN_NORM],
    ["expert_fc1", "moe_act", "mlp_norm expert_fc1 moe_act", OWN_NORM],
)
ALONE_OR_NOT = [pytest.param(Pipeline(), id="alone", marks=pytest.mark.compat), Pipeline(expert=2)]


@pytest.mark.parametrize("shape", ALONE_OR_NOT)
@on_ranks()
def test_megatron_cores_own_cases(shape: Pipeline) -> None:
    overlap = {} if shape == Pipeline() else OVERLAP
    references: dict[tuple[bool, bool], dict[str, str]] = {}
    for has_experts, has_latents, names in UPSTREAM if shape == Pipeline() else UPSTREAM_OVERLAP:
        model = has_experts, has_latents
        kind, dtype = "moe" if has_experts else "dense", torch.bfloat16 if overlap else torch.float32
        settings = {**overlap, **selective(*(["layernorm", "moe_act"] if has_experts else ["layernorm"]))}
        settings.update({**(LATENT if has_latents else {}), **(GROUPED if has_experts else {})})
        recipe = {"fine_grained_activation_offloading": True, "offload_modules": names, "min_offloaded_tensor_size": 1}
        change = None if has_latents else _with_the_norm_inside
        if model not in references:
            chunks = make_chunks(make_config(kind, dtype, **settings), change=change)
            references[model] = step(chunks, 2)
        with apply(OffloadConfig(directory="none"), replace_fine_grained=True, has_report=False) as handle:
            chunks = make_chunks(make_config(kind, dtype, **settings, **recipe), change=change)
            assert step(chunks, 2) == references[model], names
            stats = stats_of(handle)
        assert 0 < stats.copied_out_bytes == stats.copied_in_bytes, names
        assert stats.num_viewed_storages == 0, names
        assert stats.copied_out_bytes + stats.kept_bytes == stats.managed_bytes, names
        if SAVES_COPIES and {*names} <= {"attn_norm", "mlp_norm", "moe_act"}:  # these are kept, until they are emptied
            assert stats.num_emptied_storages >= stats.num_offloaded_groups, names


def _with_the_norm_inside(chunk: Any) -> None:
    """As with TransformerEngine, whose projection of query, key and value has it."""
    for layer in chunk.decoder.layers:
        layer.input_layernorm, layer.recompute_input_layernorm = IdentityOp(), False


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


# -- recipes with megatron-core's own offload, unchanged but for one setting -------------------------------------------

OF_RECIPE = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"]
RECIPE: dict[str, Any] = {"fine_grained_activation_offloading": True, "min_offloaded_tensor_size": 1}
FROM_19 = pytest.mark.skipif(
    not is_in_range(installed_version(), ">=0.19"), reason="these settings came with 0.19: runs with 0.19.2"
)


@pytest.mark.parametrize("recompute", [{}, selective("layernorm", "core_attn")])
@pytest.mark.compat
@on_ranks(Pipeline(2, 2))
def test_names(recompute: dict[str, Any]) -> None:
    """A name with nothing to move is no error, as in megatron-core, but the log says so."""
    moved, said = _take_over({**RECIPE, "offload_modules": OF_RECIPE, **recompute})
    assert moved[0]
    if torch.distributed.get_rank() == 0:
        assert ("'qkv_linear' is left out" in said) == bool(recompute)


@pytest.mark.compat
@on_ranks()
def test_names_that_a_graph_captures_stay_unless_a_budget_chooses() -> None:
    names, config = ("core_attn", "mlp_fc1"), make_config()
    chunks, captures = make_chunks(config), copy.copy(config)
    setting = "cuda_graph_modules" if hasattr(config, "cuda_graph_modules") else "cuda_graph_scope"
    captures.cuda_graph_impl = "transformer_engine"
    setattr(captures, setting, ["attn"])
    assert find_among(captures, chunks, names, has_budget=False) == (names, {})
    found, left_out = find_among(captures, chunks, names, has_budget=True)
    assert found == ("mlp_fc1",) and "captures 'core_attn'" in left_out["core_attn"]
    found, left_out = find_among(config, chunks, ("core_attn", "router"), has_budget=False)
    assert found == ("core_attn",) and left_out["router"] == "this rank has no such module"
    for has_budget in (False, True):
        all_names, _ = find_candidates(captures, chunks, has_budget)
        assert "mlp_fc1" in all_names and ("core_attn" in all_names) is not has_budget


@FROM_19
@pytest.mark.compat
@on_ranks(Pipeline(2, 2))
def test_a_fraction_bytes_by_rank_and_no_copy_in_flight() -> None:
    recipe = {**RECIPE, "offload_modules": OF_RECIPE}
    first, second = _take_over({**recipe, "activation_offload_fraction": 0.5})[0]
    assert 0.25 * first < second < 0.75 * first  # the first shows how much there is
    first, second = _take_over({**recipe, "delta_offload_bytes_across_pp_ranks": 20_000})[0]
    assert second == first if torch.distributed.get_rank() == 0 else 0 < second < first
    assert _take_over({**recipe, "fine_grained_offloading_max_inflight_offloads": 0})[0][0]


@pytest.mark.compat
@on_ranks()
def test_layers_of_transformer_engines_offload() -> None:
    shares = []
    for number in (1, 2, NUM_LAYERS - 1):
        moved, _ = _take_over({"cpu_offloading": True, "cpu_offloading_num_layers": number})
        shares.append(moved[0])
    assert 0 < shares[0] < shares[1] < shares[2]


@pytest.mark.compat
@on_ranks()
def test_nothing_to_take_over() -> None:
    said = _listen()
    with apply(replace_fine_grained=True) as handle:
        chunks = make_chunks(make_config())
        for _ in range(2):
            run(chunks, 2)
        assert handle.engine is None
    assert "\n".join(said).count("found nothing to take over") == 1


def _take_over(recipe: dict[str, Any]) -> tuple[list[int], str]:
    """Check two steps; return the bytes that they have copied out, and what this rank's log says."""
    kept = {name: value for name, value in recipe.items() if "recompute" in name}
    expected = step(make_chunks(make_config("moe", **kept)), 4)
    said, moved = _listen(), []
    with apply(ALL, has_report=False) as handle:
        chunks = make_chunks(make_config("moe", **recipe, offload_engine=True))
        assert not chunks[0].config.fine_grained_activation_offloading
        for _ in range(2):
            assert step(chunks, 4) == expected
            assert stats_of(handle).num_storages_left == 0
            moved.append(stats_of(handle).copied_out_bytes)
    return moved, "\n".join(said)


def _listen() -> list[str]:
    logging.getLogger("megatron_patches").setLevel(logging.INFO)
    return messages()
