# SPDX-License-Identifier: Apache-2.0
"""Moves a callback of transformers before those that report to W&B, TensorBoard and others."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler


def move_before_reporters(callback: TrainerCallback) -> None:
    """Move a callback to the front of the list of the `Trainer` that calls it, so that reporters see what it logs.

    The `Trainer` appends the user's callbacks after its own reporters, and does not pass its list to them. No-op if
    the callback is called by another object.
    """
    handler = _handler_that_calls(sys._getframe(1))
    if handler is not None and callback in handler.callbacks:
        handler.callbacks.remove(callback)  # later positions do not change: the handler is iterating over the list
        handler.callbacks.insert(0, callback)


def _handler_that_calls(frame: FrameType | None) -> Any:
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, CallbackHandler):
            return owner
        frame = frame.f_back
    return None
