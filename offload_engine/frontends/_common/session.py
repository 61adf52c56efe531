"""`Session`: turns "a forward runs, later its backward runs" into iterations and chunks of an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Final

import torch

from offload_engine._compat import torch_private
from offload_engine.chunk import ChunkOffloadHandler
from offload_engine.engine import OffloadEngine
from offload_engine.errors import CopyError
from offload_engine.frontends._common.weights import may_move
from offload_engine.schedule import ChunkKey
from offload_engine.stats import IterationStats

logger = logging.getLogger(__name__)

_current_graph_task: Final = torch_private.current_graph_task


class Session:
    """Owns the iterations of an engine, for a model whose training loop belongs to somebody else.

    An iteration begins with the first forward and ends with the backward after which no graph holds a saved tensor any
    more: that one may come after several forwards. What autograd holds stays valid in any case. So two forwards before
    a backward, a retained graph, evaluation in between, a graph that is dropped and an exception all end well.

    Args:
        engine: to be driven by this session only.
        weights: parameters and buffers, asked for when an iteration begins, because FSDP gives its
            parameters new storages; None: none. Leaves that receive a gradient,
            parameters, and their views and cast copies are known as weights without it.
        owns_iterations: false: whoever drives the session begins and ends them itself, on the engine; then forwards
            become chunks, and nothing else.

    Attributes:
        chunk: of the forward that is running; None between forwards.
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
        self._is_checked = False  # for doing anything at all
        self._noted_tasks: set[int] = set()  # running backwards with our callback at their end

    @property
    def stats(self) -> IterationStats:
        """Counters of the running iteration, or of the last one."""
        return self.engine.stats

    def start_forward(self, key: ChunkKey | None = None) -> ChunkOffloadHandler | None:
        """Start a chunk, and an iteration where none is open, for a forward that begins.

        Args:
            key: of the chunk; None: the next microbatch of stage 0.

        Returns:
            The chunk; None where nothing is to be done: under `no_grad`, while a backward runs (recomputation), and
            inside another forward of this session. Then `end_forward` must not be called either.
        """
        if self.chunk is not None or not torch.is_grad_enabled() or is_in_backward():
            return None
        return self.start_saving(key)

    def start_saving(self, key: ChunkKey | None = None) -> ChunkOffloadHandler:
        """Do as `start_forward`, from a hook that packs a saved tensor: autograd calls those without gradients."""
        if self._owns_iterations:
            self._begin_if_over()
        self.chunk = self.engine.start_chunk(key, tensor_need_offloading_checker=may_move)
        return self.chunk

    def end_forward(self) -> None:
        """The forward is over. A group that is still open may be closed later. Idempotent."""
        self.chunk = None

    def abandon_forward(self) -> None:
        """The forward raised: forget its open groups. What autograd holds, of other forwards too, stays valid."""
        chunk, self.chunk = self.chunk, None
        while chunk is not None and chunk.innermost_group is not None:
            chunk.abandon_group()

    @contextmanager
    def forward(self, key: ChunkKey | None = None) -> Iterator[ChunkOffloadHandler | None]:
        """`start_forward` and `end_forward`, with `abandon_forward` where the body raises."""
        chunk = self.start_forward(key)
        try:
            yield chunk
        except BaseException:
            if chunk is not None:
                self.abandon_forward()
            raise
        if chunk is not None:
            self.end_forward()

    def note_backward(self) -> None:
        """A saved tensor is needed: have autograd tell us when the backward that runs now is over. Idempotent.

        A backward inside another one (reentrant checkpointing) ends earlier than the whole; each has its own callback,
        and the one that finds nothing saved any more ends the iteration.
        """
        task = _current_graph_task()
        if not self._owns_iterations or task == -1 or task in self._noted_tasks:
            return
        self._noted_tasks.add(task)
        torch_private.queue_callback(partial(self._end_backward, task))

    def warn_if_idle(self) -> None:
        """After a forward, once: offload that does nothing is a mistake that nothing else would show."""
        if self._is_checked or not (torch.is_grad_enabled() or is_in_backward()):
            return
        self._is_checked = True
        if self.stats.managed_bytes == 0:
            logger.warning(
                "nothing was offloaded: no saved tensor on %s that is no weight has %d bytes. Is the model on that "
                "device? Are its activations so small? OffloadConfig(min_tensor_bytes=...) sets the bound.",
                self.engine.device.torch_device,
                self.engine.config.min_tensor_bytes,
            )

    def close(self) -> None:
        """Give everything up, and close the engine. Idempotent."""
        self.abandon_forward()
        self.engine.close()

    def _begin_if_over(self) -> None:
        engine = self.engine
        if engine.is_in_iteration:
            if engine.has_failed:
                logger.warning("a copy failed in the last iteration: graphs that are left of it cannot run backward")
                engine.reset_iteration()
            elif engine.has_saved:
                return
            else:
                self._end_unused()
        self._noted_tasks.clear()  # of backwards that raised: their callbacks do not run
        engine.begin_iteration(weights=self._weights() if self._weights is not None else ())

    def _end_unused(self) -> None:
        """End an iteration whose graphs were dropped without a backward, or saved nothing that could move."""
        try:
            self.engine.end_iteration()
        except CopyError as error:
            logger.warning("a copy failed that nobody needed: %s", error)
            self.engine.reset_iteration()

    def _end_backward(self, task: int) -> None:
        self._noted_tasks.discard(task)
        if self.engine.is_in_iteration and self.chunk is None and not self.engine.has_saved:
            self.engine.end_iteration()


def is_in_backward() -> bool:
    """True in code that autograd runs, such as recomputation: what is saved there is used at once."""
    return _current_graph_task() != -1
