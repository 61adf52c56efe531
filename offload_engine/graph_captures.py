# SPDX-License-Identifier: Apache-2.0
"""`GraphCaptures`: announces captures of whole steps as CUDA graphs, and keeps the host memory that these use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakMethod

from offload_engine._host.pool import HostPool
from offload_engine._host.slabs import HostSlabs
from offload_engine._saved.transfers import TransferContext, fork_copy_streams, join_copy_streams
from offload_engine.errors import CopyError, OffloadError


class CapturedStep:
    """The host memory of a captured step: each replay of its graph copies to and from the same addresses.

    Made by `GraphCaptures.capture`. The engine keeps it until `release`, whatever becomes of the graph.
    """

    def __init__(self, release: Callable[[CapturedStep], None]) -> None:
        self.slabs: HostSlabs | None = None  # until the capture is over, and once it is released
        self._release = release

    @property
    def host_bytes(self) -> int:
        """Return the bytes of host memory that the graph has to itself; 0 once they are released."""
        return 0 if self.slabs is None else self.slabs.nbytes

    def release(self) -> None:
        """Return the host memory to the engine's pool, for other steps. Idempotent.

        Call it after the graph has been reset or dropped, on the stream that replayed it last: it waits for that.
        """
        self._release(self)


class GraphCaptures:
    """Lets one step of an engine be recorded by a CUDA graph, with its copies.

    Args:
        context: of the engine's transfers.
        pool: of the engine; what it has pinned is handed over to the graph.
        check: a method that raises OffloadError while the engine cannot be captured.
        reset: a method that drops what a failed capture has saved. Neither keeps its engine alive.
    """

    def __init__(
        self, context: TransferContext, pool: HostPool, check: Callable[[], None], reset: Callable[[], None]
    ) -> None:
        self._context = context
        self._pool = pool
        self._check = WeakMethod(check)
        self._reset = WeakMethod(reset)
        self._steps: list[CapturedStep] = []

    @property
    def steps(self) -> tuple[CapturedStep, ...]:
        """Return the captured steps that are not released, in the order of their captures."""
        return tuple(self._steps)

    @contextmanager
    def capture(self, graph: AbstractContextManager[Any] | None = None) -> Iterator[CapturedStep]:
        """Return a context manager for the capture of one whole training step:

        ```python
        for _ in range(2):
            step()  # eagerly, on the stream of the capture: they fill the host memory
        with engine.graphs.capture(torch.cuda.graph(graph, stream=stream)) as captured:
            step()
        ```

        The copies become a part of the graph, on streams of their own, in the order that the rules demand. A copy-out
        is released where the policy would at last wait for it, because nothing can be asked while a graph is captured.
        The host memory that the steps before have pinned belongs to the graph until `CapturedStep.release`.

        Args:
            graph: captures what runs inside it. None: other code does, inside this context manager; then CUDA may tell
                of streams that were not joined where the step has raised an error.

        Raises:
            OffloadError: if the engine is closed or inside a step, has run no step before, has not planned one, has a
                budget, or captures already; in the capture, if it needs more host memory than is pinned, and at its
                end if its graph of autograd still holds saved tensors.
            NotImplementedError: if the device has no graphs.
        """
        step = CapturedStep(self._release)
        self._begin()
        try:
            with graph or nullcontext():
                try:
                    yield step
                except BaseException:
                    self._join()
                    raise
            self._check_end()
        except BaseException:
            self._end()
            _call(self._reset)
            raise
        self._end()
        step.slabs = self._pool.hand_over()
        self._steps.append(step)

    def check_released(self) -> None:
        """Check that no captured step has host memory.

        Raises:
            OffloadError: if one has.
        """
        if self._steps:
            nbytes = sum(step.host_bytes for step in self._steps)
            raise OffloadError(
                f"{len(self._steps)} captured steps still use {nbytes:,} bytes of host memory, which their replays "
                "overwrite: reset their graphs, then call release() on what graphs.capture() returned"
            )

    def _begin(self) -> None:
        context = self._context
        graphs = context.device.graphs
        if graphs is None:
            raise NotImplementedError("graphs.capture() on a device without CUDA graphs: capture a step on a GPU")
        if context.is_captured or graphs.is_capturing():
            raise OffloadError(
                "graphs.capture() inside a capture: it has to begin before that of CUDA, and one at a time"
            )
        _call(self._check)
        self._wait_for_copies()
        self._pool.freeze()  # it may ask for events
        graphs.record(True)
        context.is_captured = True

    def _join(self) -> None:
        """Have the copy streams end with the capture, or CUDA's error would hide why the step has failed."""
        graphs = self._context.device.graphs
        if graphs is not None and graphs.is_capturing():
            with suppress(CopyError):  # of a capture that CUDA has given up already
                fork_copy_streams(self._context)  # they may not be a part of it yet
                join_copy_streams(self._context)

    def _end(self) -> None:
        self._context.is_captured = False
        self._pool.thaw()
        graphs = self._context.device.graphs
        assert graphs is not None
        graphs.record(False)

    def _check_end(self) -> None:
        if self._pool.num_leases:
            raise OffloadError(
                f"the captured step has ended with {self._pool.lent_bytes:,} bytes of saved tensors on the host: "
                "capture the whole step, with the backward of each of its forwards"
            )

    def _wait_for_copies(self) -> None:
        """Block the host until no copy is in flight: a capture cannot wait for work from before it."""
        device = self._context.device
        for stream in (self._context.copy_out_stream, self._context.copy_in_stream, device.current_stream()):
            device.synchronize(device.record_event(stream))

    def _release(self, step: CapturedStep) -> None:
        if step.slabs is None:
            return
        device = self._context.device
        device.synchronize(device.record_event(device.current_stream()))
        self._steps.remove(step)
        slabs, step.slabs = step.slabs, None
        self._pool.take_over(slabs)


def _call(reference: WeakMethod[Callable[[], None]]) -> None:
    method = reference()
    assert method is not None, "the caller of a capture holds the engine"
    method()
