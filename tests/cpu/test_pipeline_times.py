# SPDX-License-Identifier: Apache-2.0
"""Steps of a pipeline, timed by what each of its ranks does."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from offload_engine._budget.measure import Interval, MeasuringRecorder
from offload_engine._budget.stages import Stages
from offload_engine._budget.times import TimedPart, action_times, timed_parts, with_times
from offload_engine._observe.record import Awaited, WaitRecord
from offload_engine.planning.choose import Chosen
from offload_engine.planning.moves import (
    BACKWARD,
    CHUNK_BACKWARD,
    COMMIT,
    FORWARD,
    FORWARD_END,
    HEAD,
    ITERATION_END,
    LOSS_DONE,
    Boundary,
)
from offload_engine.planning.pipeline import Pipeline, RankWork
from offload_engine.planning.plan import make_plan
from offload_engine.planning.predict import Prediction
from offload_engine.planning.shapes import ChunkShape, GroupShape
from offload_engine.planning.simulate import PipelineJob, Simulation, simulate
from offload_engine.planning.steps import Decision
from offload_engine.schedule import Action, ChunkKey
from tests.dense_jobs import ALL, dense_job, simulate_planned
from tests.meeting import Meeting

LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)]


def works_of(job: PipelineJob, step: Simulation, busy: float = 0.0) -> tuple[RankWork, ...]:
    works = []
    for rank, outcome in zip(job.ranks, step.ranks, strict=True):
        compute = tuple(each.milliseconds - each.stalled_ms for each in outcome.of_actions)
        works.append(RankWork(rank.actions, compute, tuple(each.stalled_ms for each in outcome.of_actions), busy))
    return tuple(works)


@pytest.mark.parametrize(("pipeline", "virtual"), LAYOUTS)
def test_a_step_takes_as_long_as_its_ranks_need_for_their_actions(pipeline: int, virtual: int) -> None:
    job = dense_job(ALL, pipeline=pipeline, virtual=virtual)
    still, moving = simulate(job, [make_plan([])] * pipeline), simulate_planned(job)
    for step in (still, moving):
        works = works_of(job, step)
        assert Pipeline(works).step_ms() == pytest.approx(step.milliseconds)
        assert Pipeline(works, 7.0).step_ms() == pytest.approx(step.milliseconds + 7)
    alone = max(sum(work.milliseconds(1.0)) for work in works_of(job, still))
    assert pipeline == 1 or still.milliseconds > 1.05 * alone


def test_compute_of_busy_ranks_takes_longer_by_the_ratio() -> None:
    job = dense_job(ALL)
    step = simulate(job, [make_plan([])] * 2)
    pipeline = Pipeline(works_of(job, step, busy=1.0))
    assert pipeline.step_ms(1.1) == pytest.approx(1.1 * step.milliseconds)
    assert Pipeline(works_of(job, step, busy=0.5)).step_ms(1.1) == pytest.approx(1.05 * step.milliseconds)
    for ratio in (0.9, 1.0, 1.08):
        assert pipeline.busy_ratio(ratio * step.milliseconds, 0.75, 1.2) == pytest.approx(ratio, abs=1e-4)
    assert pipeline.busy_ratio(2 * step.milliseconds, 0.75, 1.2) == pytest.approx(1.2, abs=1e-4)


def test_ranks_that_wait_for_each_other_for_ever_have_no_time() -> None:
    works = works_of(job := dense_job(ALL, virtual=1), simulate_planned(job))
    with pytest.raises(ValueError, match="wait for each other"):
        Pipeline(backwards_first(works)).step_ms()


def backwards_first(works: tuple[RankWork, ...]) -> tuple[RankWork, ...]:
    first, *others = works
    return first._replace(actions=tuple(sorted(first.actions, key=lambda action: action.kind))), *others


def test_devices_that_wait_for_other_stages_are_expected_to_clock_less_lower() -> None:
    assert Stages().expected_ratio(1.06) == 1.06 and Stages(1, 2).expected_ratio(1.06) == pytest.approx(1.03)


def chosen_of(best_ms: float = 1.0) -> Chosen:
    best = Prediction(Decision(), 1, 1, best_ms, {}, {}, {}, {}, 0)
    return Chosen(best, best, best, (), most_busy_ratio=1.2)


def stages_of(works: tuple[RankWork, ...], floor_ms: float) -> list[Stages]:
    """Return the stages of all ranks, which have met: they do as in the measured step, at twice the speed."""
    meeting, num = Meeting(len(works)), len(works)
    stages = [Stages(rank, num) for rank in range(num)]
    longest = max(len(work.actions) for work in works)

    def meet(rank: int) -> None:
        fast = works[rank]._replace(compute_ms=tuple(ms / 2 for ms in works[rank].compute_ms))
        took_ms = tuple(works[rank].milliseconds(1.0))
        stages[rank].meet(partial(meeting.agree, rank), took_ms, fast, longest, floor_ms)

    with ThreadPoolExecutor(num) as threads:
        list(threads.map(meet, range(num)))
    return stages


def test_stages_tell_each_other_what_they_do() -> None:
    job = dense_job(ALL, pipeline=4)
    step = simulate(job, [make_plan([])] * 4)
    works = works_of(job, step, busy=1.0)
    for rank, stages in enumerate(stages_of(works, step.milliseconds + 5)):
        fast = works[rank]._replace(compute_ms=tuple(ms / 2 for ms in works[rank].compute_ms))
        assert stages.timed(chosen_of(), fast).step_ms == pytest.approx(step.milliseconds / 2 + 5, abs=1e-3)
        assert stages.busy_ratio(1.1 * step.milliseconds / 2 + 5, chosen_of(), fast) == pytest.approx(1.1, abs=1e-4)
        slow = stages.timed(chosen_of(), works[rank]).step_ms
        assert step.milliseconds / 2 + 5 < slow < step.milliseconds + 5, "the others are at twice the speed"


def test_what_other_stages_do_is_between_the_measured_step_and_the_decided_one() -> None:
    """Else a curve would begin with one stage that offloads everything beside others that do not."""
    job = dense_job(ALL, pipeline=4)
    step = simulate(job, [make_plan([])] * 4)
    works = works_of(job, step)
    for rank, stages in enumerate(stages_of(works, step.milliseconds + 5)):
        fast = works[rank]._replace(compute_ms=tuple(ms / 2 for ms in works[rank].compute_ms))
        for share, own in ((0.0, works[rank]), (0.5, works[rank].towards(fast, 0.5)), (1.0, fast)):
            expected = (1 - share / 2) * step.milliseconds + 5
            assert stages.milliseconds(own, 1.0, share) == pytest.approx(expected, abs=1e-3)
        assert stages.milliseconds(None, 1.0, 1.0) is None


def test_steps_with_other_actions_are_not_timed_in_the_pipeline() -> None:
    works = works_of(job := dense_job(ALL), step := simulate_planned(job))
    stages, other = stages_of(works, step.milliseconds)[0], dense_job(ALL, num_microbatches=6)
    others = works_of(other, simulate_planned(other))
    assert stages.timed(chosen_of(), works[0]).pipeline_ms is not None
    assert stages.timed(chosen_of(), others[0]) == stages.timed(chosen_of(), None) == chosen_of()
    assert stages.busy_ratio(1.0, chosen_of(), others[0]) is None
    assert Stages(0, 2).timed(chosen_of(), works[0]) == chosen_of(), "they have not met"


def test_stages_of_no_schedule_are_timed_alone(caplog: pytest.LogCaptureFixture) -> None:
    works = works_of(job := dense_job(ALL, virtual=1), step := simulate_planned(job))
    caplog.set_level("INFO", "offload_engine")
    for stages, work in zip(stages_of(backwards_first(works), step.milliseconds), backwards_first(works), strict=True):
        assert stages.timed(chosen_of(), work) == chosen_of()
    assert "as if this stage were the only one" in caplog.text


def test_a_head_that_begins_in_two_modules_is_timed_as_a_whole() -> None:
    """Its time would be that of one module, or of none."""
    chunk, other = ChunkKey(0, 0), ChunkKey(0, 1)
    shape = ChunkShape((GroupShape("mlp", 0, 1),), has_head=True)
    kinds = ((FORWARD, 1.0), (COMMIT, 5.0), (HEAD, 2.0), (HEAD, 3.0), (FORWARD_END, 0.5), (CHUNK_BACKWARD, 0.25))
    intervals, end = [], 0.0
    for key in (chunk, other):
        for kind, ms in (*kinds, (LOSS_DONE, 4.0)):
            boundary = Boundary(kind, key, 0 if kind is COMMIT else -1)
            intervals.append(Interval(boundary, end, end := end + ms))
    [found] = with_times((shape,), timed_parts((shape,), intervals, ()))
    assert (found.rest_ms, found.head_ms, found.head_backward_ms) == (2.0, 3.5, 4.0)
    assert [group.forward_ms for group in found.groups] == [5.0]


def test_a_backward_that_comes_back_to_a_group_is_timed_as_a_whole() -> None:
    """Its time would be the median of its pieces. All groups up to the farthest are in use by then."""
    shape = ChunkShape(tuple(GroupShape("layers.0", 0, 1) for _ in range(3)))
    intervals, end = [], 0.0
    for key, last in ((ChunkKey(0, 0), FORWARD), (ChunkKey(0, 1), ITERATION_END)):
        reached = ((CHUNK_BACKWARD, -1, 1.0), (BACKWARD, 2, 0.0), (BACKWARD, 0, 2.0), (BACKWARD, 1, 0.25))
        for kind, index, ms in (*reached, (BACKWARD, 2, 0.5), (last, -1, 64.0)):
            intervals.append(Interval(Boundary(kind, key, index), end, end := end + ms))
    timed = timed_parts((shape,), intervals, [WaitRecord(Awaited.COPY_IN, "0", 3.0, 3.25)])
    assert [group.backward_ms for group in with_times((shape,), timed)[0].groups] == [64.625, 0.0, 2.0]
    assert [(each.part[1], each.whole_ms) for each in timed if each.part[1] >= 0] == 2 * [(2, 2.0), (0, 64.75)]
    assert action_times([Action("B", ChunkKey(0, 0))], timed) == (66.75,)


def measured_step(lag_ms: float, engine_ms: float, bubble_ms: float = 0.0) -> list[Interval]:
    """Return a step of two microbatches, each with one group, of 5 ms; the last backward ends in a pipeline bubble."""
    forwards = ((FORWARD, 1.0), (COMMIT, 5.0), (FORWARD_END, 0.5))
    backwards = ((CHUNK_BACKWARD, 0.0), (BACKWARD, 1.5), (ITERATION_END, 7.0))
    intervals, end = [], 0.0
    for key in (ChunkKey(0, 0), ChunkKey(0, 1)):
        for kind, ms in (*forwards, *backwards):
            boundary = Boundary(kind, key, 0 if kind in (COMMIT, BACKWARD) else -1)
            ms += bubble_ms if kind is ITERATION_END and key.microbatch else 0.0
            intervals.append(Interval(boundary, end, end := end + ms, lag_ms, engine_ms))
    return intervals


@pytest.mark.parametrize(("lag_ms", "expected_ms"), [(0.0, 4.0), (-0.1, 4.0), (2.0, 4.0), (3.0, 5.0)])
def test_a_device_that_waits_for_the_host_also_waits_for_the_engine(lag_ms: float, expected_ms: float) -> None:
    """A device that is behind its host does not: the engine's work is done meanwhile."""
    shape = ChunkShape((GroupShape("mlp", 0, 1),))
    timed = timed_parts((shape,), measured_step(lag_ms, engine_ms=1.0), ())
    assert with_times((shape,), timed)[0].groups[0].forward_ms == expected_ms
    actions = [each.action for each in timed if each.part[-1] == "forward_ms"]
    assert action_times(actions, timed) == (5.5, 5.5), "as it was, with everything"


