# SPDX-License-Identifier: Apache-2.0
"""Makes torch's CUDA graphs report their captures and replays."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from offload_engine.errors import OffloadError


class Listener(Protocol):
    """Receives the captures and replays of several graphs."""

    def prepare(self) -> int:
        """Begin a capture, before CUDA does; return its number."""

    def begin(self) -> None:
        """Start packing, inside the capture."""

    def end(self) -> None:
        """Stop packing, inside the capture."""

    def finish(self) -> None:
        """Note that CUDA has ended the capture."""

    def before(self, number: int) -> None:
        """Prepare a replay of the graph of this capture."""

    def after(self, number: int) -> None:
        """Note that the replay has been issued, on the stream that was current in `before`."""

    def note_freed(self, number: int) -> None:
        """Note that the graph of this capture has been reset or freed."""


@contextmanager
def told_of_graphs(listener: Listener, owner: Any = torch.cuda) -> Iterator[None]:
    """Return a context manager in which every new `torch.cuda.CUDAGraph` reports to `listener`.

    Needed because `make_graphed_callables`, of torch and of TransformerEngine, makes and replays its graphs internally.

    Args:
        listener: also receives the replays after this context.
        owner: the module with the class `CUDAGraph`.

    Raises:
        OffloadError: inside another such context.
    """
    base: Any = owner.CUDAGraph
    if hasattr(base, "is_told"):
        raise OffloadError("layers are captured for two engines at once: capture for one after the other")
    listens = True

    class ToldGraph(base):
        is_told = True
        number = -1  # of its capture; -1: not captured in this context

        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            number = listener.prepare() if listens else -1
            super().capture_begin(*args, **kwargs)
            self.number = number  # not before: a graph that cannot be captured again keeps its old capture
            if self.number >= 0:
                weakref.finalize(self, listener.note_freed, self.number)
                listener.begin()

        def capture_end(self) -> None:
            if self.number >= 0:
                listener.end()
            super().capture_end()
            if self.number >= 0:
                listener.finish()

        def replay(self) -> None:
            number = self.number
            if number < 0:
                super().replay()
                return
            listener.before(number)
            super().replay()
            listener.after(number)

        def reset(self) -> None:
            super().reset()
            if self.number >= 0:
                listener.note_freed(self.number)

    owner.CUDAGraph = ToldGraph
    try:
        yield
    finally:
        owner.CUDAGraph, listens = base, False
