# SPDX-License-Identifier: Apache-2.0
"""The policy that follows a plan: the moves of the reactive ones without a budget, fewer waits with one; and shares."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from offload_engine import (
    ChunkKey,
    ChunkOffloadHandler,
    GroupTraits,
    LowestPeak,
    OffloadConfig,
    OffloadEngine,
    Planned,
    ResidentBudget,
)
from offload_engine._chunk.progress import ChunkProgress
from offload_engine._saved.storage import TensorGroup
from offload_engine.planning.choices import Allowance, Choices, Slot
from offload_engine.planning.moves import DROP
from offload_engine.planning.plan import format_plan, validate_plan
from offload_engine.planning.simulate import PipelineJob
from offload_engine.schedule import Action, backward_at_once, no_pipelining, one_forward_one_backward, parse_actions
from tests.adversarial import AdversarialDevice
from tests.dense_jobs import ALL, DEEP, MOST, ONE_RANK, dense_job, with_bounds
from tests.engine_on_clocks import run_engine
from tests.engine_state import release_all
from tests.lookups import present

GROUP_BYTES = 256


Save = Callable[[OffloadEngine, ChunkOffloadHandler], list[object]]


class Bench:
    """Chunks of groups that are equal, but for those named `large`, on a device that delays copies until a wait."""

    def __init__(self, config: OffloadConfig | None = None, /, **bounds: int) -> None:
        self.device = AdversarialDevice(host_capacity=1 << 16)
        config = config or OffloadConfig(policy=Planned(**bounds))
        self.engine = OffloadEngine(config.replace(min_tensor_bytes=0), self.device)

    @property
    def policy(self) -> Any:
        return self.engine._executor.policy

    def step(
        self, actions: Sequence[Action], save: str | Save = "a b a b", told: Sequence[Action] | None = None
    ) -> None:
        """Run a step whose chunks save as `save` does, or groups of the names in it; `told`: to the engine."""
        saved: dict[ChunkKey, tuple[ChunkOffloadHandler, list[object]]] = {}
        if isinstance(save, str):
            names = save.split()
            save = lambda _, chunk: [save_group(chunk, name, i) for i, name in enumerate(names)]  # noqa: E731
        with self.engine.iteration(actions if told is None else told):
            for kind, key in actions:
                if kind == "F":
                    chunk = self.engine.start_chunk(key)
                    saved[key] = chunk, save(self.engine, chunk)
                    chunk.end_forward()
                    continue
                chunk, handles = saved.pop(key)
                chunk.begin_backward()
                for index in reversed(range(len(handles))):
                    chunk.on_group_commit_backward(chunk.groups[index])
                    assert (chunk.tensor_pop(handles.pop()) == index).all()
                    chunk.on_group_start_backward()
        assert self.device.hazards == []

    def check_planned(self) -> None:
        assert self.engine.plan is not None and self.engine.stats.num_unplanned_groups == 0


def save_group(
    chunk: ChunkOffloadHandler,
    name: str,
    value: int,
    traits: GroupTraits | None = None,
    holder: OffloadEngine | None = None,
    nbytes: int = GROUP_BYTES,
) -> object:
    """Save one tensor in a group; with a `holder` it is held elsewhere, too."""
    chunk.open_group(name, traits)
    tensor = torch.full((8 * nbytes if name == "large" else nbytes,), value, dtype=torch.uint8)
    handle = chunk.tensor_push(tensor)
    chunk.close_group()
    if holder is not None:
        holder.held_elsewhere(tensor)
    return handle


PIPELINE = one_forward_one_backward(2, 0, 4)


def learned(**bounds: int) -> Bench:
    """Return a bench whose second step like the first has had a plan, as the next ones have."""
    bench = Bench(**bounds)
    for _ in range(2):
        bench.step(PIPELINE)
    bench.check_planned()
    return bench


KEPT, DELAYED = GroupTraits(keep=True), GroupTraits(may_delay=True)
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
    assert planned.stats == reactive.stats


@pytest.mark.parametrize("mib", [2000, 3000, 5000, 9000])
@each_job
def test_a_planned_budget_holds_and_costs_no_more_than_a_guessed_one(job: PipelineJob, mib: int) -> None:
    job = with_bounds(job, resident_bytes=mib)
    reactive, planned = run_engine(job), run_engine(job, planned=True)
    assert planned.milliseconds <= 1.0001 * reactive.milliseconds
    assert all(stats.peak_resident_bytes >> 10 <= mib for stats in planned.stats)
    assert sum(stats.prefetch_misses + stats.num_unplanned_groups for stats in planned.stats) == 0


def test_each_shape_of_a_step_has_its_own_plan_from_the_second_on_and_the_first_is_found_again() -> None:
    bench, reactive = Bench(), Bench(OffloadConfig(policy=LowestPeak()))
    for each in (bench, reactive):
        each.step(PIPELINE)
    assert not bench.engine.plan and bench.engine.stats == reactive.engine.stats
    bench.step(PIPELINE)
    first = bench.engine.plan
    assert first is not None and "OUT 0.0:0" in format_plan(first)
    validate_plan(first, PIPELINE, bench.policy._shapes)
    bench.step(one_forward_one_backward(2, 0, 3))
    bench.check_planned()
    assert bench.engine.plan != first
    bench.step(PIPELINE)
    assert bench.engine.plan is first
    for names in ("a large a b", "a b a b", "a b a b"):
        bench.step(PIPELINE, names)
    assert bench.policy.leaving.largest_bytes == GROUP_BYTES, "of the plan, not of all steps"


@pytest.mark.parametrize("names", ["a c a b", "a b a", "a b a b b", "a large a b"])
def test_a_chunk_that_differs_goes_on_without_the_plan_and_is_counted(names: str) -> None:
    bench = learned()
    bench.step(PIPELINE, names)
    assert (bench.engine.stats.num_unplanned_groups > 0) == (len(names.split()) >= 4)
    assert 0 < bench.engine.stats.copied_in_bytes <= bench.engine.stats.copied_out_bytes


@pytest.mark.parametrize(
    ("key", "nbytes", "num_unplanned"),
    [
        (PIPELINE[0].chunk, GROUP_BYTES + GROUP_BYTES // 8, 0),  # a group may have an eighth more than planned
        (PIPELINE[0].chunk, GROUP_BYTES + GROUP_BYTES // 8 + 1, 1),
        (ChunkKey(1, 0), GROUP_BYTES, 1),  # chunks that the schedule does not have
        (ChunkKey(0, 99), GROUP_BYTES, 1),
    ],
)
def test_a_group_or_a_chunk_that_the_plan_does_not_have(key: ChunkKey, nbytes: int, num_unplanned: int) -> None:
    bench = learned()
    with bench.engine.iteration(PIPELINE):
        handle = save_group(bench.engine.start_chunk(key), "a", 0, nbytes=nbytes)
        stats = bench.engine.stats
        assert (stats.num_unplanned_groups, stats.num_offloaded_groups) == (num_unplanned, 1)
        del handle


@pytest.mark.parametrize(("are_released", "num_copied_in"), [(True, 4), (False, 2)])
def test_of_a_chunk_that_differs_one_group_comes_back_ahead_of_the_backward(
    are_released: bool, num_copied_in: int
) -> None:
    """It is copied in or recalled, and the groups behind it are left alone, as are those that have been read."""
    bench = learned()
    copied = bench.device.num_copies["in"]
    with bench.engine.iteration(PIPELINE):
        chunk, names = bench.engine.start_chunk(PIPELINE[0].chunk), "c b a b".split()
        handles = [save_group(chunk, name, i, GroupTraits(read_once=True)) for i, name in enumerate(names)]
        if are_released:  # else the last two are leaving
            release_all(bench.engine)
        for index in (3, 2, 1, 0):
            chunk.on_group_commit_backward(chunk.groups[index])
            to_come = [chunk.groups[i] for i in range(index + are_released)]
            away = [group.index for group in to_come if group.on_host_bytes or group.leaving_bytes]
            assert away == list(range(index - 1))
            assert (chunk.tensor_pop(handles[index]) == index).all()
            chunk.on_group_start_backward()
        assert bench.device.num_copies["in"] - copied == num_copied_in
        assert bench.engine.stats.prefetch_misses == are_released, "the first"
        del handles


def test_without_a_whole_schedule_there_is_no_plan() -> None:
    for order in ("", "F0.0", "F0.0 B0.0 F0.0 B0.0", "F0.0 F2.0 B2.0 B0.0"):
        bench = Bench()
        for _ in range(2):
            with bench.engine.iteration(parse_actions(order)):
                pass
        assert bench.engine.plan is None, order


def test_steps_without_a_schedule_follow_the_plan_of_what_a_budget_has_seen() -> None:
    bench, actions = Bench(), parse_actions("F0.0 B0.0")
    for seen in (actions, ()):
        bench.policy.allow(Allowance(actions=tuple(seen)))
        for _ in range(2):
            bench.step(actions, told=())
            assert (bench.engine.plan is not None) == (bool(seen) and _ > 0)


def test_shapes_are_forgotten_where_recomputation_changes() -> None:
    """Bytes of shapes only grow, so that what is recomputed would leave by the plan of larger groups."""
    bench, kept = learned(), frozenset({Slot(0, 0, "a", 0)})
    for choices, is_known in ((Choices(kept), True), (Choices(recomputed=kept), False)):
        bench.policy.allow(Allowance(choices))
        assert (bench.policy.shapes(PIPELINE) is not None) == is_known


def test_a_reset_in_the_middle_leaves_a_policy_that_plans() -> None:
    bench = learned(resident_bytes=3 * GROUP_BYTES)
    plan = bench.engine.plan
    bench.engine.begin_iteration(PIPELINE)
    for kind, key in PIPELINE:
        if kind == "F":
            chunk = bench.engine.start_chunk(key)
            save_group(chunk, "a", 1, holder=bench.engine)
            chunk.note_launch()
            chunk.begin_tail()
    bench.engine.reset_iteration()
    for _ in range(2):  # what the broken step has marked is not of the next one's shape
        bench.step(PIPELINE)
        bench.check_planned()
        assert bench.engine.plan is plan


def test_a_chunk_that_differed_follows_the_plan_of_a_later_step_again() -> None:
    bench = learned(resident_bytes=1 << 20)
    for names in ("a c a b", "a b a b", "a b a b"):
        bench.step(PIPELINE, names)
    bench.check_planned()
    assert bench.engine.stats.copied_out_bytes == 0, "all of it fits, and only unplanned chunks leave whatever fits"


def test_what_is_kept_is_in_no_plan_but_leaves_at_its_commit_once_it_has_grown() -> None:
    def save(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> list[object]:
        handles = [save_group(chunk, name, i, nbytes=sizes[-1]) for i, name in enumerate("abab")]
        gone = [group.leaving_bytes + group.on_host_bytes > 0 for group in chunk.groups]
        assert gone == [sizes[-1] > GROUP_BYTES, True] * 2
        return handles

    bench, sizes = learned(), [GROUP_BYTES + 8, GROUP_BYTES]
    kept = {slot: GROUP_BYTES for slot in bench.policy.slots() if slot.name == "a"}
    bench.engine._keeping.allow(Allowance(Choices(frozenset(kept)), kept, 1 << 20))
    while sizes:
        bench.step(PIPELINE, save)
        bench.check_planned()
        assert ":0" not in format_plan(present(bench.engine.plan))
        sizes.pop()


@pytest.mark.parametrize("bounds", [{}, {"resident_bytes": 2 * GROUP_BYTES}], ids=str)
def test_completed_copies_are_released_unless_their_room_is_budgeted(bounds: dict[str, int]) -> None:
    """With a plan and without one. Within a budget it must not depend on copies what an allocator reserves."""
    bench = Bench(**bounds)
    for _ in range(2):
        bench.step(PIPELINE)
        assert bench.policy.releases_completed is not bool(bounds)
    bench.check_planned()
    bench.policy.allow(Allowance(Choices(frozenset({Slot(0, 0, "a", 0)}))))
    bench.step(PIPELINE)
    assert not bench.policy.releases_completed


@pytest.mark.parametrize("bounds", [{}, {"resident_bytes": 1 << 20}], ids=str)
def test_no_chunk_outlives_its_step_planned_or_not(bounds: dict[str, int]) -> None:
    """Policies keep nothing alive that a step has made: groups hold events and, in retained graphs, storages."""

    def alive() -> set[int]:
        gc.collect()
        return {id(each) for each in gc.get_objects() if isinstance(each, ChunkProgress | TensorGroup)}

    def save(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> list[object]:
        shared = save_group(chunk, "shared", 0, KEPT)
        chunk.offload_kept_groups()
        return [shared, save_group(chunk, "attention", 1, DELAYED)]

    bench, before = Bench(**bounds), alive()
    for _ in range(3):  # the first goes without a plan
        bench.step(PIPELINE, save)
        assert not alive() - before
    bench.check_planned()
    bench.engine.begin_iteration(PIPELINE)
    save(bench.engine, bench.engine.start_chunk(PIPELINE[0].chunk))
    bench.engine.reset_iteration()
    assert not alive() - before


def test_a_delayed_group_leaves_at_once_where_the_link_is_behind() -> None:
    """So it is in the second chunk: what the first has copied out fills the limit in flight."""
    are_delayed: list[bool] = []

    def save(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> list[object]:
        handles = [save_group(chunk, "a", 0), save_group(chunk, "attention", 1, DELAYED)]
        are_delayed.append(not chunk.groups[1].leaving_bytes)
        return handles

    bench = Bench()
    for _ in range(3):
        bench.step(one_forward_one_backward(2, 0, 2), save)
    bench.check_planned()
    assert are_delayed[2:] == [True, False] * 2
    bench.policy.allow(Allowance(Choices(frozenset({Slot(0, 0, "b", 0)}))))
    bench.step(one_forward_one_backward(2, 0, 2), save)
    assert are_delayed[6:] == [True, True], "by a plan alone, completed copies are in flight as well"


@pytest.mark.parametrize("actions", [no_pipelining(2), one_forward_one_backward(2, 0, 3)], ids=["at once", "1F1B"])
def test_a_recorded_step_makes_the_moves_of_its_plan_at_their_boundaries(actions: list[Action]) -> None:
    """Those of groups that are no longer kept, and of delayed ones that leave before outside references, included.

    Each chunk is a layer whose first module, `shared`, runs again at its end, behind a delayed group and a declared
    input.
    """
    at_once = backward_at_once(actions)

    def save(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> list[object]:
        shared = KEPT if chunk.key in at_once else None
        handles: list[object] = []
        for name, traits in (("shared", shared), ("attention", DELAYED), ("large", None), ("shared", shared)):
            if traits is KEPT:
                chunk.offload_kept_groups(name)
            handles.append(save_group(chunk, name, len(handles), traits, engine if traits is DELAYED else None))
        return handles

    bench = Bench()
    for _ in range(3):
        bench.step(actions, save)
    bench.engine.record()
    bench.step(actions, save)
    bench.check_planned()
    assert bench.engine.stats.prefetch_misses == 0
    assert bench.engine.plan is not None and bench.engine.last_record is not None
    text = format_plan(bench.engine.plan)
    assert "F0.0:held2 OUT 0.0:1" in text and ("F0.0:0/unkeep OUT 0.0:0" in text) == bool(at_once)
    planned = [(str(boundary), str(move)) for boundary, move in bench.engine.plan.moves() if move.op is not DROP]
    made = [(m.boundary, f"{m.op.value} {m.group}") for m in bench.engine.last_record.moves if m.op is not DROP]
    assert made == planned


@pytest.mark.parametrize("order", ["", "F0.0 F0.1", "F0.0 F0.1 F0.2 F0.3"])
@pytest.mark.parametrize("saves", [False, True])
def test_an_evaluation_in_between_changes_no_plan(order: str, saves: bool) -> None:
    bench, actions = learned(), parse_actions(order)
    plan = bench.engine.plan
    with bench.engine.iteration(actions):
        for _, key in actions or PIPELINE[:2]:
            chunk = bench.engine.start_chunk(key)
            if saves:  # what no backward will read
                save_group(chunk, "c", 0)
            chunk.end_forward()
    assert bench.engine.plan is None
    bench.step(PIPELINE)
    bench.check_planned()
    assert bench.engine.plan is plan


@pytest.mark.parametrize("has_moment", [lambda step, microbatch: microbatch == 0, lambda step, microbatch: step == 0])
def test_moments_that_not_every_forward_has_are_not_planned(has_moment: Callable[[int, int], bool]) -> None:
    """A copy-out planned there would not be issued where the moment does not come."""
    bench = Bench()
    for step in range(3):

        def save(engine: OffloadEngine, chunk: ChunkOffloadHandler, step: int = step) -> list[object]:
            holder = engine if has_moment(step, chunk.key.microbatch) else None
            return [save_group(chunk, "attention", 0, DELAYED, holder)]

        bench.step(one_forward_one_backward(2, 0, 3), save)
    bench.check_planned()
    assert bench.engine.plan is not None and "held" not in format_plan(bench.engine.plan)
    assert bench.engine.stats.num_offloaded_groups == 3


@pytest.mark.parametrize("other", ["one more group", "traits", "a tail", "a launch"])
def test_chunks_that_differ_in_more_than_bytes_have_no_plan_until_they_are_equal(other: str) -> None:
    def save(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> list[object]:
        differs = {other} if chunk.key == PIPELINE[0].chunk else set()
        handles = [save_group(chunk, "a", 0, DELAYED if "traits" in differs else None)]
        if "a launch" in differs:
            chunk.note_launch()
        if "a tail" in differs:
            chunk.begin_tail()
        if "one more group" in differs:
            handles.append(save_group(chunk, "a", 1))
        return handles

    bench = Bench()
    for _ in range(2):
        bench.step(PIPELINE, save)
        assert bench.engine.plan is None and bench.policy.slots() == frozenset()
    for names in ("a b", "a b", "a c", "a c"):
        bench.step(PIPELINE, names)
    bench.check_planned()


SIZES = [4, 2, 1, 1]  # KiB that the groups of a chunk save


def sizes_that_leave(bench: Bench, num_waiting: int = 1, sizes: Sequence[int] = SIZES) -> list[int]:
    """Run a step; return the sizes, in KiB, of the groups that leave in its first chunk."""
    left: list[int] = []

    def save(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> list[object]:
        handles = [save_group(chunk, "a", i, GroupTraits(layer=i), nbytes=kib << 10) for i, kib in enumerate(sizes)]
        if chunk.key.microbatch == 0:
            groups = zip(chunk.groups, sizes, strict=True)
            left.extend(kib for group, kib in groups if group.leaving_bytes + group.on_host_bytes)
        return handles

    bench.step(one_forward_one_backward(num_waiting, 0, 4) if num_waiting > 1 else no_pipelining(4), save)
    return left


@pytest.mark.parametrize(
    ("settings", "num_waiting", "leaving"),
    [
        ({"fraction": 0.9}, 1, [4, 2, 1]),
        ({"fraction": 0.75}, 1, [4, 2]),
        ({"fraction": 0.74}, 1, [4]),
        ({"fraction": 0.0}, 1, []),
        # Bytes that stay are shared by the chunks that wait.
        ({"kept_bytes": 2 << 10}, 1, [4, 2]),
        ({"kept_bytes": 2 << 10}, 2, [4, 2, 1]),
        ({"kept_bytes": 4 << 10}, 2, [4, 2]),
        ({"kept_bytes": 99 << 10}, 1, []),
    ],
)
def test_a_share_leaves_from_the_second_step_on(settings: dict[str, Any], num_waiting: int, leaving: list[int]) -> None:
    bench = Bench(OffloadConfig(**settings))
    assert [sizes_that_leave(bench, num_waiting) for _ in range(3)] == [SIZES, leaving, leaving]


def test_a_fraction_is_of_what_the_step_before_has_saved_unless_that_raised() -> None:
    bench = Bench(OffloadConfig(fraction=0.5))
    sizes_that_leave(bench)
    with pytest.raises(ZeroDivisionError), bench.engine.iteration(no_pipelining(1)):
        save_group(bench.engine.start_chunk(), "a", 0)
        raise ZeroDivisionError
    assert sizes_that_leave(bench) == [4]
    assert sizes_that_leave(bench, sizes=[1, 1, 1, 1]) == [1, 1, 1, 1]
    assert sizes_that_leave(bench, sizes=[1, 1, 1, 1]) == [1, 1]


def test_a_group_may_have_a_threshold_of_its_own() -> None:
    engine = Bench().engine
    with engine.iteration(no_pipelining(1)):
        chunk = engine.start_chunk()
        for least in (0, 256, 257):
            chunk.tensor_pop(save_group(chunk, "a", 0, GroupTraits(min_bytes=least), nbytes=256))
        assert [group.nbytes for group in chunk.groups] == [256, 256, 0]


def test_bad_shares_are_rejected() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"fraction": 1.5}, "fraction must be from 0 to 1, got 1.5"),
        ({"kept_bytes": -1}, "kept_bytes must not be negative"),
        ({"fraction": "half"}, "fraction must be a number"),
        ({"fraction": 0.5, "policy": ResidentBudget(1)}, "fraction=0.5 and policy=.* both decide what stays"),
        ({"kept_bytes": 7, "policy": Planned()}, "kept_bytes=7 and policy=.* both decide what stays"),
        ({"fraction": 0.5, "gpu_budget": 1}, "fraction=0.5 and gpu_budget=1 both decide"),
    ]
    for settings, message in cases:
        with pytest.raises((TypeError, ValueError), match=message):
            OffloadConfig(**settings)
