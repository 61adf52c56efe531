# SPDX-License-Identifier: Apache-2.0
"""`EngineView`: shows the state of an engine; `EngineSnapshot`: its bytes and copies at one moment."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import torch

from offload_engine._budget.controller import BudgetController
from offload_engine._compat import torch_private
from offload_engine._observe.labels import Ranges
from offload_engine._observe.observer import Observer, StepTimer
from offload_engine._observe.record import StepRecord
from offload_engine._policy.executor import Executor
from offload_engine._policy.planned import PlannedPolicy
from offload_engine._saved.failures import CopyFailures
from offload_engine._saved.storage import TensorGroup
from offload_engine._saved.store import ActivationStore
from offload_engine.chunk import ChunkOffloadHandler
from offload_engine.errors import OffloadError
from offload_engine.planning.plan import Plan
from offload_engine.schedule import Action
from offload_engine.stats import IterationStats

_current_graph_task: Final[Any] = torch_private.current_graph_task


class EngineSnapshot(NamedTuple):
    """Bytes and copies of an engine at one moment; see `OffloadEngine.snapshot`."""

    saved_bytes: int
    """Bytes saved by groups and held by a handle, wherever they are."""
    resident_bytes: int
    """Those of `saved_bytes` that are on the device."""
    prefetched_bytes: int
    """Bytes of copy-ins that are issued and not awaited yet."""
    inflight_bytes: int
    """Bytes of copy-outs that are issued and not released."""
    leaving: tuple[TensorGroup, ...]
    """The groups of these copy-outs, oldest first."""
    num_live: int
    """Number of saved storages held by a handle."""
    lent_bytes: int
    """Host bytes lent to them."""


class EngineView:
    """Shows whether an engine runs, and its bytes, copies, counters, plan and recordings. Moves no tensor.

    Args:
        store: owns the saved storages.
        executor: performs the plan.
        observer: records steps.

    Attributes:
        budget: decides by `OffloadConfig.gpu_budget`, with hooks for callers with several ranks; None without one.
        current_chunk: the chunk whose forward began last in this iteration.
        graphs: announces captures of CUDA graphs, of a whole step or of layers.
        failures: knows whether a copy has failed, or an interrupt has come, since the last `reset_iteration()`, so that
            saved tensors may be incomplete.
        is_idle: the running iteration needs no groups; see `is_active`. Callers may still open some.
        ranges: marks the copies and waits that the engine issues in profiles.
        timer: times single iterations, and how long compute waits for copies in them.
    """

    _is_closed: bool = False
    is_idle: bool = False

    def __init__(self, store: ActivationStore, executor: Executor, observer: Observer) -> None:
        self.ranges: Ranges = store.context.ranges
        self._observer = observer
        self.timer: StepTimer = StepTimer(observer)
        self.budget: BudgetController | None = None
        self._use(store, executor)

    def _use(self, store: ActivationStore, executor: Executor) -> None:
        """Start with new books, outside an iteration."""
        self.current_chunk: ChunkOffloadHandler | None = None
        self._executor = executor
        self._store = store
        self.failures: CopyFailures = store.failures
        self._is_in_iteration = self.is_idle = False
        self._weights: Iterable[torch.Tensor] = ()  # until they are read

    def _note_weights(self, weights: Iterable[torch.Tensor]) -> None:
        """Note the weights of an iteration. It takes a while to read them: if it is idle, not until a chunk starts."""
        self._weights = weights
        if self.budget is None or not self.budget.is_idle:
            self._read_weights()

    def _read_weights(self) -> None:
        if self._weights:
            weights, self._weights = self._weights, ()
            self._store.eligibility.add_weights(weights)

    def _check_begin(self, actions: Sequence[Action] | None) -> None:
        """Check that an iteration may begin."""
        if self._is_in_iteration:
            raise OffloadError(
                "begin_iteration() inside an iteration: call end_iteration() after its last backward, or "
                "reset_iteration() if it raised"
            )
        for action in actions or ():
            if not isinstance(action, Action):
                raise TypeError(f"actions must be Action objects, got {action!r}; parse_actions() reads them from text")
        self._executor.refuse_capture("an iteration begins")

    def _check_chunk(self) -> None:
        """Check that a chunk may start."""
        if not self._is_in_iteration:
            raise OffloadError("start_chunk() outside an iteration: call begin_iteration() first")
        self._executor.refuse_capture("a forward begins")

    def _check_capture(self, is_whole_step: bool) -> None:
        """Check that the next step, or parts of it, may be captured."""
        if self._is_closed:
            raise OffloadError("a capture after close(): make a new engine")
        if self._is_in_iteration or self.has_saved:
            raise OffloadError(
                "a capture inside a step: end the step first, and drop the graphs that still hold saved tensors"
            )
        if self.budget is not None:
            raise OffloadError(
                "a capture with a gpu_budget: a budget changes its decisions, a graph cannot. Choose a policy, such as "
                "Planned(resident_bytes=...)"
            )
        if not is_whole_step:
            return
        if not self.stats.num_groups:
            raise OffloadError("graphs.capture() before the first step: first run two such steps, to pin host memory")
        if isinstance(self._executor.policy, PlannedPolicy) and self.plan is None:
            raise OffloadError("graphs.capture() before a step was planned: first run one more such step")

    @property
    def is_active(self) -> bool:
        """Return whether to open groups: in an iteration that needs them, with gradients, outside a backward.

        An iteration whose budget keeps everything needs none, and runs as without an engine.
        """
        is_running = self._is_in_iteration and not self.is_idle
        return is_running and torch.is_grad_enabled() and _current_graph_task() == -1

    @property
    def active_chunk(self) -> ChunkOffloadHandler | None:
        """Return the chunk whose forward runs, if groups may be opened; else None."""
        return self.current_chunk if self.is_active else None

    @property
    def is_in_iteration(self) -> bool:
        """Return whether an iteration runs: from `begin_iteration()` to `end_iteration()` or `reset_iteration()`."""
        return self._is_in_iteration

    @property
    def has_saved(self) -> bool:
        """Return whether a graph still holds a tensor that the engine packed: its backward may still come.

        Raises:
            KeyboardInterrupt: if one came in a destructor, where Python ignores it. So does `end_iteration`.
        """
        return self._store.has_handles()

    @property
    def stats(self) -> IterationStats:
        """Return the counters of the running iteration, or of the last one."""
        return self._store.counters.stats

    @property
    def plan(self) -> Plan | None:
        """Return the plan of the running step, or of the last one; None without `Planned`, or without a schedule.

        `planning.plan.format_plan` returns it as text.
        """
        policy = self._executor.policy
        return policy.plan if isinstance(policy, PlannedPolicy) else None

    def snapshot(self) -> EngineSnapshot:
        """Return the current bytes and copies."""
        self._store.retire_dropped()
        counters, leaving = self._store.counters, self._executor.leaving
        return EngineSnapshot(
            saved_bytes=counters.saved_bytes,
            resident_bytes=counters.resident_bytes,
            prefetched_bytes=counters.prefetched_bytes,
            inflight_bytes=leaving.inflight_bytes,
            leaving=tuple(leaving.groups),
            num_live=len(self._store.live),
            lent_bytes=self._store.lent_bytes,
        )

    def record(self, file: str | os.PathLike[str] | None = None) -> None:
        """Record the next iteration that begins; see docs/observe.md.

        Args:
            file: path to write in the background; the file is complete after `close()` at the latest. `{rank}` and
                `{step}` in the name are replaced. None: record for `report` only.
        """
        self._observer.ask(file)

    @property
    def last_record(self) -> StepRecord | None:
        """Return the last recorded iteration of this rank; blocks until the device has reached its end."""
        return self._observer.record

    def __str__(self) -> str:
        """Return one readable line about the last iteration, with the times of `timer`."""
        return self._observer.line(self.stats)

    def report(self) -> str:
        """Return the tables of the last recorded iteration, and of the budget, if there is one.

        Without a recording, a summary of the last iteration's counters takes the place of its tables.
        """
        text = self._observer.report(self.stats)
        return text if self.budget is None else text + self.budget.report()


def explain(engine: EngineView, error: BaseException | None) -> None:
    """Add a note to an out-of-memory error of the running iteration that says what its budget expected. Idempotent.

    `OffloadEngine.iteration` calls it; so does a caller of `begin_iteration` that catches errors, before
    `reset_iteration`.
    """
    if not isinstance(error, torch.OutOfMemoryError):
        return
    text = shortage_of(engine)
    if text is not None and not any(note.startswith("gpu_budget") for note in getattr(error, "__notes__", ())):
        error.add_note(text)


def shortage_of(engine: EngineView) -> str | None:
    """Return what the budget of the running iteration expected, and what has grown; None without a budget or a step."""
    if engine.budget is None or not engine.is_in_iteration:
        return None
    return engine.budget.shortage(engine.stats.peak_resident_bytes)
