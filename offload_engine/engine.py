"""`OffloadEngine`: owns the streams, the host pool and the chunks in flight, and wires the parts together."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import torch

from offload_engine._compat import torch_private
from offload_engine._devices import make_device
from offload_engine._devices.base import Device, HostRead, Stream
from offload_engine._host.pool import HostPool
from offload_engine._host.unawaited import UnawaitedCopies
from offload_engine._observe.labels import Ranges
from offload_engine._observe.observer import Observer
from offload_engine._policy.choose import make_policy
from offload_engine._policy.executor import Executor
from offload_engine._policy.leaving import LeavingQueue
from offload_engine._policy.planned import PlannedPolicy
from offload_engine._saved.storage import TensorGroup
from offload_engine._saved.store import ActivationStore
from offload_engine._saved.transfers import TransferContext
from offload_engine.chunk import ChunkOffloadHandler
from offload_engine.config import OffloadConfig
from offload_engine.errors import OffloadError
from offload_engine.meter import ResidencyMeter
from offload_engine.planning.moves import HELD
from offload_engine.planning.plan import Plan
from offload_engine.policies import LowestPeak
from offload_engine.schedule import Action, ChunkKey
from offload_engine.stats import IterationStats

logger = logging.getLogger(__name__)
_current_graph_task: Final[Any] = torch_private.current_graph_task


class EngineSnapshot(NamedTuple):
    """How many bytes and copies are where; see `OffloadEngine.snapshot`."""

    saved_bytes: int
    """Saved by groups, with a handle left, wherever they are."""
    resident_bytes: int
    """Of these, on the device."""
    prefetched_bytes: int
    """Copy-ins that are issued and not used yet."""
    inflight_bytes: int
    """Copy-outs that are issued and not released."""
    leaving: tuple[TensorGroup, ...]
    """The group of each of these copy-outs, oldest first."""
    num_live: int
    """Saved storages with a handle left."""
    lent_bytes: int
    """Host bytes lent to them."""


class OffloadEngine:
    """Moves the saved activations of one model to the host and back.

    An iteration is one training step: any number of forwards and backwards of chunks. Between iterations, under
    `no_grad` and while a backward runs (recomputation) the engine is passive.

    Args:
        config: bounds and thresholds.
        device: where activations are; None: CUDA where there is a GPU, else the CPU.
        meter: where resident bytes are counted besides `stats`, over time and together with a `SavedTensorTracker`.

    Raises:
        ValueError: if the configuration does not fit the device.
        TypeError: if `device` is one of torch's.
    """

    def __init__(
        self, config: OffloadConfig | None = None, device: Device | None = None, meter: ResidencyMeter | None = None
    ) -> None:
        if isinstance(device, (str, int, torch.device)):
            raise TypeError(
                f"device={device!r} is a device of torch's. Leave it out: the engine takes the current CUDA device "
                "(torch.cuda.set_device), or the CPU where there is none"
            )
        self.config: OffloadConfig = config or OffloadConfig()
        self.device: Device = device if device is not None else make_device(self.config)
        self.meter: ResidencyMeter | None = meter
        unawaited, leaving = UnawaitedCopies(), LeavingQueue()
        self.pool: HostPool = HostPool(self.device, self.config.host_limit_bytes, unawaited=unawaited)
        self.current_chunk: ChunkOffloadHandler | None = None
        self._store = ActivationStore(TransferContext(self.device), self.pool, unawaited, self.meter, self.config)
        policy = make_policy(self.config.policy or LowestPeak(), self._store.counters, leaving)
        self._executor = Executor(self._store, self.device, policy, leaving, self.config.dry_run)
        self._observer = Observer()
        self._is_in_iteration = False
        self._is_closed = False
        self._num_chunks = 0

    @property
    def is_active(self) -> bool:
        """True where groups may be opened: in an iteration, with gradients, outside any running backward."""
        return self._is_in_iteration and torch.is_grad_enabled() and _current_graph_task() == -1

    @property
    def active_chunk(self) -> ChunkOffloadHandler | None:
        """The chunk whose forward runs, where groups may be opened; else None."""
        return self.current_chunk if self.is_active else None

    @property
    def is_in_iteration(self) -> bool:
        """True from `begin_iteration()` to `end_iteration()` or `reset_iteration()`."""
        return self._is_in_iteration

    @property
    def has_saved(self) -> bool:
        """True while a graph holds anything that the engine took charge of: its backward may still come."""
        return bool(self._store.live)

    @property
    def has_failed(self) -> bool:
        """True after a copy has failed, until `reset_iteration()`: what was saved in this iteration is not complete."""
        return self._store.failures.has_failed

    @property
    def stats(self) -> IterationStats:
        """Counters of the running iteration, or of the last one."""
        return self._store.counters.stats

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
            is_combined: each forward runs together with the backward behind it in `actions`, as in the all-to-all
                overlap: the prefetch for that one does not wait for the forward to begin.

        Raises:
            OffloadError: if an iteration is running, or the engine is closed.
        """
        if self._is_closed:
            raise OffloadError("begin_iteration() after close(): make a new engine")
        if self._is_in_iteration:
            raise OffloadError(
                "begin_iteration() inside an iteration: call end_iteration() after its last backward, or "
                "reset_iteration() if it raised"
            )
        self._store.begin(weights)
        self._executor.policy.begin(actions or (), is_combined)
        self._num_chunks = 0
        self._store.context.recorder = self._observer.begin(self.device, self.config.dry_run)
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
        """The forward of a chunk begins; the forward of the chunk before it, if any, is over.

        Args:
            key: virtual stage and microbatch; None: the next microbatch of stage 0.
            keep_groups: indices of groups that stay resident, because their backward comes at once.
            num_offload_group: groups from this index on stay resident too.
            tensor_need_offloading_checker: saved tensors for which it is false stay where they are.
            double_buffering: for callers of TransformerEngine's handler; must be False.
            has_head: its backward comes at once, and its `begin_head` will be called between the last layer and the
                loss; until then the copies of its last layers may be in flight.

        Raises:
            OffloadError: outside an iteration.
            NotImplementedError: for `double_buffering=True`.
        """
        if not self._is_in_iteration:
            raise OffloadError("start_chunk() outside an iteration: call begin_iteration() first")
        chunk = ChunkOffloadHandler(
            key if key is not None else ChunkKey(0, self._num_chunks),
            self._executor,
            keep_groups=keep_groups,
            num_offload_group=num_offload_group,
            tensor_need_offloading_checker=tensor_need_offloading_checker,
            double_buffering=double_buffering,
            has_head=has_head,
        )
        self._num_chunks += 1
        self.current_chunk = chunk
        chunk.begin_forward()
        return chunk

    def exclude(self, tensor: torch.Tensor) -> None:
        """Never copy the storage of `tensor` in this iteration, for instance one that recomputation discards."""
        self._store.eligibility.exclude(tensor)

    def held_elsewhere(self, *holders: torch.Tensor, num_copies: int = 0) -> None:
        """Promise that nobody reads `holders` until the backward of what has been saved of them; empty their storage.

        A copy-out frees no memory while somebody keeps the tensor: a schedule that keeps the inputs of its stages, say.
        After this call the storage is resized to zero bytes as soon as its copy is complete, and gets them back, in
        place, before the backward needs them, or when the graph goes without a backward. To read it in between crashes
        the process. Reads that were issued before, on the current stream, are safe.

        No-op for what no group has saved, or stays resident. A storage that more tensors share than are told here is
        left alone, and counted in `IterationStats.num_viewed_storages`.

        Args:
            holders: all tensors that share one storage, but for what autograd saved in groups or under
                `SavedTensorHooks.around_groups`; the base of a view need not be named. Nothing else may have saved
                them.
            num_copies: how many detached aliases exist besides, where they cannot be named.
        """
        self._executor.at(HELD)  # a delayed copy-out first: the storage of what stays resident would stay, too
        self._store.empty_for_holders(holders, num_copies)

    def set_allocation_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Declare which compute stream made `tensor`, where another one is about to save it.

        The memory returns to the pool of the stream that made it, which then waits for the copy-out as well. It is safe
        to name one that may have made it: the stream that saves it waits anyway.

        Args:
            tensor: not saved yet.
            stream: as `engine.device.current_stream()` names it.
        """
        self._store.alloc_streams.declare(tensor, stream)

    @property
    def plan(self) -> Plan | None:
        """The plan of the running step, or of the last one; None without the policy `Planned`, or a schedule.

        `planning.plan.format_plan` prints it.
        """
        policy = self._executor.policy
        return policy.plan if isinstance(policy, PlannedPolicy) else None

    def snapshot(self) -> EngineSnapshot:
        """Return how many bytes and copies are where now."""
        counters, leaving = self._store.counters, self._executor.leaving
        return EngineSnapshot(
            saved_bytes=counters.saved_bytes,
            resident_bytes=counters.resident_bytes,
            prefetched_bytes=counters.prefetched_bytes,
            inflight_bytes=leaving.inflight_bytes,
            leaving=tuple(leaving.groups),
            num_live=len(self._store.live),
            lent_bytes=self.pool.lent_bytes,
        )

    def trim_host_memory(self) -> int:
        """Give host memory that nothing uses, and no copy reads any more, back to the system.

        Whole slabs only. Between two steps that is nearly all; the next step obtains what it needs anew, which is slow
        where it is pinned. `close()` gives back everything.

        Returns:
            Number of bytes given back.
        """
        return self.pool.trim()

    def host_read(self, tensor: torch.Tensor) -> HostRead:
        """Start reading a small device tensor (up to 8 KiB), such as split sizes, on the current stream.

        Unlike `.cpu()` it does not stand behind copies of activations that are under way. Larger tensors are read the
        plain way, at once. The result may be pinned: if it is copied to a device without blocking, on a stream other
        than that of the next read, hold it until the copy is over.

        Returns:
            A handle: `wait()` gives the tensor on the CPU; `tensor` is it, valid once the stream has come so far.
        """
        return self.device.host_read(tensor)

    @property
    def ranges(self) -> Ranges:
        """Ranges in profiles around what the engine issues."""
        return self._store.context.ranges

    def record(self, file: str | os.PathLike[str] | None = None) -> None:
        """Record the next iteration that begins; see docs/observe.md.

        Args:
            file: to write; `{rank}` and `{step}` in its name are replaced. None: for `report` only.
        """
        self._observer.ask(file)

    def report(self) -> str:
        """Return the tables of the last recorded iteration, else what the counters of the last one tell."""
        return self._observer.report(self.stats)

    def end_iteration(self) -> IterationStats:
        """End a training step, after its last backward.

        What a graph still holds stays valid; it is counted in `num_storages_left` and named in a warning.

        Raises:
            OffloadError: outside an iteration.
            CopyError: if a copy-out failed.
        """
        if not self._is_in_iteration:
            raise OffloadError("end_iteration() outside an iteration")
        self._executor.end_iteration()
        self._is_in_iteration = False
        self.current_chunk = None
        stats = self._store.finish()
        recorder, self._store.context.recorder = self._store.context.recorder, None
        self._observer.end(recorder, stats)
        if stats.num_storages_left:
            logger.warning(
                "%d saved storages outlive the iteration, first %s: a graph is kept alive, or a backward has not run",
                stats.num_storages_left,
                next(iter(self._store.live)),
            )
        return stats

    def reset_iteration(self) -> None:
        """Recover after an exception: wait for copies in flight, then drop every saved activation. Idempotent.

        No-op after `close()`, which has done it.

        Parameters and gradients are not touched. A graph of the abandoned step can no longer run its backward.
        """
        if self._is_closed:  # the device takes no more work, not even the events of a reset
            return
        recorder, self._store.context.recorder = self._store.context.recorder, None
        if recorder is not None:
            recorder.discard()
        self._executor.reset()
        self._store.abandon_all()
        self.pool.forget_events()  # no copy is left; a failed one would never complete, and stop the next step
        self._is_in_iteration = False
        self.current_chunk = None

    @contextlib.contextmanager
    def iteration(
        self,
        actions: Sequence[Action] | None = None,
        weights: Iterable[torch.Tensor] = (),
        *,
        is_combined: bool = False,
    ) -> Iterator[OffloadEngine]:
        """`begin_iteration` and `end_iteration`, with `reset_iteration` where the body raises."""
        self.begin_iteration(actions, weights, is_combined=is_combined)
        try:
            yield self
            self.end_iteration()
        except BaseException:
            self.reset_iteration()
            raise

    def close(self) -> None:
        """Drop everything and give the host memory back; the engine takes no more iterations. Idempotent."""
        if self._is_closed:
            return
        self.reset_iteration()
        self.pool.close()
        self.device.close()
        self._is_closed = True  # last: after an interrupt the next call goes on
