# SPDX-License-Identifier: Apache-2.0
"""Brings an engine into a state that a test needs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from offload_engine import ChunkKey, ChunkOffloadHandler, GroupTraits, OffloadEngine, group_commit, group_start
from offload_engine._host.try_lock import run_if_free


def in_group(
    chunk: ChunkOffloadHandler,
    function: Callable[..., torch.Tensor],
    *inputs: torch.Tensor,
    name: str = "group",
    **traits: Any,
) -> torch.Tensor:
    """Return `function(*inputs)`; what it saves is a group."""
    first = group_start(inputs[0], chunk, name, GroupTraits(**traits))
    with chunk.saved_tensors_hooks():
        output = function(first, *inputs[1:])
    return group_commit(output, chunk)


def release_all(engine: OffloadEngine) -> None:
    """Release every copy-out, as a peak does."""
    executor = engine._executor
    with executor.store.retired, executor.store.retired.lock:
        while executor.leaving.queue:
            executor.store.moves.release(executor.leaving.pop())


def is_in_backward(window: Any, key: ChunkKey) -> bool:
    """Tell whether the backward of this chunk was reached last, and no forward has begun since."""
    return window.backward_chunk is not None and window.backward_chunk.key == key


def is_free(lock: Any) -> bool:
    """Return whether another thread gets it."""
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(run_if_free(lock, lambda: None)))
    thread.start()
    thread.join()
    return found[0]


class CountedLock:
    """Counts how often a lock is taken by `with`; otherwise it is that lock."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self.num_taken: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)

    def __enter__(self) -> None:
        self.num_taken += 1
        self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()
