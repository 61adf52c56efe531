# SPDX-License-Identifier: Apache-2.0
"""`run_if_free`: work under a lock that must not be waited for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def run_if_free(lock: Any, work: Callable[[], None]) -> bool:
    """Run `work` under `lock` unless it is held, by this thread or another; return whether it ran.

    An interrupt at any point leaves the lock as it was. Python delivers one after each call, so also after the one
    that has taken the lock and in front of the line that would remember it. So the lock itself has to know its owner.

    Args:
        lock: made by `threading.RLock`. (Untyped, because its `_is_owned` has no type.)
        work: what it raises is raised.
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
