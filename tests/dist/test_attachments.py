# SPDX-License-Identifier: Apache-2.0
"""The life of an attachment: made as a whole or not at all, kept while it is needed, taken off without a rest."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch

from megatron_patches import _runtime, apply
from megatron_patches._hooks.attach import Attachment
from megatron_patches._model.recompute_options import RecomputeOptions
from megatron_patches._plan_files import PlanFiles
from megatron_patches._rows.registry import Patch, PatchError, apply_patches
from offload_engine import OffloadConfig, OffloadEngine, OffloadError
from offload_engine.planning.choices import Choices, Slot
from tests.dist.launch import Pipeline, on_ranks
from tests.dist.tiny import ALL, engine_of, forward_step, make_chunks, make_config, num_hooks, run, stats_of, step
from tests.lookups import present

PARTS_OF_ATTACHING: list[tuple[Any, str]] = [
    (RecomputeOptions, "__init__"),
    (PlanFiles, "begin"),
    (Attachment, "_attach_pauses"),
    (_runtime, "SecondStep"),
]


@on_ranks()
def test_attaching_that_fails_in_any_part_leaves_nothing() -> None:
    chunks = make_chunks(make_config())
    bare, close = num_hooks(chunks), OffloadEngine.close
    with apply(ALL, gpu_budget=1 << 30) as handle:
        for owner, name in PARTS_OF_ATTACHING:
            fails = mock.patch.object(owner, name, side_effect=ArithmeticError)
            closes = mock.patch.object(OffloadEngine, "close", autospec=True, side_effect=close)
            with fails, closes as closed, pytest.raises(ArithmeticError):
                run(chunks, 2)
            assert closed.call_count and handle.engine is None, name
            assert num_hooks(chunks) == bare, name
        run(chunks, 2)
        assert handle.engine is not None


@pytest.mark.parametrize("ranks", [(0, 1), (0,)], ids=str)
@on_ranks(Pipeline(2), timeout_s=60)
def test_what_is_checked_after_the_first_step_is_so_after_the_first_that_does_not_raise(ranks: tuple[int, ...]) -> None:
    """The ranks that are not among `ranks` offload nothing."""
    too_small = {"offload_activation": True, "offload_modules": ["core_attn"], "offload_host_limit_bytes": 4096}
    with apply(OffloadConfig(min_tensor_bytes=1)) as handle:
        does_offload = torch.distributed.get_rank() in ranks
        chunks = make_chunks(make_config(**(too_small if does_offload else {})))
        config: Any = chunks[0].config
        # On all ranks, which have sent and received everything.
        config.finalize_model_grads_func = mock.Mock(side_effect=ArithmeticError)
        with pytest.raises(ArithmeticError):
            run(chunks, 2)
        config.finalize_model_grads_func = None
        assert (handle.engine is not None) == does_offload
        message = "pipeline rank 0: offload_host_limit_bytes=4,096 has no room for any of"
        for _ in range(2):  # a refused model is checked again
            with pytest.raises(ValueError, match=message):
                run(chunks, 2)
            assert handle.engine is None
        config.offload_host_limit_bytes = None
        for _ in range(3):
            run(chunks, 2)
        assert (handle.stats is not None and handle.stats.copied_out_bytes > 0) == does_offload


# -- another choice ----------------------------------------------------------------------------------------------------


@on_ranks(Pipeline(2))
def test_offload_that_is_switched_off_leaves_no_hook_and_no_engine_and_comes_back() -> None:
    with apply(ALL) as handle:
        chunks = make_chunks(make_config(offload_activation=True, offload_modules=["core_attn", "mlp_fc1"]))
        config: Any = chunks[0].config
        bare, steps, engines = num_hooks(chunks), [], []
        for is_on in (True, False, False, True, False):
            config.offload_activation = is_on
            steps.append(step(chunks, 3))
            assert (num_hooks(chunks) > bare) == is_on == (handle.engine is not None)
            if handle.engine is not None:
                assert handle.engine.stats.num_groups
                engines.append(handle.engine)
        assert all(found == steps[0] for found in steps)
        assert len({id(engine) for engine in engines}) == 2


@on_ranks()
def test_what_a_budget_recomputes_is_saved_again_without_it() -> None:
    with apply(ALL) as handle:
        chunks: Any = make_chunks(make_config(offload_gpu_budget="1GiB"))
        run(chunks, 2)
        attention = chunks[0].decoder.layers[0].self_attention
        present(engine_of(handle).budget).decider.apply(Choices(recomputed=frozenset({Slot(0, 0, "core_attn", 0)})))
        assert attention.checkpoint_core_attention
        chunks[0].config.offload_gpu_budget = None
        run(chunks, 2)
        assert handle.engine is None and not attention.checkpoint_core_attention


@on_ranks()
def test_another_choice_of_modules_counts_from_the_next_step_on_which_closes_the_engine() -> None:
    with apply(ALL) as handle:
        chunks = make_chunks(make_config(offload_activation=True, offload_modules=["core_attn"]))
        expected, engine, num_groups = step(chunks, 2), handle.engine, stats_of(handle).num_groups
        vars(chunks[0].config)["offload_modules"] = ["core_attn", "mlp_fc1"]
        refusal = mock.Mock(side_effect=OffloadError("a graph is left"))
        with mock.patch.object(_runtime, "release_captured", refusal), pytest.raises(OffloadError):
            run(chunks, 2)
        assert handle.engine is engine and len(handle._runtime._attachments) == 1
        assert step(chunks, 2) == expected
        assert handle.engine is not engine and len(handle._runtime._attachments) == 1
        assert stats_of(handle).num_groups == 2 * num_groups


# -- the end -----------------------------------------------------------------------------------------------------------


@on_ranks()
def test_a_removal_leaves_nothing_and_one_that_is_refused_leaves_all_in_force() -> None:
    chunks = make_chunks(make_config())
    expected, bare = step(chunks, 2), num_hooks(chunks)
    handle = apply(ALL, modules=["core_attention", "mlp_act"])
    rows = handle._applied.rows
    assert step(chunks, 2) == expected
    engine = engine_of(handle)
    # In the middle of the rows: those behind it would come off first.
    on_top = Patch(target=rows[len(rows) // 2].target, wrapper=lambda original: original, why="it is on top")
    with apply_patches([on_top]):
        with pytest.raises(PatchError, match="'it is on top' was applied after it"):
            handle.remove()
        assert handle._applied.rows == rows
        assert step(chunks, 2) == expected
        assert engine_of(handle) is engine and engine.stats.num_offloaded_groups  # it was not closed
    attachment = weakref.ref(next(iter(handle._runtime._attachments.values())).attachment)
    handle._runtime.close()  # its rows are still in force
    assert step(chunks, 2) == expected and handle.engine is None
    handle.remove()
    handle.remove()
    assert not handle._applied.rows and num_hooks(chunks) == bare
    del handle, engine
    gc.collect()
    assert attachment() is None, "it is gone before its model"
    with apply(ALL, modules=["attn_norm"]) as again:
        assert step(chunks, 2) == expected
        assert stats_of(again).copied_out_bytes > 0


# -- several models ----------------------------------------------------------------------------------------------------


@on_ranks()
def test_a_step_in_a_forward_of_another_ends_that_of_its_own_model() -> None:
    inner = make_chunks(make_config())
    running: list[Any] = []

    def nesting(batches: Iterator[torch.Tensor], model: Any, *more: Any) -> Any:
        own = handle._runtime.running_engine
        run(inner, 1)
        running.append(own is not None and handle._runtime.running_engine is own)
        return forward_step(batches, model, *more)

    with apply(ALL, modules=["core_attn"]) as handle:
        run(make_chunks(make_config()), 2, forward_step=nesting)
        assert handle._runtime.running_engine is None
    assert running == [True, True]


@on_ranks(Pipeline(2))
def test_two_models_take_turns() -> None:
    """As in reinforcement learning: each has an engine of its own, and goes with its model."""
    jobs = {"dense": ["core_attn"], "moe": ["router_fc1", "mlp_norm"]}
    expected = {kind: step(make_chunks(make_config(kind)), 4) for kind in jobs}
    with apply(ALL) as handle:
        offload = {kind: {"offload_activation": True, "offload_modules": names} for kind, names in jobs.items()}
        models = {kind: make_chunks(make_config(kind, **settings)) for kind, settings in offload.items()}
        engines = set()
        for kind in (*jobs, *jobs):
            assert step(models[kind], 4) == expected[kind]
            engines.add(id(engine_of(handle)))
        assert len(engines) == 2
        models.clear()
        assert not handle._runtime._attachments