def part_of(index: int, milliseconds: float, is_late: bool) -> TimedPart:
    return TimedPart((0, index, "forward_ms"), Action("F", ChunkKey(0, 0)), milliseconds, 0.0, 0.25, is_late)


def test_where_the_device_waits_for_the_host_other_microbatches_and_layers_tell_the_time() -> None:
    shape = ChunkShape(tuple(GroupShape(name, layer, nbytes) for layer, name, nbytes in LAYERS))
    late, timely = partial(part_of, is_late=True), partial(part_of, is_late=False)

    def times(*parts: TimedPart) -> list[float]:
        return [group.forward_ms for group in with_times((shape,), parts)[0].groups]

    assert times(late(0, 9.0), timely(0, 3.0), timely(0, 3.5)) == [3.25, 0, 0, 0], "of the other microbatches"
    assert times(late(0, 9.0), timely(0, 3.0), late(0, 8.0), late(2, 7.0), timely(2, 2.0))[::2] == [2.5, 2.0], "of both"
    assert times(late(0, 2.0), timely(2, 3.0))[::2] == [2.0, 3.0], "it took no longer than it took"
    assert times(late(0, 5.0), late(0, 3.0), late(2, 4.0), late(2, 6.0))[::2] == [3.75, 3.75], "without the engine"
    assert times(late(1, 9.0), timely(3, 2.0))[1::2] == [8.75, 2.0], "another size is another part"


