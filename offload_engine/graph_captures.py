# SPDX-License-Identifier: Apache-2.0
"""`GraphCaptures`: announces captures of steps and of their parts as CUDA graphs, and keeps the memory they use."""

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
        self.slabs: HostSlabs | None = None  # before the capture is over, and after the release
        self._release = release

    @property
    def host_bytes(self) -> int:
        """Return the bytes of host memory that the graph owns; 0 after `release`."""
        return 0 if self.slabs is None else self.slabs.nbytes

    def release(self) -> None:
        """Return the host memory to the engine's pool, for other steps. Idempotent.

        Call it after the graph has been reset or dropped, on the stream that replayed it last: it blocks the host until
        that stream is done.
        """
        self._release(self)


class GraphCaptures:
    """Lets one step of an engine, or parts of its steps, be recorded by CUDA graphs.

    Args:
        context: device and copy streams.
        pool: the engine's; its slabs are handed over to the graph of a step.
        config: the engine's.
        check: a method that raises OffloadError while a whole step, or else parts of one, cannot be captured.
        reset: a method that abandons what a failed capture has saved. Both methods are held weakly.
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
        self._config = config
        self._check = WeakMethod(check)
        self._reset = WeakMethod(reset)
        self._steps: list[CapturedStep] = []
        self._layers: list[CapturedLayers] = []
        self._recorded: CapturedLayers | None = None  # whose captures are announced

    @property
    def layers(self) -> tuple[CapturedLayers, ...]:
        """Return the captured layers that have not been released, in the order of their captures."""
        return tuple(self._layers)

    @property
    def recording(self) -> Recording | None:
        """Return the recording that packs saved tensors while a layer is captured; None at all other times."""
        layers = self._recorded
        return layers.recording if layers is not None and layers.recording.is_capturing else None

    @property
    def steps(self) -> tuple[CapturedStep, ...]:
        """Return the captured steps that have not been released, in the order of their captures."""
        return tuple(self._steps)

    @contextmanager
    def capture(self, graph: AbstractContextManager[Any] | None = None) -> Iterator[CapturedStep]:
        """Return a context manager for the capture of one whole training step:

        ```python
        for _ in range(2):
            step()  # eagerly, on the stream of the capture: pins the host memory
        with engine.graphs.capture(torch.cuda.graph(graph, stream=stream)) as captured:
            step()
        ```

        The copies become a part of the graph, on streams of their own, in the order that the rules demand. A copy-out
        is released where the policy would wait for it at the latest, because events cannot be queried in a capture. The
        host memory that earlier steps have pinned belongs to the graph until `CapturedStep.release`.

        Args:
            graph: captures what runs inside it. None: other code captures, inside this context manager; if the step
                raises an error, CUDA may then report unjoined streams instead.

        Raises:
            OffloadError: if the engine is closed or inside a step, has run no step before, has not planned one, has a
                budget, or captures already; in the capture, if it needs more host memory than is pinned; and at its
                end, if an autograd graph still holds saved tensors.
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

        What the forwards save leaves the memory of the graphs. It is copied out after the replay of its graph, while
        the next graphs run, and copied in while the graphs before its backward run. The graphs must be replayed in the
        order of their captures, over and over; a pass may end early. No other graph may have their memory pool.

        Args:
            weights: parameters and buffers; their storages, and views of them, never move.
            min_bytes: smaller storages stay; None: `OffloadConfig.min_tensor_bytes`.
            saves_all: all that the forwards save may move; False: only what groups save (`recording`).
            graphs_beside: number of graphs that run while one is copied. This number times the bytes that one layer
                saves stays on the device, twice in backward; 0: copies overlap eager work between two graphs.
            owner: the module with the class `CUDAGraph`.

        Raises:
            OffloadError: if the engine is closed or inside a step, or captures already; between captures, if the host
                tier is full and `host_policy` is "error".
            NotImplementedError: if the device has no graphs.
            ValueError: if `graphs_beside` is negative.
        """
        context = self._context
        if graphs_beside < 0:
            raise ValueError(f"graphs_beside must not be negative, got {graphs_beside}")
        self._check_before(is_whole_step=False)
        least = self._config.min_tensor_bytes if min_bytes is None else min_bytes
        eligibility, slabs = eligibility_of(context.device.torch_device, least, weights), self._pool.books_beside()
        layers = CapturedLayers(context, slabs, self._config, eligibility, saves_all, graphs_beside, self._forget)
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

    def release_freed(self) -> None:
        """Release the captured layers whose graphs have all been reset or freed."""
        for layers in self.layers:
            if layers.are_freed:
                layers.release()

    def check_layers_released(self) -> None:
        """Release the captured layers whose graphs have been reset or freed, and check that no others are left.

        Raises:
            OffloadError: if some are.
        """
        self.release_freed()
        if self._layers:
            nbytes = sum(layers.host_bytes for layers in self._layers)
            raise OffloadError(
                f"captured layers still use {nbytes:,} bytes of host memory, which their replays overwrite: reset "
                "their graphs (TECudaGraphHelper.delete_cuda_graphs() does) or drop them"
            )

    def check_released(self) -> None:
        """Check that all captured steps and layers have been released.

        Raises:
            OffloadError: if one has not.
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
            raise OffloadError("a capture inside a capture: announce it before CUDA's begins, and one at a time")
        _call(self._check, is_whole_step)

    def _begin(self) -> None:
        context, graphs = self._context, self._context.device.graphs
        assert graphs is not None
        self._wait_for_copies()
        self._pool.freeze()  # may query events, so before the capture
        graphs.record(True)
        context.is_captured = True

    def _join(self) -> None:
        """Join the copy streams to the capture: otherwise CUDA's error would hide why the step has failed."""
        graphs = self._context.device.graphs
        if graphs is not None and graphs.is_capturing():
            with suppress(CopyError):  # CUDA may have ended the capture already
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
