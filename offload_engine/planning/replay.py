# SPDX-License-Identifier: Apache-2.0
"""Predicts what an allocator reserves in a step with other choices, from the recorded allocations of one step.

The allocations of a step are those of the recorded one, but for the moves: a group that stays is not freed and has no
copy-in, one that leaves is freed and copied in where its plan says, and what is recomputed is freed in its forward and
allocated again in its backward. Then an imitated allocator performs them, again and again, until it reserves no more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from offload_engine.planning.allocations import Life, ModuleRun, RecordedStep, StoredLives
from offload_engine.planning.memory import Job
from offload_engine.planning.moves import BACKWARD, COMMIT, DROP, FORWARD, Boundary, GroupKey
from offload_engine.planning.performed import AFTER_EVENT, AFTER_MOVES, EVENT, MOVED, Place, Use, reserve
from offload_engine.planning.recompute import RecomputeOption, options_of
from offload_engine.planning.reduced import ReducedJob
from offload_engine.planning.residents import moves_in_memory
from offload_engine.planning.segments import SPARE_SHARE, SPARE_SHARE_INEXACT, Reserved, is_small_block, with_spare
from offload_engine.planning.shapes import step_boundaries
from offload_engine.planning.steps import Decision

LEAD: Final = 1.7
"""How much longer than in the recorded step other streams use a block: the host, which waits for fewer copies, is
farther ahead. (In a pipeline on H200s, what was received from another stage: 1.3 to 1.6 times as many events. Ten
steps used no more of their arenas than replayed with 1.7 and a 64th to spare; with 1.4 five did, by up to 171 MiB.)"""
ENDLESS: Final = 1 << 46
"""Bytes of an arena in which all that could be allocated has room."""
_UNFOUND_SHARE: Final = 1 / 256
_UNFOUND_BYTES: Final = 1 << 20
"""Of what a recomputed module still saves, so much need not be found; a share of what it saves otherwise, if that is
more. (What is too small to move is not looked for.)"""


class Replay:
    """Tells what the allocator would reserve for steps with a decision, if it is trimmed before.

    Before such steps an arena is reserved: one segment, of which all large blocks are parts. Without it each block is
    in a segment that was made for another one. Segments never become one, so up to a sixth of them is reserved in vain;
    and since of equal free blocks an allocator takes the first in memory, it depends on addresses how much.

    Small blocks have segments of their own. What they come to differs little between decisions, so they are replayed
    once, as in the step in which nothing moves: then most of them are there at once.

    Args:
        step: the recorded step, in which everything was offloaded.
        job: what ran in it.
        decision: of the steps.
        offered: what can be recomputed.

    Attributes:
        has_lags: blocks are in use on other streams, by the host's lead longer or shorter.
        is_exact: all blocks are allocated and freed in the order in which they will be.
    """

    def __init__(
        self, step: RecordedStep, job: Job, decision: Decision, offered: tuple[RecomputeOption, ...] = ()
    ) -> None:
        options = tuple(options_of(offered, decision.choices.recomputed))
        self._step = step
        self.has_lags: bool = step.has_lags
        self.is_exact: bool = step.is_exact and not (step.has_lags or any(option.stops_early for option in options))
        if step.left_out:
            actions = tuple(action for action in job.actions if action.chunk.microbatch not in step.left_out)
            job = replace(job, actions=actions)
        self._moved = _MovedStep(step, ReducedJob(job, decision, options))

    @property
    def spare_share(self) -> float:
        """Return by which share of its bytes in use an arena is larger; it is part of what `reserved` returns."""
        return SPARE_SHARE if self.is_exact else SPARE_SHARE_INEXACT

    def reserved(self, arena_bytes: int | None = None, lead: float = LEAD) -> Reserved | None:
        """Return what the allocator would reserve; None: not known.

        Args:
            arena_bytes: of the arena; 0: there is none. None: as much as is used of one without an end, and some more.
            lead: see `LEAD`.
        """
        step, moved = self._step, self._moved
        if not moved.is_known:
            return None
        if step.small is None:
            step.small = reserve(step, _MovedStep(step, None).uses(is_small=True), is_small=True)
        given = ENDLESS if arena_bytes is None else arena_bytes
        large = reserve(step, moved.uses(is_small=False, lead=lead), is_small=False, arena_bytes=given)
        arena = with_spare(large.arena_bytes, self.spare_share) if arena_bytes is None else arena_bytes
        reserved, peak = large.reserved_bytes - given + arena, large.peak_bytes
        return Reserved(reserved + step.small.reserved_bytes, peak + step.small.peak_bytes, large.arena_bytes)


class _MovedStep:
    """Moves the allocations of a recorded step as a decision does.

    Args:
        step: the recorded step.
        reduced: the job as the decision leaves it; None: nothing moves.

    Attributes:
        is_known: False if something is not known that this needs.
    """

    def __init__(self, step: RecordedStep, reduced: ReducedJob | None) -> None:
        self.is_known: bool = True
        self._step = step
        self._uses: dict[int, list[Use]] = {}  # by the `id` of a life: instead of its own
        self._lives: list[Life] = list(step.lives)
        self._released: dict[GroupKey, Place] = {}
        self._returned: dict[GroupKey, Place] = {}
        if reduced is not None:
            self._find_moves(reduced)
        self._stored = {group: [self._that_moves(group, each) for each in step.stored[group]] for group in step.stored}
        for group, stored in self._stored.items():
            for each in stored:
                self._move(group, each)
        if reduced is not None:
            for groups, option in reduced.replaced.items():
                self._recompute(groups, option, reduced.saved_bytes(groups))

    def uses(self, *, is_small: bool, lead: float = LEAD) -> list[Use]:
        """Return all allocations of small or of large blocks and their ends, in order, with a lead of the host."""
        found = []
        for life in self._lives:
            if is_small_block(life.nbytes) != is_small:
                continue
            own = self._uses.get(id(life))
            found += _as_recorded(life) if own is None else own
        return sorted(found, key=lambda use: _place_of(use, lead))

    def _find_moves(self, reduced: ReducedJob) -> None:
        job = reduced.job
        places: dict[Boundary, int] = {}
        last = 0
        for boundary in step_boundaries(job.actions, job.shapes):
            last = max(last, self._step.moments.get(reduced.boundary(boundary), last))
            places[boundary] = last
        moves = moves_in_memory(job.actions, job.shapes, job.bounds, reduced.plan, reduced.fewer_bytes(self._step))
        for number, (boundary, (op, group)) in enumerate(moves):
            places_of = self._released if op is DROP else self._returned
            places_of[reduced.group(group)] = Place(places[boundary], MOVED, number)

    def _that_moves(self, group: GroupKey, stored: StoredLives) -> StoredLives:
        """Return a storage that stayed in the recorded step as one that left and came back, if its group moves now.

        Everything was offloaded there, but what a backward needed before its copy-out was over has stayed.
        """
        if stored.returned is not None or group not in self._released or group not in self._returned:
            return stored
        saved = stored.saved
        returned = Life(saved.at, saved.nbytes, saved.stream, ends=saved.ends)
        self._lives.append(returned)
        return stored._replace(returned=returned, is_released=True)

    def _move(self, group: GroupKey, stored: StoredLives) -> None:
        """Move a storage that left in the recorded step."""
        saved, returned = stored.saved, stored.returned
        if returned is None:
            return
        own = _as_recorded(saved)[:1]
        end = _end_of(returned)
        if group in self._released and group in self._returned:
            place = self._released[group]
            held = Place(-1, EVENT) if stored.is_released or saved.ends is None else Place(saved.ends, EVENT)
            own.append(Use(max(place, held), True, saved))
            back = [Use(self._returned[group], False, returned)]
            self._uses[id(returned)] = back + ([] if end is None else [Use(end, True, returned)])
        else:
            self._uses[id(returned)] = []
            if end is not None:  # kept by the engine, too, until it retires
                own.append(Use(max(end, Place(stored.retired or 0, AFTER_MOVES)), True, saved))
        self._uses[id(saved)] = own

    # -- recomputation -----------------------------------------------------------------------------------------------

    def _recompute(self, groups: tuple[GroupKey, ...], option: RecomputeOption, saved_bytes: int) -> None:
        """Free what a module saved in its forward, and run its forward again right before its backward.

        Args:
            groups: that are replaced.
            option: what replaces them.
            saved_bytes: that they still save.
        """
        first = groups[0]
        run = self._run_of(groups, option)
        stored = [each for group in groups for each in self._stored.get(group, ())]
        kept = None if run is None else _kept(stored, saved_bytes, run.input)
        if run is None or kept is None:
            self.is_known = False
            return
        if run.input is not None and not kept:
            self._keep_input(run.input, groups)
        end, again = run.ends, run.backward
        begin = max([run.begins, *(each.saved.begins + 1 for each in kept)])
        freed = {id(each.saved): each for each in stored if each not in kept}
        lives = {id(life): life for life in self._step.begun_between(begin, end)}
        lives |= {id(each.saved): each.saved for each in freed.values()}
        runs: list[tuple[int, bool, Life]] = []
        for life in lives.values():
            copy = Life(life.at, life.nbytes, life.stream, life.begins, life.ends)
            self._lives.append(copy)
            runs.append((life.begins, False, copy))
            self._uses[id(copy)] = []
            if id(life) in freed:
                self._free_early(freed[id(life)], copy)
            elif life.ends is not None and life.ends < end:
                runs.append((life.ends, True, copy))
            elif life.ends is None or life.ends < again:  # what the module returns
                self._uses[id(copy)] = [Use(self._end_of_output(kept, first), True, copy)]
            else:  # saved outside of groups
                self._uses[id(life)] = [*_as_recorded(life)[:1], Use(Place(end, AFTER_MOVES), True, life)]
                self._uses[id(copy)] = [Use(Place(life.ends, AFTER_EVENT), True, copy)]
        runs.sort(key=lambda run: run[0])
        for number, (_, is_end, copy) in enumerate(runs):
            self._uses[id(copy)].append(Use(Place(again, AFTER_MOVES, number), is_end, copy))

    def _keep_input(self, start: Life, groups: tuple[GroupKey, ...]) -> None:
        """Keep what nothing else saves: a recomputation starts from it, so it is there until its backward is over."""
        group = next((group for group in groups if group in self._released and group in self._returned), None)
        over = self._end_of_output([], groups[0])
        end = _end_of(start)
        if group is None or end is None:
            self._uses[id(start)] = [*_as_recorded(start)[:1], Use(over, True, start)]
            return
        back = Life(start.at, start.nbytes, start.stream)
        self._lives.append(back)
        self._uses[id(start)] = [*_as_recorded(start)[:1], Use(max(end, self._released[group]), True, start)]
        self._uses[id(back)] = [Use(self._returned[group], False, back), Use(over, True, back)]

    def _free_early(self, stored: StoredLives, copy: Life) -> None:
        """Free a storage when the last group that read it has run; `copy` is there in the backward instead."""
        moments, saved = self._step.moments, stored.saved
        read = Place(moments[Boundary(COMMIT, *stored.last_saver)], AFTER_MOVES)
        end = _end_of(stored.returned or saved)
        self._uses[id(saved)] = [*_as_recorded(saved)[:1], Use(read, True, saved)]
        if stored.returned is not None:
            self._uses[id(stored.returned)] = []
        if end is not None:
            self._uses[id(copy)].append(Use(end, True, copy))

    def _run_of(self, groups: tuple[GroupKey, ...], option: RecomputeOption) -> ModuleRun | None:
        """Return the run of the module around these groups; as far as boundaries show it, if it was not noted."""
        moments, last = self._step.moments, groups[-1]
        committed, again = moments.get(Boundary(COMMIT, *last)), moments.get(Boundary(BACKWARD, *last))
        if committed is None or again is None:
            return None
        began = moments.get(Boundary(FORWARD, last.chunk), 0)
        for run in reversed(self._step.runs):
            if run.name == option.name and began <= run.begins <= committed:
                return run
        return ModuleRun(option.name, self._before(groups[0]), committed, again)

    def _before(self, first: GroupKey) -> int:
        """Return the moment at which the group before the first one has committed."""
        if not first.index:
            return 0
        return self._step.moments.get(Boundary(COMMIT, first.chunk, first.index - 1), 0)

    def _end_of_output(self, kept: list[StoredLives], first: GroupKey) -> Place:
        """Return when what a recomputation has returned is freed: before its input, when its backward is over."""
        if kept:
            last = kept[0].returned or kept[0].saved
            if last.ends is not None:
                return Place(last.ends, AFTER_MOVES)
        following = self._step.moments.get(Boundary(BACKWARD, first.chunk, first.index - 1))
        return Place(self._step.num_events if following is None else following, MOVED, -1)


def _kept(stored: list[StoredLives], saved_bytes: int, start: Life | None) -> list[StoredLives] | None:
    """Return the storages that stay saved, for the recomputation to start from: those allocated first.

    None of them, if it starts from what no group has saved. None: not known.
    """
    left = saved_bytes
    if start is not None and all(each.saved is not start for each in stored):
        left -= start.nbytes
    found = []
    for each in sorted(stored, key=lambda each: each.saved.begins):
        if left < each.saved.nbytes:
            break
        found.append(each)
        left -= each.saved.nbytes
    return found if left < max(_UNFOUND_BYTES, _UNFOUND_SHARE * sum(each.saved.nbytes for each in stored)) else None


def _place_of(use: Use, lead: float) -> Place:
    """Return where a use is in the order: what another stream still uses is freed later."""
    place, lag = use.place, round(lead * use.life.lag)
    return place._replace(moment=place.moment + lag) if lag and use.is_end else place


def _as_recorded(life: Life) -> list[Use]:
    uses = [] if life.begins < 0 else [Use(Place(life.begins, EVENT), False, life)]
    return uses if life.ends is None else [*uses, Use(Place(life.ends, EVENT), True, life)]


def _end_of(life: Life) -> Place | None:
    return None if life.ends is None else Place(life.ends, EVENT)
