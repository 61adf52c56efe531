# SPDX-License-Identifier: Apache-2.0
"""`Session`: maps forwards and backwards of a model to iterations and chunks of an engine."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch

from offload_engine._compat import torch_private
from offload_engine.chunk import ChunkOffloadHandler
from offload_engine.engine import OffloadEngine
from offload_engine.engine_view import explain, shortage_of
from offload_engine.errors import CopyError, OffloadError
from offload_engine.frontends._common.weights import may_move
from offload_engine.schedule import ChunkKey
from offload_engine.stats import IterationStats

logger = logging.getLogger(__name__)

_current_graph_task: Final = torch_private.current_graph_task


class Session:
    """Owns the iterations of an engine for a model in any training loop.

    An iteration begins with the first forward and ends with the backward after which no graph holds a saved tensor,
    possibly several forwards later. Tensors that autograd holds stay valid in any case. So two forwards before a
    backward, a retained graph, evaluation in between, a dropped graph and an exception are all safe.

    A graph that is kept, such as the output of an evaluation with gradients, must not merge all steps into one
    iteration. So the next forward also ends an iteration if all chunks left are older than one whose backward has
    begun. If the backward of such a chunk comes after all, its storages are copied in when they are read.

    Args:
        engine: driven by this session only.
        weights: returns parameters and buffers; called when an iteration begins, because FSDP gives its parameters new
            storages. None: no such list. Leaves that receive a gradient, parameters, and their views and cast copies
            are recognized as weights without it.
        owns_iterations: False: the caller begins and ends iterations on the engine, and forwards only become chunks.

    Attributes:
        chunk: chunk of the running forward; None between forwards.
    """

    def __init__(
        self,
        engine: OffloadEngine,
        weights: Callable[[], Iterable[torch.Tensor]] | None = None,
        *,
        owns_iterations: bool = True,
    ) -> None:
        self.engine: OffloadEngine = engine
        self.chunk: ChunkOffloadHandler | None = None
        self._weights = weights
        self._owns_iterations = owns_iterations
        self._is_closed = False
        self._is_checked = False  # `warn_if_idle` has run
        self._noted_tasks: set[int] = set()  # running backwards that will call `_end_backward`
        self._numbers: dict[ChunkOffloadHandler, int] = {}  # numbers the chunks of this iteration, in order
        self._reached = -1  # the highest number of a chunk whose backward has begun
        self._in_backward: ChunkOffloadHandler | None = None  # the chunk that was read last
        self._has_left = False  # graphs of earlier iterations held saved tensors when this one began
        self._has_explained = False  # a shortage of memory
        if owns_iterations and engine.budget is not None and engine.device.memory is not None:
            engine.device.memory.watch(self._explain_shortage)

    @property
    def stats(self) -> IterationStats:
        """Return the counters of the running iteration, or of the last one."""
        return self.engine.stats

    def start_forward(self, key: ChunkKey | None = None) -> ChunkOffloadHandler | None:
        """Start a chunk, and an iteration if none is open, for a forward that begins.

        Args:
            key: key of the chunk; None: the next microbatch of stage 0.

        Returns:
            The chunk. None under `no_grad`, while a backward runs (recomputation), inside another forward of this
            session, and in iterations without groups; do not call `end_forward` then.
        """
        if self.chunk is not None or not torch.is_grad_enabled() or is_in_backward():
            return None
        if self._owns_iterations:
            self._begin_if_over()
        return None if self.engine.is_idle else self._start(key)

    def start_saving(self, key: ChunkKey | None = None) -> ChunkOffloadHandler:
        """Start a chunk as `start_forward` does, from a pack hook, which autograd calls with gradients disabled."""
        if self._owns_iterations:
            self._begin_if_over()
        return self._start(key)

    def _start(self, key: ChunkKey | None) -> ChunkOffloadHandler:
        self.chunk = self.engine.start_chunk(key, tensor_need_offloading_checker=may_move)
        if self._owns_iterations:
            self._numbers[self.chunk] = len(self._numbers)
        return self.chunk

    def end_forward(self) -> None:
        """End a forward. A group that is still open may be closed later. Idempotent."""
        self.chunk = None

    def abandon_forward(self) -> None:
        """Abandon the open groups of a forward that raised. Tensors that autograd holds stay valid."""
        explain(self.engine, sys.exception())
        chunk, self.chunk = self.chunk, None
        while chunk is not None and chunk.groups.innermost is not None:
            chunk.abandon_group()

    @contextmanager
    def forward(self, key: ChunkKey | None = None) -> Iterator[ChunkOffloadHandler | None]:
        """Return a context manager for `start_forward` and `end_forward`; calls `abandon_forward` on an exception."""
        chunk = self.start_forward(key)
        try:
            yield chunk
        except BaseException:
            if chunk is not None:
                self.abandon_forward()
            raise
        if chunk is not None:
            self.end_forward()

    def note_backward(self, chunk: ChunkOffloadHandler | None = None) -> None:
        """Queue a callback for the end of the running backward, when a saved tensor is unpacked. Idempotent.

        A nested backward (reentrant checkpointing) ends before the outer one; each has its own callback, and the one
        that finds no saved tensor left ends the iteration.

        Args:
            chunk: the chunk that saved the tensor; None: no chunk did.
        """
        task = _current_graph_task()
        if not self._owns_iterations or task == -1:
            return
        if chunk is not None and chunk is not self._in_backward:
            self._in_backward = chunk
            self._reached = max(self._reached, self._numbers.get(chunk, -1))
        if task in self._noted_tasks:
            return
        self._noted_tasks.add(task)
        torch_private.queue_callback(partial(self._end_backward, task))

    def warn_if_idle(self) -> None:
        """Warn, once, after a first forward that offloaded nothing."""
        if self._is_checked or not (torch.is_grad_enabled() or is_in_backward()):
            return
        self._is_checked = True
        if self.stats.managed_bytes == 0:
            logger.warning(
                "nothing was offloaded: no activation of at least %d bytes was saved on %s. Check the model's device, "
                "or lower OffloadConfig(min_tensor_bytes=...).",
                self.engine.config.min_tensor_bytes,
                self.engine.device.torch_device,
            )

    def close(self) -> None:
        """Abandon the running forward and close the engine. Idempotent."""
        self._is_closed = True
        self.abandon_forward()
        self.engine.close()

    def check_open(self, made_by: str) -> None:
        """Check that `close` has not been called.

        Args:
            made_by: the call that made the owner of this session, for the error.

        Raises:
            OffloadError: if it has been called.
        """
        if self._is_closed:
            raise OffloadError(f"this offload was ended by close() or remove(): call {made_by} again for a new one")

    def _explain_shortage(self) -> None:
        """Warn why memory runs out, once, in code whose errors do not pass through this session, such as a backward."""
        text = None if self._has_explained or self.chunk is not None else shortage_of(self.engine)
        if text is not None:
            self._has_explained = True
            logger.warning("out of GPU memory: %s", text)

    def _begin_if_over(self) -> None:
        engine = self.engine
        if engine.is_in_iteration:
            if engine.failures.has_failed:
                logger.warning("a copy failed in the last iteration: its remaining graphs cannot run backward")
                engine.reset_iteration()
            elif not self._is_over():
                return
            else:
                self._end_unused()
        self._noted_tasks.clear()  # some are of backwards that raised, whose callbacks never run
        self._forget_chunks()
        self._has_left = engine.has_saved
        engine.begin_iteration(weights=self._weights() if self._weights is not None else ())

    def _is_over(self) -> bool:
        """Return whether, when a forward begins, no more backward of this iteration is expected."""
        if not self.engine.has_saved:
            return True
        newest = self._newest_left()
        return newest < self._reached or (self._has_left and newest == -1)

    def _newest_left(self) -> int:
        """Return the number of the newest chunk of this iteration whose saved tensors a graph holds; -1 if none."""
        return max((number for chunk, number in self._numbers.items() if chunk.groups.has_saved()), default=-1)

    def _forget_chunks(self) -> None:
        for chunk in self._numbers:
            chunk.groups.progress.is_over = True
        self._numbers.clear()
        self._reached, self._in_backward = -1, None

    def _end_unused(self) -> None:
        """End an iteration whose graphs were dropped without a backward, are kept, or saved nothing movable."""
        try:
            self.engine.end_iteration()
        except CopyError as error:
            logger.warning("a copy of data that was no longer needed failed: %s", error)
            self.engine.reset_iteration()

    def _end_backward(self, task: int) -> None:
        self._noted_tasks.discard(task)
        if not self.engine.is_in_iteration or self.chunk is not None:
            return
        if not self.engine.has_saved or (self._has_left and self._newest_left() == -1):
            self._forget_chunks()
            self.engine.end_iteration()


def is_in_backward() -> bool:
    """Return whether autograd runs this code, for instance a recomputation: tensors saved here are used at once."""
    return _current_graph_task() != -1
