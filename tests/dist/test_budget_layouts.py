# SPDX-License-Identifier: Apache-2.0
"""One flag, in every layout: eight steps with the same bits, evaluation and other microbatches in between."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402

from megatron_patches import apply  # noqa: E402
from offload_engine import OffloadConfig  # noqa: E402
from offload_engine._budget.state import State  # noqa: E402
from tests.dist.launch import Pipeline, run_ranks  # noqa: E402
from tests.dist.tiny import fingerprint, make_chunks, make_config, run  # noqa: E402
from tests.dist.training import train  # noqa: E402

NUM_STEPS = 8
SHARED = {"moe_shared_expert_intermediate_size": 32}


class Layout(NamedTuple):
    """Kind of the model, shape of the pipeline, settings, and the numbers of microbatches of some steps, by number."""

    kind: str = "dense"
    shape: Pipeline = Pipeline()
    settings: dict[str, Any] = {}  # noqa: RUF012
    others: dict[int, int] = {}  # noqa: RUF012


SPLIT = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "add_bias_linear": False}
COMBINED = {**SHARED, "overlap_moe_expert_parallel_comm": True}
LAYOUTS = {
    "no pipeline, other microbatches": Layout(others={5: 2, 6: 6}),
    "1F1B, other microbatches": Layout(shape=Pipeline(2), others={5: 2, 6: 6}),
    "interleaved, experts": Layout("mixed", Pipeline(2, 2, expert=2), SHARED),
    "interleaved, all-to-all overlap": Layout("moe", Pipeline(2, 2, expert=2), COMBINED),
    "context parallel": Layout(shape=Pipeline(context=2)),
    "pipeline, tensor and sequence parallel": Layout("mixed", Pipeline(2, tensor=2), {**SHARED, **SPLIT}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_steps_are_the_same_and_within_the_budget(name: str) -> None:
    layout = LAYOUTS[name]
    run_ranks(_check, layout._replace(shape=None), pipeline=layout.shape, timeout_s=240.0)


def _check(layout: Layout) -> None:
    gc.disable()
    settings = dict(layout.settings)
    if layout.kind != "dense":
        from megatron.core import parallel_state as ps

        settings["expert_model_parallel_size"] = ps.get_expert_model_parallel_world_size()
    if layout.settings.get("overlap_moe_expert_parallel_comm"):
        settings["dtype"] = torch.bfloat16
    numbers = [layout.others.get(step, 4) for step in range(NUM_STEPS)]
    reference = make_chunks(make_config(layout.kind, **settings))
    expected = {number: fingerprint(reference, run(reference, number)) for number in set(numbers)}
    floor, top, _ = _train(layout, settings, "1TiB", [4] * 6, expected)
    floor, top = (_largest(each) for each in (floor, top))
    budget = (floor + top) // 2 if floor < top else top
    _, _, peaks = _train(layout, settings, f"{budget}", numbers, expected)
    assert max(peaks[6:]) <= budget, (budget, peaks)


def _largest(number: int) -> int:
    tensor = torch.tensor([number])
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    return int(tensor)


def _train(
    layout: Layout, settings: dict[str, Any], budget: str, numbers: list[int], expected: dict[int, dict[str, str]]
) -> tuple[int, int, list[int]]:
    """Train; return what is predicted with everything offloaded and with nothing moved, and the peaks of the steps."""
    peaks = []
    with apply(OffloadConfig(min_tensor_bytes=1, directory="none"), has_report=False) as handle:
        chunks = make_chunks(make_config(layout.kind, **settings, offload_gpu_budget=budget))
        optimizer = torch.optim.SGD([p for chunk in chunks for p in chunk.parameters()], lr=0.0)
        for number in numbers:
            assert fingerprint(chunks, run(chunks, number)) == expected[number]
            optimizer.step()
            assert handle.engine is not None and handle.engine.budget is not None
            peaks.append(handle.engine.stats.peak_resident_bytes)
            if len(peaks) % 3 == 1:
                run(chunks, number, forward_only=True)
        view = handle.engine.budget
        assert view.state in (State.HOLD, State.VERIFY) and view.decider.chosen is not None
        return view.decider.chosen.floor.held_bytes, view.decider.chosen.top.held_bytes, peaks


def test_the_distributed_optimizer() -> None:
    run_ranks(_check_distributed_optimizer, world_size=2, timeout_s=240.0)


def _check_distributed_optimizer() -> None:
    gc.disable()

    def steps(**budget: str) -> list[tuple[dict[str, str], int]]:
        config = make_config("dense", torch.bfloat16, **budget)

        def step(chunks: list[Any]) -> tuple[dict[str, str], int]:
            found = fingerprint(chunks, run(chunks, 4))
            return found, 0 if handle.stats is None else handle.stats.peak_resident_bytes

        return train(config, make_chunks(config), step, NUM_STEPS)

    with apply(OffloadConfig(min_tensor_bytes=1, directory="none"), has_report=False) as handle:
        expected, kept = steps(), steps(offload_gpu_budget="1TiB")
        floor, top = kept[0][1], kept[-1][1]
        budget = (_largest(floor) + _largest(top)) // 2
        within = steps(offload_gpu_budget=f"{budget}")
    assert [found for found, _ in within] == [found for found, _ in kept] == [found for found, _ in expected]
    assert max(peak for _, peak in within[6:]) <= budget and floor < top


def test_two_models_in_a_process() -> None:
    run_ranks(_check_two_models, pipeline=Pipeline(2), timeout_s=240.0)


def _check_two_models() -> None:
    gc.disable()
    kinds = {"dense": "1TiB", "mixed": "250KiB"}
    references = {kind: make_chunks(make_config(kind)) for kind in kinds}
    expected = {kind: fingerprint(chunks, run(chunks, 4)) for kind, chunks in references.items()}
    with apply(OffloadConfig(min_tensor_bytes=1, directory="none"), has_report=False) as handle:
        models = {kind: make_chunks(make_config(kind, offload_gpu_budget=size)) for kind, size in kinds.items()}
        weights = [p for chunks in models.values() for chunk in chunks for p in chunk.parameters()]
        optimizer = torch.optim.SGD(weights, lr=0.0)
        for _ in range(NUM_STEPS):
            for kind, chunks in models.items():
                assert fingerprint(chunks, run(chunks, 4)) == expected[kind], kind
            optimizer.step()
        assert handle.engine is not None and handle.engine.budget is not None
        assert handle.engine.budget.state is State.HOLD
        assert handle.engine.stats.peak_resident_bytes <= 250 << 10
