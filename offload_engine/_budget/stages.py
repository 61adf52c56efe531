# SPDX-License-Identifier: Apache-2.0
"""`Stages`: knows what the other stages of a pipeline do in a step, which this rank waits for."""

from __future__ import annotations

import logging
from itertools import chain
from typing import Final

from offload_engine._budget.agreement import Agree
from offload_engine.planning.choose import Chosen
from offload_engine.planning.pipeline import Pipeline, RankWork
from offload_engine.planning.predict import LEAST_BUSY_RATIO
from offload_engine.schedule import Action, ChunkKey

_NS: Final = 1e6
"""Of a millisecond."""
_SHARES: Final = 1e6
_WITH_WAITS: Final = 1 / 2
"""Of what compute takes longer on a device that never waits: one that waits for other stages has power to spare. (Two
stages on H200s: dense 1.01 to 1.05 times as long, mixture of experts 1.00 to 1.01.)"""
_STAGE_BITS: Final = 16
_SIZE: Final = 4
"""Numbers of an action: which one it is, its time in the measured step, its compute and its waits as decided."""

logger = logging.getLogger(__name__)


class Stages:
    """Times steps in a pipeline, once its stages have met. The others do as they decided then, whatever this one does.

    Args:
        rank: of this process in its pipeline.
        num_ranks: of the pipeline.
    """

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        self.is_pipeline: bool = num_ranks > 1
        self._rank = rank
        self._num_ranks = num_ranks
        self._measured: Pipeline | None = None  # both as exchanged, or neither
        self._pipeline: Pipeline | None = None

    def meet(self, meet: Agree, took_ms: tuple[float, ...], decided: RankWork, longest: int, floor_ms: float) -> None:
        """Exchange with the other stages what each does. Every rank of the pipeline calls it.

        Args:
            meet: with all ranks of the pipeline.
            took_ms: how long each action of this rank took in the measured step.
            decided: its work as decided.
            longest: most actions of any rank.
            floor_ms: longest time of the measured step on any rank.
        """
        size = 1 + _SIZE * longest
        own = _numbers_of(took_ms, decided)
        numbers = [0] * (size * self._num_ranks)
        numbers[size * self._rank : size * self._rank + len(own)] = own
        found = meet(tuple(numbers))
        works = [_works_of(found[size * rank : size * (rank + 1)]) for rank in range(self._num_ranks)]
        before, after = (Pipeline(ranks) for ranks in zip(*works, strict=True))
        try:
            rest_ms = max(0.0, floor_ms - before.step_ms())
        except ValueError as error:
            logger.info("offload budget: steps are timed as if this stage were the only one: %s", error)
            return
        self._measured, self._pipeline = before._replace(rest_ms=rest_ms), after._replace(rest_ms=rest_ms)

    def timed(self, chosen: Chosen, work: RankWork | None) -> Chosen:
        """Return a choice with its time in the pipeline, if that is known.

        Args:
            chosen: for steps like the measured one.
            work: of this rank in its best step; None: not known.
        """
        pipeline = self._with(work)
        return chosen if pipeline is None else chosen._replace(pipeline_ms=pipeline.step_ms(chosen.busy_ratio))

    def milliseconds(self, work: RankWork | None, busy_ratio: float, share: float) -> float | None:
        """Return how long a step takes in which the other stages do a share of what they decided; None: not known.

        Args:
            work: of this rank in it; None: not known.
            busy_ratio: see `Costs`.
            share: of the way from the measured step to the one that was decided.
        """
        decided = self._with(work)
        if decided is None or work is None or self._measured is None:
            return None
        ranks = zip(self._measured.ranks, decided.ranks, strict=True)
        between = decided._replace(ranks=tuple(before.towards(after, share) for before, after in ranks))
        return between.with_rank(self._rank, work).step_ms(busy_ratio)

    def expected_ratio(self, busy_ratio: float) -> float:
        """Return the ratio that is expected here of a device; see `Device.busy_ratio`."""
        return 1.0 + _WITH_WAITS * (busy_ratio - 1.0) if self.is_pipeline else busy_ratio

    def busy_ratio(self, measured_ms: float, chosen: Chosen, work: RankWork | None) -> float | None:
        """Return the ratio with which a step is predicted as long as measured, or nearly; see `Costs`.

        None if its time in the pipeline is not known.

        Args:
            measured_ms: time of the step.
            chosen: for it.
            work: of this rank in it; None: not known.
        """
        pipeline = self._with(work)
        return pipeline and pipeline.busy_ratio(measured_ms, LEAST_BUSY_RATIO, chosen.most_busy_ratio)

    def _with(self, work: RankWork | None) -> Pipeline | None:
        """Return the pipeline with other work of this rank; None if the others were not asked about such steps."""
        if work is None or self._pipeline is None or self._pipeline.ranks[self._rank].actions != work.actions:
            return None
        return self._pipeline.with_rank(self._rank, work)


def _numbers_of(took_ms: tuple[float, ...], decided: RankWork) -> list[int]:
    ratio = round(_SHARES * decided.busy)
    each = zip(decided.actions, took_ms, decided.compute_ms, decided.waited_ms, strict=True)
    numbers = ((_code_of(action), *(round(_NS * ms) for ms in times)) for action, *times in each)
    return [ratio, *chain.from_iterable(numbers)]


def _works_of(numbers: tuple[int, ...]) -> tuple[RankWork, RankWork]:
    """Return the work of one rank in the measured step, and as decided."""
    busy, *rest = numbers
    each = [rest[i : i + _SIZE] for i in range(0, len(rest), _SIZE) if rest[i]]  # 0: it has no more
    actions = tuple(_action_of(code) for code, *_ in each)
    measured, compute, waited = (tuple(own[i] / _NS for own in each) for i in range(1, _SIZE))
    nothing = (0.0,) * len(actions)
    return RankWork(actions, measured, nothing), RankWork(actions, compute, waited, busy / _SHARES)


def _code_of(action: Action) -> int:
    kind, (stage, microbatch) = action
    return 1 + (kind == "B") + 2 * (stage + (microbatch << _STAGE_BITS))


def _action_of(code: int) -> Action:
    rest, is_backward = divmod(code - 1, 2)
    microbatch, stage = divmod(rest, 1 << _STAGE_BITS)
    return Action("B" if is_backward else "F", ChunkKey(stage, microbatch))
