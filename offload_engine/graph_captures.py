# SPDX-License-Identifier: Apache-2.0
"""`GraphCaptures`: announces captures of steps and of their parts as CUDA graphs, and keeps what these use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any
from weakref import WeakMethod

import torch

from offload_engine._captured.graphs import told_of_graphs
from offload_engine._captured.recording import Recording
from offload_engine._host.pool import HostPool
from offload_engine._host.slabs import HostSlabs
from offload_engine._saved.transfers import TransferContext, fork_copy_streams, join_copy_streams
from offload_engine.captured_layers import CapturedLayers, eligibility_of
from offload_engine.config import OffloadConfig
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
    """Lets one step of an engine, or parts of its steps, be recorded by CUDA graphs.

    Args:
        context: of the engine's transfers.
        pool: of the engine; what it has pinned is handed over to the graph of a step.
        config: of the engine.
        check: a method that raises OffloadError while a whole step, or else parts of one, cannot be captured.
        reset: a method that drops what a failed capture has saved. Neither keeps its engine alive.
    """

    def __init__(
        self,
        context: TransferContext,
        pool: HostPool,
        config: OffloadConfig,
        check: Callable[[bool], None],
        reset: Callable[[], None],
    ) -> None:
        self._context = context
        self._pool = pool
        self._min_bytes = config.min_tensor_bytes
        self._check = WeakMethod(check)
        self._reset = WeakMethod(reset)
        self._steps: list[CapturedStep] = []
        self._layers: list[CapturedLayers] = []
        self._recorded: CapturedLayers | None = None  # whose captures are announced

    @property
    def layers(self) -> tuple[CapturedLayers, ...]:
        """Return the captured layers that are not released, in the order of their captures."""
        return tuple(self._layers)

    @property
    def recording(self) -> Recording | None:
        """Return what packs saved tensors while a layer is captured; None at all other times."""
        layers = self._recorded
        return layers.recording if layers is not None and layers.recording.is_capturing else None

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
        self._check_before(is_whole_step=True)
        try:
            self._begin()
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

    @contextmanager
    def capture_layers(
        self,
        weights: Iterable[torch.Tensor] = (),
        *,
        min_bytes: int | None = None,
        saves_all: bool = True,
        graphs_beside: int = 1,
        owner: Any = torch.cuda,
    ) -> Iterator[CapturedLayers]:
        """Return a context manager for the captures of parts of a step, each forward and each backward in a graph:

        ```python
        with engine.graphs.capture_layers(model.parameters()) as captured:
            layers = torch.cuda.make_graphed_callables(layers, samples)
        ```

        What the forwards save leaves the memory of the graphs. It is copied behind the replay of its graph, beside what
        runs next, and back beside what runs before its backward. The graphs have to be replayed in the order of
        their captures, over and over; a pass may be broken off. No other graph may have their memory pool.

        Args:
            weights: parameters and buffers; their storages, and views of them, never move.
            min_bytes: smaller storages stay; None: as `OffloadConfig.min_tensor_bytes` says.
            saves_all: whatever the forwards save may move; False: what groups save (`recording`).
            graphs_beside: how many graphs run beside a copy. Their number times what one layer saves stays on the
                device, twice in backward; 0: copies run beside what runs eagerly between two graphs.
            owner: has the class of the graphs, `CUDAGraph`.

        Raises:
            OffloadError: if the engine is closed or inside a step, or captures already.
            NotImplementedError: if the device has no graphs.
            ValueError: if `graphs_beside` is negative.
        """
        context = self._context
        if graphs_beside < 0:
            raise ValueError(f"graphs_beside must not be negative, got {graphs_beside}")
        self._check_before(is_whole_step=False)
        least = self._min_bytes if min_bytes is None else min_bytes
        eligibility = eligibility_of(context.device.torch_device, least, weights)
        layers = CapturedLayers(context, self._pool.books_beside(), eligibility, saves_all, graphs_beside, self._forget)
        self._recorded = layers
        try:
            with told_of_graphs(layers, owner):
                yield layers
            layers.complete()
        except BaseException:
            layers.abandon()
            raise
        finally:
            self._recorded = None
        self._pool.set_aside(layers.slabs)
        self._layers.append(layers)

    def release_dropped(self) -> None:
        """Release the captured layers whose graphs have all been reset or freed."""
        for layers in self.layers:
            if layers.are_dropped:
                layers.release()

    def check_layers_released(self) -> None:
        """Release the captured layers whose graphs are gone, and check that there are no others.

        Raises:
            OffloadError: if there are.
        """
        self.release_dropped()
        if self._layers:
            nbytes = sum(layers.host_bytes for layers in self._layers)
            raise OffloadError(
                f"captured layers still use {nbytes:,} bytes of host memory, which their replays overwrite: reset "
                "their graphs (TECudaGraphHelper.delete_cuda_graphs() does) or drop them"
            )

    def check_released(self) -> None:
        """Check that no captured step and no captured layers have host memory.

        Raises:
            OffloadError: if one has.
        """
        self.check_layers_released()
        if self._steps:
            nbytes = sum(step.host_bytes for step in self._steps)
            raise OffloadError(
                f"{len(self._steps)} captured steps still use {nbytes:,} bytes of host memory, which their replays "
                "overwrite: reset their graphs, then call release() on what graphs.capture() returned"
            )

    def _check_before(self, is_whole_step: bool) -> None:
        context, graphs = self._context, self._context.device.graphs
        if graphs is None:
            raise NotImplementedError("a capture on a device without CUDA graphs: capture on a GPU")
        if context.is_captured or self._recorded is not None or graphs.is_capturing():
            raise OffloadError("a capture inside a capture: it has to begin before that of CUDA, and one at a time")
        _call(self._check, is_whole_step)

    def _begin(self) -> None:
        context, graphs = self._context, self._context.device.graphs
        assert graphs is not None
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

    def _forget(self, layers: CapturedLayers) -> None:
        if layers in self._layers:
            self._layers.remove(layers)
            self._pool.take_over(layers.slabs)

    def _release(self, step: CapturedStep) -> None:
        if step.slabs is None:
            return
        device = self._context.device
        device.synchronize(device.record_event(device.current_stream()))
        self._steps.remove(step)
        slabs, step.slabs = step.slabs, None
        self._pool.take_over(slabs)


def _call(reference: WeakMethod[Callable[..., None]], *args: bool) -> None:
    method = reference()
    assert method is not None, "the caller of a capture holds the engine"
    method(*args)
