# SPDX-License-Identifier: Apache-2.0
"""Training within a budget of bytes: the same bits, and no more on the device than the budget, in every layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from megatron.core import parallel_state as ps

from megatron_patches import apply
from megatron_patches._model.candidates import find_candidates
from megatron_patches._model.gpu_budget import checked
from offload_engine._budget.state import State
from offload_engine.sizes import parse_size
from tests.dist.budgets import budget_of, ends, largest, optimizer_of, train
from tests.dist.launch import Pipeline, on_ranks, run_ranks
from tests.dist.settings import DEEP, OVERLAP, SHARED, full, selective
from tests.dist.tiny import ALL, make_chunks, make_config, run, stats_of, step
from tests.dist.training import train as train_distributed

NUM_STEPS = 8
NUM_FREE = 5
"""Steps before the third that goes by a plan, at most: later ones are within the budget."""


class Layout(NamedTuple):
    """Kind of the model, settings, and the numbers of microbatches of some steps, by number."""

    kind: str
    settings: dict[str, Any]
    others: dict[int, int] = {}  # noqa: RUF012
    dtype: torch.dtype = torch.float32


@pytest.mark.parametrize(
    ("layout", "shape"),
    [
        pytest.param(Layout("dense", {}, {5: 2, 6: 6}), Pipeline(2), id="1F1B, other microbatches"),
        pytest.param(
            Layout("moe", {**SHARED, **OVERLAP}, dtype=torch.bfloat16), DEEP, id="interleaved, all-to-all overlap"
        ),
    ],
)
@on_ranks(timeout_s=240.0)
def test_steps_are_the_same_and_within_the_budget(layout: Layout, shape: Pipeline) -> None:
    numbers = [layout.others.get(number, 4) for number in range(NUM_STEPS)]
    reference = make_chunks(_config(layout))
    expected = {number: step(reference, number) for number in set(numbers)}
    with apply(ALL, has_report=False) as handle:
        chunks = make_chunks(_config(layout, offload_gpu_budget="1TiB"))
        peaks = train(handle, chunks, [4] * 6, expected)
        floor, top = ends(handle)
        # Everything leaves until the budget has decided, and nothing after it.
        assert floor == top or peaks[0] < peaks[-1]
    budget = sum(largest(floor, top)) // 2
    with apply(ALL, has_report=False) as handle:
        chunks = make_chunks(_config(layout, offload_gpu_budget=f"{budget}"))
        peaks = train(handle, chunks, numbers, expected)
        assert budget_of(handle).state in (State.HOLD, State.VERIFY)
    assert max(peaks[NUM_FREE:]) <= budget, (budget, peaks)


def _config(layout: Layout, **budget: Any) -> Any:
    experts = {"expert_model_parallel_size": ps.get_expert_model_parallel_world_size()}
    settings = {**layout.settings, **(experts if layout.kind != "dense" else {}), **budget}
    return make_config(layout.kind, layout.dtype, **settings)


@on_ranks(world_size=2, timeout_s=240.0)
def test_the_distributed_optimizer() -> None:
    def steps(**budget: str) -> list[tuple[dict[str, str], int]]:
        config = make_config("dense", torch.bfloat16, **budget)

        def counted(chunks: list[Any]) -> tuple[dict[str, str], int]:
            return step(chunks, 4), 0 if handle.stats is None else handle.stats.peak_resident_bytes

        return train_distributed(config, make_chunks(config), counted, NUM_STEPS)

    with apply(ALL, has_report=False) as handle:
        expected, kept = steps(), steps(offload_gpu_budget="1TiB")
        floor, top = kept[0][1], kept[-1][1]
        budget = sum(largest(floor, top)) // 2
        within = steps(offload_gpu_budget=f"{budget}")
    assert [found for found, _ in within] == [found for found, _ in kept] == [found for found, _ in expected]
    assert max(peak for _, peak in within[NUM_FREE:]) <= budget and floor < top


@on_ranks(Pipeline(2), timeout_s=240.0)
def test_two_models_in_a_process() -> None:
    kinds = {"dense": "1TiB", "mixed": "250KiB"}
    expected = {kind: step(make_chunks(make_config(kind)), 4) for kind in kinds}
    with apply(ALL, has_report=False) as handle:
        models = {kind: make_chunks(make_config(kind, offload_gpu_budget=size)) for kind, size in kinds.items()}
        optimizer = optimizer_of(*models.values())
        for _ in range(NUM_STEPS):
            for kind, chunks in models.items():
                assert step(chunks, 4) == expected[kind], kind
            optimizer.step()
        assert budget_of(handle).state is State.HOLD and stats_of(handle).peak_resident_bytes <= 250 << 10


def test_a_plan_is_written_drawn_and_given_back(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run_ranks(_check_plan, str(tmp_path), pipeline=Pipeline(2))
    assert {path.name for path in tmp_path.iterdir()} == {"plan_rank0.json", "plan_rank1.json", "plan.png"}


def _check_plan(folder: str) -> None:
    expected = {4: step(make_chunks(make_config("mixed")), 4)}

    def peaks(budget: str, num_steps: int, **files: str) -> list[int]:
        with apply(ALL, has_report=False) as handle:
            return train(
                handle, make_chunks(make_config("mixed", offload_gpu_budget=budget, **files)), [4] * num_steps, expected
            )

    files = {"offload_plan": f"{folder}/plan.json", "offload_plan_plot": f"{folder}/plan.png"}
    (budget,) = largest(peaks("1TiB", 6)[-1])
    first, again = (peaks(f"{budget}", num_steps, **files) for num_steps in (6, 2))
    assert first[0] < first[-1] and again[0] > first[0]  # nothing had to be measured
    assert max(again) <= budget
    with pytest.raises(ValueError, match="--offload-plan .*/nowhere/plan.json: there is no directory"):
        peaks(f"{budget}", 1, offload_plan=f"{folder}/nowhere/plan.json")


@on_ranks()
def test_what_a_model_offers() -> None:
    dense, _ = _candidates("dense")
    assert dense == (
        "layer_input", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2",
    )  # fmt: skip
    names, left_out = _candidates("moe", **SHARED)
    assert {"experts", "shared_experts", "router", "dispatched_tokens"} <= set(names)
    assert left_out["self_attn"] == "its parts move separately"
    assert left_out["router_fc1"] == left_out["shared_fc1"] == "it moves as a part of another name"
    names, left_out = _candidates("mixed", **selective("mlp", "layernorm"))
    assert "mlp_act" not in names and "recompute_modules has 'mlp'" in left_out["mlp_act"]
    names, left_out = _candidates("mixed", **full())
    assert names == ("layer_input",) and "recomputes every layer" in left_out["core_attn"]
    config = make_config("moe")
    config.moe_paged_stash = True
    names, left_out = find_candidates(config, make_chunks(make_config("moe")))
    assert "experts" not in names and "moe_paged_stash" in left_out["experts"]


def _candidates(kind: str, **settings: object) -> tuple[tuple[str, ...], dict[str, str]]:
    config = make_config(kind, **settings)
    return find_candidates(config, make_chunks(config))


@on_ranks()
def test_only_the_names_given_are_candidates() -> None:
    with apply(ALL, gpu_budget="1GiB", modules=["mlp_act"]) as handle:
        chunks = make_chunks(make_config())
        run(chunks, 2)
        assert stats_of(handle).num_groups == 8
    with apply(ALL, gpu_budget="50%"):
        with pytest.raises(ValueError, match="--offload-gpu-budget 50% depends on the memory of a GPU"):
            run(make_chunks(make_config()), 2)


@pytest.mark.parametrize(
    ("budget", "nbytes", "message"),
    [
        ("60GiB", 60 << 30, ""),
        ("75%", 60 << 30, ""),
        ("auto", (80 << 30) - (80 << 30) // 64, ""),
        ("81GiB", None, "--offload-gpu-budget 81GiB is above the 80.00 GiB of the GPU: lower it, or give auto"),
        ("5%", None, "--offload-gpu-budget 5% is 4.00 GiB, but 5.00 GiB are taken"),
    ],
)
def test_a_budget_on_a_gpu(budget: str, nbytes: int | None, message: str) -> None:
    if nbytes is not None:
        assert checked(parse_size(budget), 80 << 30, 5 << 30) == nbytes
    else:
        with pytest.raises(ValueError, match=message):
            checked(parse_size(budget), 80 << 30, 5 << 30)