def test_layers_that_are_named_by_number_are_alike() -> None:
    shape = ChunkShape(tuple(GroupShape(f"model.layers.{layer}", layer, 4) for layer in (1, 12) for _ in range(2)))
    [found] = with_times((shape,), [part_of(0, 9.0, True), part_of(2, 3.0, False), part_of(1, 8.0, True)])
    assert [group.forward_ms for group in found.groups] == [3.0, 7.75, 3.0, 0.0], "the second of each is another part"


LAYERS = ((0, "norm", 1), (0, "mlp", 2), (1, "norm", 1), (1, "mlp", 3))


def test_waits_for_other_ranks_behind_a_backward_are_no_time_of_an_action() -> None:
    shape = ChunkShape((GroupShape("mlp", 0, 1),))
    actions = [Action(kind, ChunkKey(0, number)) for number in range(2) for kind in ("F", "B")]
    for bubble_ms in (0.0, 100.0):
        timed = timed_parts((shape,), measured_step(9.0, 0.0, bubble_ms), ())
        took_ms = action_times(actions, timed)
        assert took_ms[:3] == (5.5, 8.5, 5.5) and took_ms[3] == 8.5 + bubble_ms / 2


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_recorder_tells_the_time_of_the_engine_and_how_far_the_device_is_behind(device: str) -> None:
    """In ms of a device that comes to each mark 5 ms after the host; on a CPU there is nothing behind the host."""
    now_ms = [0.0]
    gauge = mock.Mock(**{"record.return_value": False, "count.return_value": 0, "peak_bytes.return_value": 0})
    clocks: Any = mock.Mock(torch_device=torch.device(device))
    clocks.mark_time.side_effect = lambda stream: now_ms[0] + 5
    clocks.milliseconds_between.side_effect = lambda first, last: last
    recorder = MeasuringRecorder(clocks, gauge)
    recorder._clock = lambda: round(1e6 * now_ms[0])
    recorder._origin = recorder._origin._replace(host_ns=0)
    for kind, moved_ms in ((FORWARD, 2.0), (FORWARD_END, 1.0), (CHUNK_BACKWARD, 0.0)):
        now_ms[0] += 10
        recorder.note_boundary(kind, ChunkKey(0, 0))
        now_ms[0] += moved_ms
        recorder.note_moved()
    found = recorder.intervals()
    assert [(each.end_ms, each.engine_ms) for each in found] == [(15.0, 0.0), (27.0, 2.0), (38.0, 1.0)]
    assert [each.lag_ms for each in found] == [5.0 if device == "cuda" else float("inf")] * 3
