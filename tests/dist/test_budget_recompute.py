# SPDX-License-Identifier: Apache-2.0
"""A budget that has layers recompute: chosen where that is shorter, alike on the ranks of a stage, the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import parallel_state as ps

from megatron_patches import apply
from megatron_patches._model.candidates import find_candidates
from megatron_patches._model.modules import drop_parts
from megatron_patches._model.recompute_options import RecomputeOptions
from offload_engine import OffloadConfig, OffloadEngine
from offload_engine.planning.choices import Choices, Slot
from offload_engine.planning.clocks import Link
from offload_engine.planning.shapes import ChunkShape, GroupShape
from tests.dist.budgets import Skewed, budget_of, ends, largest, optimizer_of, train
from tests.dist.launch import Pipeline, on_ranks, run_ranks
from tests.dist.settings import selective
from tests.dist.test_recompute_switches import MODELS, _config, _step
from tests.dist.tiny import ALL, make_chunks, run

NUM_STEPS = 10
NUM_MICROBATCHES = 2
DECIDE = "offload_engine._budget.decide"


@contextmanager
def where_the_link_is_behind() -> Iterator[None]:
    """All but copies takes no time: times of tiny models are left to chance."""
    with mock.patch(f"{DECIDE}.measure_link", return_value=Link(1e-6, 1e-6)):
        with mock.patch(f"{DECIDE}.agreed_numbers", return_value=[2e6, 0.0]):
            yield


@pytest.mark.parametrize(
    ("model", "shape"),
    [("dense", Pipeline(2)), ("spread", Pipeline(tensor=2)), ("experts", Pipeline(2, 2, 2))],
    ids=str,
)
def test_what_is_recomputed_is_chosen_and_steps_are_the_same(model: str, shape: Pipeline) -> None:
    chosen = run_ranks(_check_steps, model, pipeline=shape, timeout_s=240.0)
    assert any(recomputed for _, recomputed in chosen)
    of_stages = dict(chosen)
    assert all(recomputed == of_stages[stage] for stage, recomputed in chosen)


def _check_steps(model: str) -> tuple[int, list[Slot]]:
    expected = _step(_chunks(model), NUM_MICROBATCHES)
    budget = _budget_between(model, expected)
    with where_the_link_is_behind():
        peaks, view = _train(model, f"{budget}", expected)
    recomputed = view.decider.chosen.best.decision.choices.recomputed
    assert max(peaks[-3:]) <= budget and bool(view.summary.recomputed_bytes) == bool(recomputed)
    assert sum(view.decider.chosen.best.recomputed_bytes.values()) == view.summary.recomputed_bytes
    return ps.get_pipeline_model_parallel_rank(), sorted(recomputed)


def _budget_between(model: str, expected: dict[str, str]) -> int:
    """Half the way from everything offloaded to nothing moved, on the rank that takes the most."""
    with apply(ALL) as handle:
        chunks = _chunks(model, offload_gpu_budget="1TiB")
        train(handle, chunks, [NUM_MICROBATCHES] * 6, {NUM_MICROBATCHES: expected}, _step)
        assert budget_of(handle).summary.recomputed_bytes == 0
        return sum(largest(*ends(handle))) // 2


def _train(
    model: str, budget: str, expected: dict[str, str], num_steps: int = NUM_STEPS, **more: Any
) -> tuple[list[int], Any]:
    """Train within a budget; return the peaks of the steps, and the budget's view."""
    with apply(ALL) as handle:
        chunks = _chunks(model, offload_gpu_budget=budget, **more)
        peaks = train(handle, chunks, [NUM_MICROBATCHES] * num_steps, {NUM_MICROBATCHES: expected}, _step)
        return peaks, budget_of(handle)


def _chunks(model: str, **more: Any) -> list[Any]:
    kind, settings, _ = MODELS[model]
    size = ps.get_tensor_model_parallel_world_size()
    return make_chunks(_config(kind, {**settings, "tensor_model_parallel_size": size, **more}))


