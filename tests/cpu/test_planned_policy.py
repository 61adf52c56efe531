# SPDX-License-Identifier: Apache-2.0
"""The policy that follows a plan: the moves of the reactive ones without a budget, fewer waits with one."""

from __future__ import annotations

import pytest
import torch

from offload_engine import ChunkKey, ChunkOffloadHandler, GroupTraits, OffloadConfig, OffloadEngine, Planned
from offload_engine._saved.handles import PackedTensor
from offload_engine.planning.moves import DROP
from offload_engine.planning.plan import format_plan
from offload_engine.planning.simulate import PipelineJob
from offload_engine.schedule import Action, backward_at_once, no_pipelining, one_forward_one_backward, parse_actions
from tests.adversarial import AdversarialDevice
from tests.dense_jobs import ALL, DEEP, MOST, ONE_RANK, dense_job, with_bounds
from tests.engine_on_clocks import run_engine

GROUP_BYTES = 256


class Bench:
    """Chunks of equal groups, on a device whose copies complete when something waits for them."""

    def __init__(self, **bounds: int) -> None:
        self.device = AdversarialDevice(host_capacity=1 << 16)
        config = OffloadConfig(min_tensor_bytes=0, policy=Planned(**bounds))
        self.engine = OffloadEngine(config, self.device)

    def step(self, actions: list[Action], names: str = "a b a b") -> None:
        saved: dict[ChunkKey, list[object]] = {}
        chunks = {}
        with self.engine.iteration(actions):
            for kind, key in actions:
                if kind == "F":
                    chunk = chunks[key] = self.engine.start_chunk(key)
                    saved[key] = [self._save(chunk, name, i) for i, name in enumerate(names.split())]
                    chunk.end_forward()
                    continue
                chunk = chunks.pop(key)
                chunk.begin_backward()
                for index in reversed(range(len(saved[key]))):
                    chunk.on_group_commit_backward(chunk.groups[index])
                    assert (chunk.tensor_pop(saved[key].pop()) == index).all()
                    chunk.on_group_start_backward()
        assert self.device.hazards == []

    @staticmethod
    def _save(chunk: object, name: str, value: int) -> object:
        size = 4 * GROUP_BYTES if name == "large" else GROUP_BYTES
        chunk.open_group(name)  # type: ignore[attr-defined]
        handle = chunk.tensor_push(torch.full((size,), value, dtype=torch.uint8))  # type: ignore[attr-defined]
        chunk.close_group()  # type: ignore[attr-defined]
        return handle


PIPELINE = one_forward_one_backward(2, 0, 4)


JOBS = {
    "five names": dense_job(MOST),
    "all names": dense_job(ALL),
    "chunks of one layer": dense_job(ALL, virtual=4),
    "four ranks": DEEP,
    "one rank": ONE_RANK,
}
each_job = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)


@pytest.mark.parametrize("bounds", [{}, {"max_inflight_bytes": 1300}, {"horizon_bytes": 2000}], ids=str)
@each_job
def test_without_a_budget_a_step_is_that_of_the_reactive_policy(job: PipelineJob, bounds: dict[str, int]) -> None:
    job = with_bounds(job, **bounds)
    reactive, planned = run_engine(job), run_engine(job, planned=True)
    assert planned.milliseconds == pytest.approx(reactive.milliseconds)
    assert planned.stalled == pytest.approx(reactive.stalled)
    for before, after in zip(reactive.stats, planned.stats, strict=True):
        assert after == before


@pytest.mark.parametrize("mib", [2000, 3000, 5000, 9000])
@each_job
def test_a_planned_budget_holds_and_costs_no_more_than_a_guessed_one(job: PipelineJob, mib: int) -> None:
    job = with_bounds(job, resident_bytes=mib)
    reactive, planned = run_engine(job), run_engine(job, planned=True)
    assert planned.milliseconds <= 1.0001 * reactive.milliseconds
    assert all(stats.peak_resident_bytes >> 10 <= mib for stats in planned.stats)
    assert sum(stats.prefetch_misses + stats.num_unplanned_groups for stats in planned.stats) == 0


def test_a_step_with_other_microbatches_has_its_own_plan_and_the_first_is_found_again() -> None:
    bench = Bench()
    bench.step(PIPELINE)
    bench.step(PIPELINE)
    first = bench.engine.plan
    bench.step(one_forward_one_backward(2, 0, 3))
    assert bench.engine.plan is not None and bench.engine.plan != first
    bench.step(PIPELINE)
    assert bench.engine.plan is first


@pytest.mark.parametrize("names", ["a c a b", "a b a", "a b a b b", "a large a b"])
def test_a_chunk_that_differs_goes_on_without_the_plan_and_is_counted(names: str) -> None:
    bench = Bench()
    for _ in range(2):
        bench.step(PIPELINE)
    bench.step(PIPELINE, names)
    assert (bench.engine.stats.num_unplanned_groups > 0) == (len(names.split()) >= 4)
    assert 0 < bench.engine.stats.copied_in_bytes <= bench.engine.stats.copied_out_bytes


@pytest.mark.parametrize("order", ["", "F0.0", "F0.0 B0.0 F0.0 B0.0", "F0.0 F2.0 B2.0 B0.0"])
def test_without_a_whole_schedule_there_is_no_plan(order: str) -> None:
    bench = Bench()
    actions = parse_actions(order)
    for _ in range(2):
        with bench.engine.iteration(actions):
            pass
    assert bench.engine.plan is None


