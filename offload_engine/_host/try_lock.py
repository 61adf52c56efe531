# SPDX-License-Identifier: Apache-2.0
"""`run_if_free`: runs work under a lock without ever waiting for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def run_if_free(lock: Any, work: Callable[[], None]) -> bool:
    """Run `work` under `lock` unless it is held, by this thread or another; return whether it ran.

    An interrupt at any point leaves the lock as it was. Python may deliver one between the call that acquires the lock
    and the line that would record this, so the lock itself has to know its owner.

    Args:
        lock: made by `threading.RLock`. (Untyped, because its `_is_owned` has no type.)
        work: its exceptions are raised.
    """
    if lock._is_owned():
        return False
    try:
        if not lock.acquire(False):
            return False
        work()
        return True
    finally:
        try:
            lock.release()
        except RuntimeError:  # another thread has it
            pass