@on_ranks()
def test_a_plan_that_recomputes_is_given_back_unless_that_is_forbidden(tmp_path: Path) -> None:
    file = str(tmp_path / "plan.json")
    expected = _step(_chunks("dense"), NUM_MICROBATCHES)
    budget = _budget_between("dense", expected)
    with where_the_link_is_behind():
        peaks, _ = _train("dense", f"{budget}", expected, offload_plan=file)
        _, forbidden = _train("dense", f"{budget}", expected, offload_recompute="off")
    assert not forbidden.decider.chosen.best.decision.choices.recomputed
    again, view = _train("dense", f"{budget}", expected, num_steps=3, offload_plan=file)
    assert view.decider.chosen is None  # nothing was measured
    assert view.decider.saved.allowance.choices.recomputed
    assert again[-1] == peaks[-1]
    with pytest.raises(ValueError, match=r"^--offload-plan \S+ recomputes, which --offload-recompute off forbids"):
        _train("dense", f"{budget}", expected, offload_plan=file, offload_recompute="off")


def test_a_rank_above_its_budget_changes_nothing_that_others_recompute_too() -> None:
    before, after = zip(*run_ranks(_check_excess, pipeline=Pipeline(tensor=2), timeout_s=240.0), strict=True)
    assert before[0] == before[1] == after[0] == after[1] and before[0]


def _check_excess() -> list[list[Slot]]:
    expected, found = _step(_chunks("dense"), NUM_MICROBATCHES), []
    budget = _budget_between("dense", expected)
    with where_the_link_is_behind(), apply(ALL) as handle:
        chunks = _chunks("dense", offload_gpu_budget=f"{budget}")
        optimizer = optimizer_of(chunks)
        for number in range(NUM_STEPS + 2):
            assert _step(chunks, NUM_MICROBATCHES) == expected
            optimizer.step()
            view = budget_of(handle)
            if number == NUM_STEPS - 1:
                view._last.gauge = Skewed(view._last.gauge, budget // 4 if torch.distributed.get_rank() else 0)
            if number >= NUM_STEPS - 1:
                found.append(sorted(view.decider.chosen.best.decision.choices.recomputed))
    return [found[0], found[-1]]


@on_ranks()
def test_what_is_offered() -> None:
    found = _offered("experts")
    assert {"mlp", "moe", "core_attn"} <= found.keys(), found
    assert _offered("experts", is_evaluated=True) == found
    unknown: list[dict[str, Any]] = [{"fp8": "e4m3"}, {"cuda_graph_impl": "local"}]
    for settings in unknown:
        assert not _offered("dense", **settings)
    chunks = _chunks("dense", **selective("mlp"))
    options = RecomputeOptions(chunks, ["layer_input", "qkv_linear", "core_attn", "mlp_norm"])
    layer = chunks[0].decoder.layers[0]
    options.apply(Choices())
    assert layer.recompute_mlp  # as the model was built
    options.apply(Choices(recomputed=frozenset({Slot(0, 0, "core_attn", 0)})))
    assert layer.self_attention.checkpoint_core_attention
    with pytest.raises(ValueError, match="the plan recomputes .*name='mlp_act'.*, which this model cannot switch"):
        options.apply(Choices(recomputed=frozenset({Slot(0, 0, "mlp_act", 0)})))
    options.restore()
    assert layer.recompute_mlp and not layer.self_attention.checkpoint_core_attention


def _offered(model: str, *, is_evaluated: bool = False, **attributes: Any) -> dict[str, int]:
    """Return what is offered, and the bytes it frees, in a model where each group has the same bytes and time.

    Args:
        model: in `MODELS`.
        is_evaluated: a microbatch without gradients is the last one before.
        attributes: of its configuration, set behind its making.
    """
    chunks = _chunks(model)
    config: Any = chunks[0].config
    for name, value in attributes.items():
        setattr(config, name, value)
    names = drop_parts(find_candidates(config, chunks)[0])[0]
    options = RecomputeOptions(chunks, names)
    config.fp8 = None
    run(chunks, 1)
    if is_evaluated:
        run(chunks, 1, forward_only=True)
    groups = [GroupShape(name, layer=layer, nbytes=1 << 30, forward_ms=1.0) for layer in range(4) for name in names]
    return {option.name: option.freed_bytes for option in options.find((ChunkShape(tuple(groups)),))}


def test_an_engine_without_other_ranks_recomputes_nothing() -> None:
    engine = OffloadEngine(OffloadConfig(gpu_budget=1 << 30))
    assert engine.budget is not None and engine.budget.decider.find_options(()) == ()
    engine.close()
