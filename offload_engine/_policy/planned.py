# SPDX-License-Identifier: Apache-2.0
"""`PlannedPolicy`: answers boundaries with the moves of a plan that was made before the step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from offload_engine._chunk.progress import ChunkProgress
from offload_engine._policy.leaving import LeavingQueue
from offload_engine._policy.policy import Move, Policy
from offload_engine._policy.resident import ResidentBudgetPolicy
from offload_engine._policy.shape_log import ShapeLog
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.storage import TensorGroup
from offload_engine.planning.choices import Allowance, Slot
from offload_engine.planning.moves import (
    BACKWARD,
    BACKWARD_END,
    COMMIT,
    DROP,
    FORWARD,
    HELD,
    IN,
    ITERATION_END,
    LAUNCH,
    OUT,
    UNKEEP,
    Boundary,
    BoundaryKind,
)
from offload_engine.planning.plan import Plan
from offload_engine.planning.planner import Planner
from offload_engine.planning.shapes import Bounds, Shapes, largest_bytes
from offload_engine.schedule import Action, ChunkKey, validate_actions

_TOLERANCE = 9 / 8
"""A group may have this much more than the planned bytes, as routing gives experts now more, now fewer tokens."""


class PlannedPolicy(Policy):
    """Follows a plan made from the schedule's actions and the shapes that earlier steps have shown.

    Plans are memoised by their inputs, so a step with another number of microbatches has its own. Without a schedule,
    and until every virtual stage has shown its shape, a reactive policy with the same bounds answers. Where no step has
    a schedule, a budget tells which actions it has seen.

    If a group differs from the planned one, its chunk continues without the plan, and the group is counted. It is
    copied out at its commit, and in when its backward begins. Results never depend on the plan.

    Args:
        counters: see `Policy`.
        leaving: see `Policy`.
        bounds: bounds of the plans.
        reactive: decides in steps without a plan; has the same bounds.

    Attributes:
        plan: plan of the running step, or of the last one; None: it had none.
        own_bounds: bounds that apply unless `allow` sets the room.
    """

    def __init__(self, counters: ByteCounters, leaving: LeavingQueue, bounds: Bounds, reactive: Policy) -> None:
        super().__init__(counters, leaving)
        self.plan: Plan | None = None
        self._bounds = bounds
        self._reactive = reactive
        self.own_bounds = bounds
        self._own_reactive = reactive
        self._planner = Planner()
        self._has_schedule = self._is_whole_step = False
        self._assumed: tuple[Action, ...] = ()  # of steps without a schedule
        self._log = ShapeLog()
        self._shapes: Shapes = ()  # from which the plan was made
        self._scheduled: set[ChunkKey] = set()  # the chunks of the plan
        self._chunks: dict[ChunkKey, ChunkProgress] = {}
        self._unplanned: set[ChunkKey] = set()
        self._held_back: dict[TensorGroup, None] = {}  # committed groups that the plan copies out later

    def allow(self, allowance: Allowance) -> None:
        """See `Policy`."""
        if allowance.choices.recomputed != self.choices.recomputed:
            self._log.forget()  # groups save less, or more, from now on
        self.choices = allowance.choices
        self._assumed = allowance.actions
        room = allowance.room_bytes
        if room is None:
            self._bounds, self._reactive = self.own_bounds, self._own_reactive
        else:
            self._bounds = Bounds(resident_bytes=room)
            self._reactive = ResidentBudgetPolicy(self.counters, self.leaving, room, allowance.saved_bytes)

    def shapes(self, actions: Sequence[Action]) -> Shapes | None:
        """Return the shapes that steps have shown of the chunks in `actions`; None if not all are known."""
        return self._shown(actions) if _is_whole_step(actions) else None

    def slots(self) -> frozenset[Slot]:
        """Return the slots of all groups that steps have shown."""
        return self._log.slots()

    def begin(self, actions: Sequence[Action], is_combined: bool) -> None:
        """See `Policy`."""
        is_whole = self._is_whole_step = _is_whole_step(actions)
        self._has_schedule |= is_whole
        if not (actions or self._has_schedule):
            actions = self._assumed
            is_whole = _is_whole_step(actions)
        shapes = self._shown(actions) if is_whole else None
        self._shapes = shapes or ()
        self._scheduled = {key for _, key in actions}
        self.plan = None if shapes is None else self._make_plan(actions, shapes, is_combined)
        # A copy-out under a plan comes back by that plan, released early or not. But where a budget has chosen, early
        # releases give no room that the plan needs, and make it random what an allocator reserves.
        is_chosen = self._bounds.resident_bytes is not None or bool(self.choices)
        self.releases_completed = not is_chosen if self.plan is not None else self._reactive.releases_completed
        if self.plan is None:
            self._reactive.begin(actions, is_combined)
        else:
            # Else the executor would go by a group that is smaller by now, and release later than the plan knows.
            self.leaving.largest_bytes = largest_bytes(self._shapes)

    def clear(self) -> None:
        """See `Policy`."""
        self._reactive.clear()
        self._log.clear()
        self._chunks.clear()
        self._unplanned.clear()
        self._held_back.clear()

    def must_release(self) -> bool:
        """See `Policy`."""
        return self._reactive.must_release()

    def at(self, kind: BoundaryKind, chunk: ChunkProgress | None, group: TensorGroup | None) -> Iterable[Move]:
        """See `Policy`."""
        if chunk is not None and kind is FORWARD:
            self._chunks[chunk.key] = chunk
        elif chunk is not None and group is None:
            self._log.mark(kind, chunk)
        elif kind is UNKEEP and chunk is not None and group is not None:
            self._log.mark_unkept(chunk, group)
        elif kind is ITERATION_END and self._is_whole_step is self._has_schedule:
            # If other steps have a schedule, a step without one is an evaluation, which saves other groups or none.
            self._log.learn(self._chunks.values())
        if self.plan is None:
            return self._reactive.at(kind, chunk, group)
        if chunk is None:
            return self._at_end()
        if kind is HELD:
            return self._before_others(self.plan, chunk)
        if kind is BACKWARD_END:
            return self._moves(self.plan, Boundary(kind, chunk.key, chunk.tail_index)) if chunk.awaits_tail else ()
        if group is None:
            return self._moves(self.plan, Boundary(kind, chunk.key, len(chunk.groups) if kind is LAUNCH else -1))
        if kind is COMMIT:
            return self._commit(self.plan, chunk, group)
        if kind is BACKWARD:
            return self._begin_backward(self.plan, chunk, group)
        return ((OUT, group),)  # UNKEEP, planned or not: only its keep had it stay

    def _shown(self, actions: Sequence[Action]) -> Shapes | None:
        return self._log.shapes({action.chunk.stage for action in actions})

    def _make_plan(self, actions: Sequence[Action], shapes: Shapes, is_combined: bool) -> Plan:
        return self._planner.plan_step(actions, shapes, self._bounds, choices=self.choices, is_combined=is_combined)

    def _before_others(self, plan: Plan, chunk: ChunkProgress) -> Iterator[Move]:
        """Yield the planned moves of a boundary HELD, then the copy-outs that are held back."""
        yield from self._moves(plan, Boundary(HELD, chunk.key, len(chunk.groups)))
        yield from self._with_held_back()

    def _with_held_back(self) -> Iterator[Move]:
        held_back, self._held_back = self._held_back, {}
        for group in held_back:
            yield OUT, group

    def _at_end(self) -> Iterator[Move]:
        yield from self._with_held_back()
        for group in self.leaving.groups:
            yield DROP, group

    def _commit(self, plan: Plan, chunk: ChunkProgress, group: TensorGroup) -> Iterator[Move]:
        if not self._is_as_planned(chunk, group):
            self._unplanned.add(chunk.key)
            self.counters.stats.num_unplanned_groups += 1
        if chunk.key in self._unplanned:
            if not group.is_kept:
                yield OUT, group
            return
        if group.may_delay and not group.is_kept and plan.leaves(chunk.key, group.index):
            self._held_back[group] = None
        yield from self._moves(plan, Boundary(COMMIT, chunk.key, group.index))  # it may leave now
        if group in self._held_back and self._is_link_behind(group):
            del self._held_back[group]
            yield OUT, group

    def _is_link_behind(self, group: TensorGroup) -> bool:
        """Return whether copies take longer than planned, so that compute would wait for one that is issued late.

        Not known where copies that have completed are still in flight until the plan releases them.
        """
        inflight_bytes = self.leaving.inflight_bytes + group.own_bytes
        return self.releases_completed and inflight_bytes > 2 * self.leaving.largest_bytes

    def _begin_backward(self, plan: Plan, chunk: ChunkProgress, group: TensorGroup) -> Iterator[Move]:
        if chunk.key not in self._unplanned:
            yield from self._moves(plan, Boundary(BACKWARD, chunk.key, group.index))
        if group.on_host_bytes:  # the plan did not bring it back in time, or does not know it
            yield IN, group
        if chunk.key in self._unplanned and group.index > 0:
            following = chunk.groups[group.index - 1]
            if following.on_host_bytes or following.leaving_bytes:
                yield IN, following

    def _moves(self, plan: Plan, boundary: Boundary) -> Iterator[Move]:
        """Translate the planned moves of a boundary, except those of unplanned chunks."""
        for op, key in plan.at(boundary):
            chunk = self._chunks.get(key.chunk)
            if chunk is None or key.chunk in self._unplanned or key.index >= len(chunk.groups):
                continue
            group = chunk.groups[key.index]
            if op is OUT:
                self._held_back.pop(group, None)
                if group.is_kept:
                    continue
            yield op, group

    def _is_as_planned(self, chunk: ChunkProgress, group: TensorGroup) -> bool:
        if chunk.key not in self._scheduled:
            return False
        groups = self._shapes[chunk.key.stage].groups
        if group.index >= len(groups):
            return False
        planned = groups[group.index]
        is_same_place = group.name == planned.name and group.layer == planned.layer
        return is_same_place and group.own_bytes <= _TOLERANCE * planned.nbytes


def _is_whole_step(actions: Sequence[Action]) -> bool:
    """Return whether each chunk of a schedule runs forward once, then backward once, so that it can be planned."""
    try:
        validate_actions(actions)
    except ValueError:
        return False
    return bool(actions)
