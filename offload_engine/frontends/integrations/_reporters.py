# SPDX-License-Identifier: Apache-2.0
"""Puts a callback of transformers before those that report to W&B, TensorBoard and others."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler


def move_before_reporters(callback: TrainerCallback) -> None:
    """Move a callback to the front of the `Trainer` that calls it now, so that reporters see what it adds to a log.

    The `Trainer` puts callbacks that it was given behind its own reporters, and does not pass its list to them. Without
    an effect where the callback is called by something else.
    """
    handler = _handler_that_calls(sys._getframe(1))
    if handler is not None and callback in handler.callbacks:
        handler.callbacks.remove(callback)  # positions from its own on stay: the handler iterates over the list
        handler.callbacks.insert(0, callback)


def _handler_that_calls(frame: FrameType | None) -> Any:
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, CallbackHandler):
            return owner
        frame = frame.f_back
    return None
