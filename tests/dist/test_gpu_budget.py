# SPDX-License-Identifier: Apache-2.0
"""Training within a budget of bytes: the same bits, and no more on the device than the budget."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402

from megatron_patches import apply  # noqa: E402
from megatron_patches._model.candidates import find_candidates  # noqa: E402
from megatron_patches._model.gpu_budget import checked  # noqa: E402
from offload_engine import OffloadConfig  # noqa: E402
from offload_engine.sizes import parse_size  # noqa: E402
from tests.dist.launch import Pipeline, run_ranks  # noqa: E402
from tests.dist.tiny import fingerprint, make_chunks, make_config, run  # noqa: E402

NUM_STEPS = 8
NUM_FREE = 4
"""Steps before the third that goes by a plan: two with everything offloaded, two more to correct what was predicted."""
SHARED = {"moe_shared_expert_intermediate_size": 32}


def test_steps_are_the_same_within_each_budget() -> None:
    """Other layouts: test_budget_layouts.py."""
    run_ranks(_check_budgets, pipeline=Pipeline(2), timeout_s=240.0)


def _check_budgets() -> None:
    gc.disable()
    num_microbatches, settings = 4, SHARED
    chunks = make_chunks(make_config("mixed", **settings))
    expected = fingerprint(chunks, run(chunks, num_microbatches))
    unbounded = _peaks(num_microbatches, settings, expected, "1TiB")
    floor, highest = unbounded[0], unbounded[-1]
    assert floor < highest  # everything leaves until the budget has decided, and nothing after it
    worst, most = _largest(floor, highest)
    last: list[int] = []
    for share in (0.2, 0.6):
        budget = round(worst + share * (most - worst))
        peaks = _peaks(num_microbatches, settings, expected, f"{budget}")
        assert max(peaks[NUM_FREE:]) <= budget, (budget, peaks)
        last.append(peaks[-1])
    assert last[0] <= last[1], last


def _largest(*numbers: int) -> list[int]:
    tensor = torch.tensor(numbers)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return tensor.tolist()


def _peaks(num_microbatches: int, settings: dict[str, object], expected: dict[str, str], budget: str) -> list[int]:
    """Return the most bytes of groups that were on the device in each step."""
    found = []
    with apply(OffloadConfig(min_tensor_bytes=1, directory="none")) as handle:
        chunks = make_chunks(make_config("mixed", **settings, offload_gpu_budget=budget))
        optimizer = torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.0)
        for _ in range(NUM_STEPS):
            assert fingerprint(chunks, run(chunks, num_microbatches)) == expected
            optimizer.step()
            assert handle.stats is not None
            found.append(handle.stats.peak_resident_bytes)
    return found


def test_a_plan_is_written_drawn_and_given_back(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run_ranks(_check_plan, str(tmp_path), pipeline=Pipeline(2))
    names = {"plan_rank0.json", "plan_rank1.json", "plan.png"}
    assert {path.name for path in tmp_path.iterdir()} == names


def _check_plan(folder: str) -> None:
    files = {"offload_plan": f"{folder}/plan.json", "offload_plan_plot": f"{folder}/plan.png"}
    chunks = make_chunks(make_config("mixed"))
    expected = fingerprint(chunks, run(chunks, 4))
    budget = f"{_largest(_peaks(4, {}, expected, '1TiB')[-1])[0]}"
    first = _peaks(4, files, expected, budget)
    again = _peaks(4, files, expected, budget)
    assert first[0] < first[-1] and again[0] > first[0]  # nothing had to be measured
    assert max(again) <= int(budget)
    with pytest.raises(ValueError, match="--offload-plan .*/nowhere/plan.json: there is no directory"):
        _peaks(4, {"offload_plan": f"{folder}/nowhere/plan.json"}, expected, budget)


def test_what_a_model_offers() -> None:
    run_ranks(_check_candidates)


def _check_candidates() -> None:
    dense, _ = _candidates("dense")
    assert dense == (
        "layer_input", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2",
    )  # fmt: skip
    names, left_out = _candidates("moe", **SHARED)
    assert {"experts", "shared_experts", "router", "dispatched_tokens"} <= set(names)
    assert left_out["self_attn"] == "its parts move one by one"
    assert left_out["router_fc1"] == left_out["shared_fc1"] == "it moves as a part of another name"
    selective = {"recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"]}
    names, left_out = _candidates("mixed", **selective)
    assert "mlp_act" not in names and "recompute_modules has 'mlp'" in left_out["mlp_act"]
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    names, left_out = _candidates("mixed", **full)
    assert names == ("layer_input",) and "recomputes every layer" in left_out["core_attn"]
    config = make_config("moe")
    config.moe_paged_stash = True
    names, left_out = find_candidates(config, make_chunks(make_config("moe")))
    assert "experts" not in names and "moe_paged_stash" in left_out["experts"]


def _candidates(kind: str, **settings: object) -> tuple[tuple[str, ...], dict[str, str]]:
    config = make_config(kind, **settings)
    return find_candidates(config, make_chunks(config))


def test_only_the_names_given_are_candidates() -> None:
    run_ranks(_check_names)


def _check_names() -> None:
    with apply(OffloadConfig(min_tensor_bytes=1, directory="none"), gpu_budget="1GiB", modules=["mlp_act"]) as handle:
        chunks = make_chunks(make_config("dense"))
        run(chunks, 2)
        assert handle.stats is not None and handle.stats.num_groups == 8
    with apply(OffloadConfig(min_tensor_bytes=1, directory="none"), gpu_budget="50%"):
        with pytest.raises(ValueError, match="--offload-gpu-budget 50% depends on the memory of a GPU"):
            run(make_chunks(make_config("dense")), 2)


@pytest.mark.parametrize(
    ("budget", "nbytes"), [("60GiB", 60 << 30), ("75%", 60 << 30), ("auto", (80 << 30) - (80 << 30) // 64)]
)
def test_a_budget_on_a_gpu(budget: str, nbytes: int) -> None:
    assert checked(parse_size(budget), 80 << 30, 5 << 30) == nbytes


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("81GiB", "--offload-gpu-budget 81GiB is above the 80.00 GiB of the GPU: lower it, or give auto"),
        ("4GiB", "--offload-gpu-budget 4GiB is 4.00 GiB, but 5.00 GiB are taken before the first step"),
        ("5%", "--offload-gpu-budget 5% is 4.00 GiB, but 5.00 GiB are taken"),
    ],
)
def test_a_budget_that_a_gpu_cannot_have(budget: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        checked(parse_size(budget), 80 << 30, 5 << 30)
    assert "\n" not in str(error.value)