def test_a_reset_in_the_middle_leaves_a_policy_that_plans() -> None:
    bench = Bench(resident_bytes=3 * GROUP_BYTES)
    for _ in range(2):
        bench.step(PIPELINE)
    bench.engine.begin_iteration(PIPELINE)
    chunk = bench.engine.start_chunk(PIPELINE[0].chunk)
    handle = bench._save(chunk, "a", 1)
    chunk.note_launch()
    bench.engine.reset_iteration()
    del handle
    for _ in range(2):  # what the broken step has marked is not of the next one's shape
        bench.step(PIPELINE)
        assert bench.engine.plan is not None and bench.engine.stats.num_unplanned_groups == 0


def _save_layer(engine: OffloadEngine, chunk: ChunkOffloadHandler, at_once: bool) -> list[PackedTensor]:
    """Run a layer whose first module, `shared`, runs again at its end, behind a delayed group and a declared input."""
    handles = []
    for name, traits in (("shared", _KEPT), ("attention", _DELAYED), ("mlp", None), ("shared", _KEPT)):
        is_kept = at_once and traits is _KEPT
        if is_kept:
            chunk.offload_kept_groups(name)
        chunk.open_group(name, traits if is_kept or traits is not _KEPT else None)
        tensor = torch.full((GROUP_BYTES if name != "mlp" else 8 * GROUP_BYTES,), len(handles), dtype=torch.uint8)
        handles.append(chunk.tensor_push(tensor))
        chunk.close_group()
        if name == "attention":
            engine.held_elsewhere(tensor)
        del tensor
    return handles


_KEPT, _DELAYED = GroupTraits(keep=True), GroupTraits(may_delay=True)


@pytest.mark.parametrize("actions", [no_pipelining(2), one_forward_one_backward(2, 0, 3)], ids=["at once", "1F1B"])
def test_a_recorded_step_makes_the_moves_of_its_plan_at_their_boundaries(actions: list[Action]) -> None:
    """Those of groups that are no longer kept, and of delayed ones that leave before outside references, included."""
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0, policy=Planned()), AdversarialDevice(1 << 16))
    at_once, saved = backward_at_once(actions), {}
    for step in range(4):
        if step == 3:
            engine.record()
        with engine.iteration(actions):
            for kind, key in actions:
                if kind == "F":
                    chunk = engine.start_chunk(key)
                    saved[key] = chunk, _save_layer(engine, chunk, key in at_once)
                    chunk.end_forward()
                    continue
                chunk, handles = saved.pop(key)
                chunk.begin_backward()
                for index in reversed(range(4)):
                    chunk.on_group_commit_backward(chunk.groups[index])
                    assert (chunk.tensor_pop(handles.pop()) == index).all()
                    chunk.on_group_start_backward()
    assert engine.stats.num_unplanned_groups == 0 and engine.stats.prefetch_misses == 0
    assert engine.plan is not None and engine.last_record is not None
    text = format_plan(engine.plan)
    assert "F0.0:held2 OUT 0.0:1" in text and ("F0.0:0/unkeep OUT 0.0:0" in text) == bool(at_once)
    planned = [(str(boundary), str(move)) for boundary, move in engine.plan.moves() if move.op is not DROP]
    made = [(m.boundary, f"{m.op.value} {m.group}") for m in engine.last_record.moves if m.op is not DROP]
    assert made == planned


@pytest.mark.parametrize("order", ["", "F0.0 F0.1", "F0.0 F0.1 F0.2 F0.3"])
@pytest.mark.parametrize("saves", [False, True])
def test_an_evaluation_in_between_changes_no_plan(order: str, saves: bool) -> None:
    bench = Bench()
    for _ in range(2):
        bench.step(PIPELINE)
    plan = bench.engine.plan
    assert plan is not None
    actions = parse_actions(order)
    with bench.engine.iteration(actions):
        for _, key in actions or PIPELINE[:2]:
            chunk = bench.engine.start_chunk(key)
            if saves:  # what no backward will read
                bench._save(chunk, "c", 0)
            chunk.end_forward()
    assert bench.engine.plan is None
    bench.step(PIPELINE)
    assert bench.engine.plan is plan and bench.engine.stats.num_unplanned_groups == 0


def test_moments_that_not_every_forward_has_are_not_planned() -> None:
    """A copy-out planned there would not be issued where the moment does not come."""
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0, policy=Planned()), AdversarialDevice(1 << 16))
    actions = one_forward_one_backward(2, 0, 3)
    for step in range(3):
        saved = {}
        with engine.iteration(actions):
            for kind, key in actions:
                if kind == "F":
                    chunk = engine.start_chunk(key)
                    chunk.open_group("attention", _DELAYED)
                    tensor = torch.full((GROUP_BYTES,), step, dtype=torch.uint8)
                    saved[key] = chunk, chunk.tensor_push(tensor)
                    chunk.close_group()
                    if key.microbatch == 0:
                        engine.held_elsewhere(tensor)
                    del tensor
                    chunk.end_forward()
                    continue
                chunk, handle = saved.pop(key)
                chunk.begin_backward()
                chunk.on_group_commit_backward(chunk.groups[0])
                assert (chunk.tensor_pop(handle) == step).all()
                del handle
    assert engine.plan is not None and "held" not in format_plan(engine.plan)
    assert engine.stats.num_offloaded_groups == 3 and engine.stats.num_unplanned_groups == 0
