# SPDX-License-Identifier: Apache-2.0
"""`OffloadEngine`: owns the streams, the host pool and the chunks in flight, and wires the parts together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from offload_engine._budget.controller import make_budget
from offload_engine._budget.measure import MeasuringRecorder
from offload_engine._chunk.saved_tensors import pop_hooks_of
from offload_engine._devices import device_for
from offload_engine._devices.base import Device, Stream
from offload_engine._host.pool import HostPool
from offload_engine._host.unawaited import UnawaitedCopies
from offload_engine._observe.observer import Observer
from offload_engine._policy.choose import make_policy, settings_of
from offload_engine._policy.executor import Executor
from offload_engine._policy.keeping import Keeping
from offload_engine._policy.leaving import LeavingQueue
from offload_engine._policy.share import share_of
from offload_engine._saved.counters import ByteCounters
from offload_engine._saved.eligibility import Lasting
from offload_engine._saved.store import ActivationStore
from offload_engine._saved.transfers import TransferContext
from offload_engine.chunk import ChunkOffloadHandler
from offload_engine.config import OffloadConfig
from offload_engine.engine_view import EngineView, explain
from offload_engine.errors import OffloadError
from offload_engine.graph_captures import GraphCaptures
from offload_engine.meter import ResidencyMeter
from offload_engine.planning.moves import HELD
from offload_engine.schedule import Action, ChunkKey
from offload_engine.stats import IterationStats

logger = logging.getLogger(__name__)

_LEFT = (
    "%d saved storages outlive the iteration, the first is %s: a graph is kept alive or its backward has not run. "
    "Keep loss.item() instead of the loss, and evaluate under torch.no_grad()"
)


class OffloadEngine(EngineView):
    """Moves the saved activations of one model to the host and back.

    An iteration is one training step: any number of forwards and backwards of chunks. Between iterations, under
    `no_grad` and while a backward runs (recomputation) the engine is passive.

    Args:
        config: bounds and thresholds.
        device: device of the activations; None: CUDA if there is a GPU, otherwise the CPU.
        meter: counts resident bytes in addition to `stats`, over time and together with a `SavedTensorTracker`.
        pipeline: rank and number of ranks of the pipeline whose virtual stages the chunks are, for reports.
        logs_first_step: log a summary of the first iteration on rank 0, and warn if nothing moves.

    Raises:
        ValueError: if the device does not support the configuration.
        TypeError: if `device` is a `torch.device`.
    """

    def __init__(
        self,
        config: OffloadConfig | None = None,
        device: Device | None = None,
        meter: ResidencyMeter | None = None,
        *,
        pipeline: tuple[int, int] = (0, 1),
        logs_first_step: bool = True,
    ) -> None:
        self.config: OffloadConfig = config or OffloadConfig()
        self.device: Device = device_for(self.config, device)
        self.meter: ResidencyMeter | None = meter
        self._context, self._lasting = TransferContext(self.device), Lasting()
        self._unawaited, self._leaving, self._counters = UnawaitedCopies(), LeavingQueue(), ByteCounters(meter)
        self.pool: HostPool = HostPool(self.device, self.config.host_limit_bytes, unawaited=self._unawaited)
        self._policy = make_policy(settings_of(self.config), self._counters, self._leaving)
        self._keeping = Keeping(self._policy, self._counters, share_of(self.config))
        super().__init__(*self._new_books(), Observer(pipeline, logs_first_step, self.config))
        self.graphs = GraphCaptures(self._context, self.pool, self.config, self._check_capture, self.reset_iteration)
        self._num_chunks, self._num_left, self._is_device_closed = 0, 0, False
        self.budget = make_budget(self.config.gpu_budget, self._context, self._policy, self._keeping, self._counters)

    def begin_iteration(
        self,
        actions: Sequence[Action] | None = None,
        weights: Iterable[torch.Tensor] = (),
        *,
        is_combined: bool = False,
    ) -> None:
        """Start a training step.

        Args:
            actions: the order in which this rank will run forwards and backwards of chunks, for prefetch; None: the
                backward takes chunks in the reverse order of their forwards.
            weights: parameters and buffers; their storages, and views of them, never move.
            is_combined: each forward runs together with the next backward in `actions`, as in the all-to-all overlap:
                prefetch for that backward does not wait for the start of the forward.

        Raises:
            OffloadError: if an iteration is running, the engine is closed, or a capture was not announced.
            TypeError: if `actions` has an item of another type.
        """
        if self._is_closed:
            raise OffloadError("begin_iteration() after close(): make a new engine")
        if self.failures.is_torn:
            self.reset_iteration()
        self._check_begin(actions)
        measuring = None if self.budget is None else self.budget.begin(actions or (), is_combined)
        self._store.begin()
        self._note_weights(weights)
        self._executor.begin_iteration(actions or (), is_combined)
        self._num_chunks = 0
        # The budget records the steps that it measures itself; a requested recording then waits for the next step.
        if not self._context.is_captured:  # a graph has no times until it is replayed
            self._context.recorder = measuring or self._observer.begin(self.device, self.config.dry_run)
        self.is_idle = self.budget is not None and self.budget.is_idle and self._context.recorder is None
        self._is_in_iteration = True

    def start_chunk(
        self,
        key: ChunkKey | None = None,
        *,
        keep_groups: frozenset[int] = frozenset(),
        num_offload_group: int | None = None,
        tensor_need_offloading_checker: Callable[[torch.Tensor], bool] | None = None,
        double_buffering: bool = False,
        has_head: bool = False,
    ) -> ChunkOffloadHandler:
        """Start the forward of a chunk, which ends that of the previous chunk.

        Args:
            key: virtual stage and microbatch; None: the next microbatch of stage 0.
            keep_groups: indices of groups that stay resident, because their backward comes at once.
            num_offload_group: groups from this index on stay resident too.
            tensor_need_offloading_checker: returns whether a saved tensor may move; None: all may.
            double_buffering: for callers of TransformerEngine's handler; must be False.
            has_head: the backward comes at once, and `begin_head` will be called between the last layer and the loss;
                until then copies of the last layers may be in flight.

        Raises:
            OffloadError: outside an iteration, or while a CUDA graph is being captured.
            NotImplementedError: if `double_buffering` is True.
        """
        self._check_chunk()
        self._read_weights()
        chunk = self.current_chunk = ChunkOffloadHandler(
            key if key is not None else ChunkKey(0, self._num_chunks),
            self._executor,
            keep_groups=keep_groups,
            num_offload_group=num_offload_group,
            tensor_need_offloading_checker=tensor_need_offloading_checker,
            double_buffering=double_buffering,
            has_head=has_head,
        )
        self._num_chunks += 1
        chunk.begin_forward()
        return chunk

    def exclude(self, tensor: torch.Tensor, *, for_good: bool = False) -> None:
        """Exclude the storage of `tensor` from copies in this iteration, for instance because it is recomputed.

        With `for_good`, exclude it in all iterations, also while emptied: for buffers into which weights are gathered.
        """
        self._store.eligibility.exclude(tensor, for_good)

    def held_elsewhere(self, *holders: torch.Tensor, num_copies: int = 0) -> None:
        """Declare that `holders` are not read again before backward, so their storage may be freed while on host.

        A copy-out frees no memory while another reference keeps the tensor, such as a schedule that keeps the inputs of
        its stages. After this call the storage is emptied (resized to zero bytes) as soon as its copy-out is complete.
        It is refilled, in place, before its backward needs it, or when the graph is freed without a backward. A read in
        between crashes the process. Reads issued before this call, on the current stream, are safe.

        No-op if no group has saved the storage, or it stays resident. A storage shared by more tensors than declared
        stays, and is counted in `IterationStats.num_viewed_storages`.

        Args:
            holders: all tensors that share one storage, except those that autograd saved in groups or under
                `SavedTensorHooks.around_groups`; the base of a view may be omitted. Other hooks must not have saved
                them.
            num_copies: number of further detached aliases that cannot be passed.
        """
        chunk = None if self.current_chunk is None else self.current_chunk.groups.progress
        self._executor.at(HELD, chunk)  # issues delayed copy-outs first: only a leaving storage can be emptied
        self._store.empty_for_holders(holders, num_copies)

    def set_allocation_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Declare the compute stream that allocated `tensor`, if another stream is about to save it.

        The memory goes back to the pool of the allocating stream, which then waits for the copy-out as well. If in
        doubt, declare the stream: the one that saves the tensor waits in any case.

        Args:
            tensor: not saved yet.
            stream: as returned by `engine.device.current_stream()`.
        """
        self._store.alloc_streams.declare(tensor, stream)

    def trim_host_memory(self) -> int:
        """Return idle host memory, which no storage uses and no copy reads, to the system.

        Only whole slabs are returned, but between two steps nearly all are idle. The next step allocates again, which
        is slow for pinned memory. Returns the number of bytes; `close()` returns everything.
        """
        self._store.retire_dropped()
        return self.pool.trim()

    def end_iteration(self) -> IterationStats:
        """End a training step, after its last backward.

        Storages that a graph still holds stay valid. `num_storages_left` counts them; if it grows, a warning is logged.

        Raises:
            OffloadError: outside an iteration.
            CopyError: if a copy-out failed.
        """
        if not self._is_in_iteration:
            raise OffloadError("end_iteration() outside an iteration")
        self._store.has_handles()
        has_backward = self._executor.end_iteration()
        self._is_in_iteration, self.current_chunk, self._weights = False, None, ()
        stats = self._store.end()
        recorder, self._context.recorder = self._context.recorder, None
        if self.budget is not None:
            self.budget.end(stats, self._num_chunks if has_backward else 0)
        self._observer.end(None if isinstance(recorder, MeasuringRecorder) else recorder, stats)
        if stats.num_storages_left > self._num_left:  # otherwise the warning was logged before
            logger.warning(_LEFT, stats.num_storages_left, next(iter(self._store.live)))
        self._num_left = stats.num_storages_left
        return stats

    def reset_iteration(self) -> None:
        """Recover after an exception: wait for copies in flight, then abandon every saved storage. Idempotent.

        Parameters and gradients are not touched. A graph of the step that raised can no longer run its backward. Hooks
        of its chunks that an interrupt has left on autograd's stack in this thread are popped, unless others are on top
        of them. No-op after `close()`, which resets too.
        """
        if self._is_closed:  # a closed device accepts no work, not even the events of a reset
            return
        recorder, self._context.recorder = self._context.recorder, None
        if recorder is not None:
            recorder.close()
        # An interrupt may have come between any two lines, even here, so the books are not corrected but replaced.
        if self.budget is not None:
            self.budget.abandon()
        pop_hooks_of(self._store)
        self._store.abandon_all()
        self.pool.reset()  # no copy is in flight
        for books in (self._unawaited, self._leaving, self._counters, self._policy, self._keeping):
            books.clear()
        self._use(*self._new_books())

    @contextlib.contextmanager
    def iteration(
        self,
        actions: Sequence[Action] | None = None,
        weights: Iterable[torch.Tensor] = (),
        *,
        is_combined: bool = False,
    ) -> Iterator[OffloadEngine]:
        """Return a context manager for `begin_iteration` and `end_iteration`; calls `reset_iteration` on exceptions."""
        self.begin_iteration(actions, weights, is_combined=is_combined)
        try:
            yield self
            self.end_iteration()
        except BaseException as error:
            explain(self, error)
            self.reset_iteration()
            raise

    def close(self) -> None:
        """Reset, and return all host memory to the system; the engine accepts no more iterations. Idempotent.

        Raises:
            OffloadError: if a captured step is not released; see `graphs`.
        """
        if not self._is_closed:
            self.graphs.check_released()
            self._observer.close()
            if self.budget is not None:
                self.budget.close()
            self.reset_iteration()
            self.pool.close()
            self._is_closed = True  # last, so that after an interrupt the next call continues
        if not self._is_device_closed:
            self.device.close()
            self._is_device_closed = True

    def _new_books(self) -> tuple[ActivationStore, Executor]:
        store = ActivationStore(self._context, self.pool, self._unawaited, self._counters, self.config, self._lasting)
        return store, Executor(store, self.device, self._policy, self._leaving, self._keeping, self.config.dry_run)
