# SPDX-License-Identifier: Apache-2.0
"""Lets torch's CUDA graphs tell of their captures and replays."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch


class Listener(Protocol):
    """Told of the captures and replays of several graphs."""

    def prepare(self) -> int:
        """Return the number of the capture that begins."""

    def begin(self) -> None:
        """Called inside a capture, first."""

    def end(self) -> None:
        """Called inside a capture, last."""

    def finish(self) -> None:
        """Called behind a capture."""

    def before(self, number: int) -> None:
        """Called before a replay of the graph of this capture."""

    def after(self, number: int) -> None:
        """Called behind it."""

    def drop(self, number: int) -> None:
        """Called when the graph of this capture has been reset, or is freed."""


@contextmanager
def told_of_graphs(listener: Listener, owner: Any = torch.cuda) -> Iterator[None]:
    """Return a context manager in which every new `torch.cuda.CUDAGraph` tells `listener`.

    `make_graphed_callables`, of torch and of TransformerEngine, makes its graphs by itself, and replays them where
    nothing else is called.

    Args:
        listener: also of the replays after this context.
        owner: has the class `CUDAGraph`.
    """
    base: Any = owner.CUDAGraph

    class ToldGraph(base):  # type: ignore[misc]
        number = -1  # until it is captured

        def capture_begin(self, *args: Any, **kwargs: Any) -> None:
            self.number = listener.prepare()
            weakref.finalize(self, listener.drop, self.number)
            super().capture_begin(*args, **kwargs)
            listener.begin()

        def capture_end(self) -> None:
            listener.end()
            super().capture_end()
            listener.finish()

        def replay(self) -> None:
            listener.before(self.number)
            super().replay()
            listener.after(self.number)

        def reset(self) -> None:
            super().reset()
            listener.drop(self.number)

    owner.CUDAGraph = ToldGraph
    try:
        yield
    finally:
        owner.CUDAGraph = base
