# SPDX-License-Identifier: Apache-2.0
"""Work in a process of its own, which leaves nothing behind: bounded in time and in host memory."""

from __future__ import annotations

import importlib
import multiprocessing
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import psutil

_POLL_S = 0.25
_IMPORTED_ONCE = ["offload_engine", "transformers.models.qwen2.modeling_qwen2"]  # none of them touches a GPU on import


class Ended(NamedTuple):
    """How the work of a process ended."""

    value: Any
    failure: str | None
    seconds: float
    is_over_time: bool = False
    """That says nothing of how far it would have come."""


def run_apart(work: Callable[..., Any], *arguments: Any, seconds: float, host_bytes: int) -> Ended:
    """Call a function in a new process, as `Apart` does, and wait for its end."""
    with Apart(work, *arguments) as process:
        process.await_start()
        return process.run(seconds=seconds, host_bytes=host_bytes)


class Apart:
    """A process that calls one function and returns its value; an error, or a bound that it exceeds, is a failure.

    It starts, and imports, at once. A context manager that ends it. `work`, the classes of its arguments and of what it
    returns are found by their names in their modules; `imports` are modules that it imports before it waits to be run.
    """

    def __init__(self, work: Callable[..., Any], *arguments: Any, imports: Sequence[str] = ()) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED_ONCE)
        self._connection, other_end = context.Pipe()
        self._process = context.Process(target=_work, args=(other_end, work, arguments, imports), daemon=True)
        self._process.start()
        other_end.close()

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """End the process. Idempotent."""
        self._process.kill()
        self._process.join()
        self._connection.close()

    def await_start(self) -> None:
        """Wait until it has imported what it was told to: once, before it is run."""
        self._connection.recv()

    def run(self, *, seconds: float, host_bytes: int) -> Ended:
        """Have it call the function, once, and wait for the end.

        Args:
            seconds: how long it may take, its start not included.
            host_bytes: how much of the host's memory the process may have resident.
        """
        running, begin = psutil.Process(self._process.pid), time.monotonic()
        self._connection.send(None)
        while not self._connection.poll(_POLL_S):
            passed = time.monotonic() - begin
            if passed > seconds:
                return Ended(None, f"stopped: its {seconds:.0f} s were over", passed, is_over_time=True)
            held = running.memory_info().rss if running.is_running() else 0
            if held > host_bytes:
                limit = f"{host_bytes / 2**30:.0f} are allowed"
                return Ended(None, f"stopped: it held {held / 2**30:.0f} GiB of host memory, {limit}", passed)
        try:
            value, failure = pickle.loads(self._connection.recv_bytes())
        except EOFError:
            value, failure = None, "its process was ended by the system"
        return Ended(value, failure, time.monotonic() - begin)


def _work(connection: Connection, work: Callable[..., Any], arguments: tuple[Any, ...], imports: Sequence[str]) -> None:
    for name in imports:
        with suppress(ImportError):  # the work says what it lacks
            importlib.import_module(name)
    connection.send(None)
    connection.recv()
    try:
        found: tuple[Any, str | None] = work(*arguments), None
    except Exception as error:
        found = None, describe(error)
    connection.send_bytes(pickle.dumps(found))  # by value: torch would hand over memory of a process that is gone


def describe(error: BaseException) -> str:
    """Return one line for a table; running out of memory may be the cause of another error."""
    chain: BaseException | None = error
    while chain is not None:
        if "out of memory" in str(chain).lower():
            return "out of memory"
        chain = chain.__cause__ or chain.__context__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
