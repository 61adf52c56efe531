# SPDX-License-Identifier: Apache-2.0
"""Records when each chunk of a step ran forward and backward, for a plot of resident bytes over the step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

import torch


class Spans:
    """Forward and backward spans of one step on this rank; records only while `is_recording` is set.

    Attributes:
        recorded: ("F" or "B", begin, end) of each chunk, in seconds of `time.perf_counter()`.
    """

    def __init__(self) -> None:
        self.is_recording: bool = False
        self.recorded: list[tuple[str, float, float]] = []

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Return a context manager that records one chunk's forward."""
        begin = time.perf_counter()
        yield
        if self.is_recording:
            self.recorded.append(("F", begin, time.perf_counter()))

    def watch_backward(self, output: torch.Tensor) -> None:
        """Record the backward that will begin at the output of a chunk."""
        if self.is_recording and output.requires_grad:
            output.register_hook(self._backward_begins)

    def _backward_begins(self, grad: torch.Tensor) -> None:
        begin = time.perf_counter()
        torch.autograd.Variable._execution_engine.queue_callback(
            lambda: self.recorded.append(("B", begin, time.perf_counter()))
        )
