# SPDX-License-Identifier: Apache-2.0
"""Runs tests again and again in forked processes, so that torch and pytest are imported once."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tqdm import tqdm

START_S = 60  # for imports, whatever the tests take
SLOWER = 10  # how many times longer than recorded the tests may take
TEST_S = 40  # for one test
_POLL_S = 0.02
_IMPORTED_ONCE = (
    *("numpy", "torch._dynamo", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"),
    *("torch.distributed.fsdp", "torch.distributed.pipelining", "torch.profiler", "torch.testing"),
    "torch.utils.checkpoint",
)


class Outcome(NamedTuple):
    """How the tests took one change."""

    verdict: str  # "caught", "survived" or "error"
    detail: str  # the first failing test, or the end of the output
    seconds: float
    failed: tuple[str, ...] = ()  # all failing tests that ran


class Selection(NamedTuple):
    """Tests of one run, by node ID.

    Attributes:
        stages: each runs if all tests of those before it passed.
        seconds: what they take together.
        ends_at_first: no test runs after one that fails.
    """

    stages: tuple[Sequence[str], ...]
    seconds: float
    ends_at_first: bool = True


class _Running(NamedTuple):
    number: int
    folder: tempfile.TemporaryDirectory[str]
    started: float
    limit_s: float


class ForkedTests:
    """Runs pytest once for each of some items, each in a folder and a process of its own.

    `prepare` fills the folder for an item and returns the tests to run there. A process that imported another `package`
    than that of its folder ends with an error.
    """

    def __init__(self, prepare: Callable[[Any, Path], Selection], package: str) -> None:
        self._prepare = prepare
        self._package = package

    def run(self, items: Sequence[Any], jobs: int, limit_s: float = float("inf")) -> Iterator[tuple[int, Outcome]]:
        """Yield the position of each item and its outcome, as they end; none starts later than `limit_s`.

        After a Ctrl-C only those come that have ended by then.
        """
        _import_once()
        waiting, running, begin = list(range(len(items)))[::-1], dict[int, _Running](), time.monotonic()
        with tqdm(total=len(items), desc="mutations", unit="mutation", disable=len(items) == 1) as bar:
            try:
                while running or (waiting and time.monotonic() - begin < limit_s):
                    while waiting and len(running) < jobs and time.monotonic() - begin < limit_s:
                        process, started = self._start(waiting.pop(), items)
                        running[process] = started
                    for process in list(running):
                        if (outcome := _outcome(process, running[process])) is not None:
                            bar.update()
                            yield running.pop(process).number, outcome
                    time.sleep(_POLL_S)
            except KeyboardInterrupt:
                bar.write("stopped: what has not ended counts for nothing")
            finally:
                for process in running:
                    os.killpg(process, signal.SIGKILL)

    def _start(self, index: int, items: Sequence[Any]) -> tuple[int, _Running]:
        folder = tempfile.TemporaryDirectory(prefix="mutation-")
        copy = Path(folder.name) / "copy"
        selection = self._prepare(items[index], copy)
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            _run_pytest(copy, self._package, selection)
        with contextlib.suppress(PermissionError):
            os.setpgid(process, process)  # so that it can be ended before it has come to that itself
        return process, _Running(index, folder, time.monotonic(), START_S + SLOWER * selection.seconds)


class _Only:
    """A plugin of pytest: these tests only, in this order, and of the package in this folder."""

    def __init__(self, tests: Sequence[str], package: Path) -> None:
        self._order = {test: position for position, test in enumerate(tests)}
        self._package = package

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid in self._order]
        items.sort(key=lambda item: self._order[item.nodeid])

    def pytest_sessionfinish(self) -> None:
        module = sys.modules.get(self._package.name)
        if module is None or Path(str(module.__file__)).parent != self._package:
            print(f"\nanother {self._package.name} was tested: {module}", flush=True)
            pytest.exit("", returncode=pytest.ExitCode.INTERNAL_ERROR)


def _import_once() -> None:
    """Import, for all children, what most tests need."""
    import torch

    for name in _IMPORTED_ONCE:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # a fork next to its thread could inherit a lock that is taken


def _run_pytest(copy: Path, package: str, selection: Selection) -> None:
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
        os.environ["PYTHONPATH"] = str(copy)  # before an editable install of the checkout
        os.environ.pop("PYTEST_ADDOPTS", None)
        sys.path.insert(0, str(copy))
        for name in [name for name in sys.modules if name.split(".")[0] in (package, "tests", "conftest")]:
            del sys.modules[name]  # of the checkout, where this is itself run by a test
        for tests in filter(None, selection.stages):
            status = _pytest(tests, copy / package, ["-x"] if selection.ends_at_first else [])
            if status:
                break
        sys.stdout.flush()
    finally:
        os._exit(status)


def _pytest(tests: Iterable[str], package: Path, options: list[str]) -> int:
    files = list(dict.fromkeys(test.split("::")[0] for test in tests))
    options = [*options, f"--timeout={TEST_S}"]
    plugins = ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist"]
    return int(pytest.main(["-q", "--rootdir=.", *options, *plugins, *files], plugins=[_Only(list(tests), package)]))


def _outcome(process: int, running: _Running) -> Outcome | None:
    """Return how the tests of a process ended; None: they run."""
    seconds = time.monotonic() - running.started
    ended, status = os.waitpid(process, os.WNOHANG)
    if not ended and seconds < running.limit_s:
        return None
    if not ended:
        os.killpg(process, signal.SIGKILL)
        os.waitpid(process, 0)
    output = (Path(running.folder.name) / "output").read_text(errors="replace")
    running.folder.cleanup()
    if not ended:
        return Outcome("caught", f"no end within {running.limit_s:.0f} s", seconds)
    code = os.waitstatus_to_exitcode(status)
    failed = tuple(re.findall(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", output, re.MULTILINE))
    if code == 0:
        return Outcome("survived", "", seconds)
    if code == 1 and failed:
        return Outcome("caught", failed[0], seconds, failed)
    if code == 2 and "SyntaxError" not in output:  # pytest was interrupted, or a file could not be collected
        ended_by = "an interrupt ends the tests" if "KeyboardInterrupt" in output else "it cannot be imported"
        return Outcome("caught", ended_by, seconds)
    if code < 0:
        return Outcome("caught", f"the process ended by signal {-code}", seconds)
    return Outcome("error", output[-500:], seconds)
