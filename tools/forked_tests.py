"""Runs tests again and again in forked processes, so that torch and pytest are imported once."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

TIMEOUT_S = 300
_POLL_S = 0.05


class Outcome(NamedTuple):
    """How the tests took one change."""

    verdict: str  # "caught", "survived" or "error"
    detail: str  # the first failing test, or the end of the output
    seconds: float


class _Running(NamedTuple):
    index: int
    folder: tempfile.TemporaryDirectory[str]
    started: float


class ForkedTests:
    """Runs pytest once for each of some items, each in a folder and a process of its own.

    Args:
        prepare: fills the folder for an item, and returns the tests to run there.
        environment: returns variables to set for an item.
    """

    def __init__(self, prepare: Callable[[Any, Path], list[str]], environment: Callable[[Any], dict[str, str]]) -> None:
        self._prepare = prepare
        self._environment = environment

    def run(self, items: Sequence[Any], jobs: int) -> dict[int, Outcome]:
        """Return the outcome of each item, by its position; after a Ctrl-C only those that are known by then."""
        import pytest  # noqa: F401  (for all children)
        import torch

        torch.set_num_threads(1)
        tqdm.monitor_interval = 0  # a fork next to its thread could inherit a lock that is taken
        waiting, running, outcomes = list(range(len(items)))[::-1], dict[int, _Running](), dict[int, Outcome]()
        with tqdm(total=len(items), desc="mutations", unit="mutation", disable=len(items) == 1) as bar:
            try:
                while waiting or running:
                    while waiting and len(running) < jobs:
                        index = waiting.pop()
                        process, folder = self._start(items[index])
                        running[process] = _Running(index, folder, time.monotonic())
                    for process in list(running):
                        outcome = _outcome(process, running[process])
                        if outcome is not None:
                            outcomes[running.pop(process).index] = outcome
                            bar.update()
                    time.sleep(_POLL_S)
            except KeyboardInterrupt:
                for process in running:
                    os.killpg(process, signal.SIGKILL)
        return dict(sorted(outcomes.items()))

    def _start(self, item: Any) -> tuple[int, tempfile.TemporaryDirectory[str]]:
        folder = tempfile.TemporaryDirectory(prefix="mutation-")
        copy = Path(folder.name) / "copy"
        tests = self._prepare(item, copy)
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            _run_pytest(copy, tests, self._environment(item))
        return process, folder


def _run_pytest(copy: Path, tests: list[str], environment: dict[str, str]) -> None:
    """Run the tests in this process, and end it."""
    status = 3
    try:
        os.setpgid(0, 0)  # so that what the tests start ends with them
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
        output = os.open(copy.parent / "output", os.O_CREAT | os.O_WRONLY)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        os.chdir(copy)
        os.environ.update({**environment, "PYTHONPATH": str(copy)})  # before an editable install of the checkout
        os.environ.pop("PYTEST_ADDOPTS", None)
        sys.path.insert(0, str(copy))
        for name in [name for name in sys.modules if name.split(".")[0] in ("offload_engine", "tests", "conftest")]:
            del sys.modules[name]  # of the checkout, where this is itself run by a test
        import pytest

        plugins = ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist"]
        status = int(pytest.main(["-x", "-q", *plugins, *tests]))
        sys.stdout.flush()
    finally:
        os._exit(status)


def _outcome(process: int, running: _Running) -> Outcome | None:
    """Return how the tests of a process ended; None: they run."""
    seconds = time.monotonic() - running.started
    ended, status = os.waitpid(process, os.WNOHANG)
    if not ended and seconds < TIMEOUT_S:
        return None
    if not ended:
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
    output = (Path(running.folder.name) / "output").read_text(errors="replace")
    running.folder.cleanup()
    if not ended:
        return Outcome("caught", f"no end within {TIMEOUT_S} s", seconds)
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return Outcome("survived", "", seconds)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::\S+)", output, re.MULTILINE)
    if code == 1 and failed is not None:
        return Outcome("caught", failed.group(1).removeprefix("tests/cpu/"), seconds)
    if code == 2 and re.search(r"KeyboardInterrupt", output):
        return Outcome("caught", "an interrupt ends the tests", seconds)
    return Outcome("error", output[-500:], seconds)
