# SPDX-License-Identifier: Apache-2.0
"""Runs tests again and again in forked processes, so that torch and pytest are imported once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tqdm import tqdm

START_S = 60  # for imports, whatever the tests take
SLOWER = 10  # how many times longer than recorded the tests may take
TEST_S = 40  # for one test
_IMPORTED_ONCE = [
    *("numpy", "pytest", "torch._dynamo", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"),
    *("torch.distributed.fsdp", "torch.distributed.pipelining", "torch.profiler", "torch.testing"),
    "torch.utils.checkpoint",
]


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


class ForkedTests:
    """Runs pytest once for each of some items, each in a folder and a process of its own.

    `prepare` fills the folder for an item and returns the tests to run there. A process that imported another `package`
    than that of its folder ends with an error.
    """

    def __init__(self, prepare: Callable[[Any, Path], Selection], package: str) -> None:
        self._prepare = prepare
        self._package = package
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_IMPORTED_ONCE)
        self._running: set[int] = set()  # groups of processes

    def run(self, items: Sequence[Any], jobs: int, limit_s: float = float("inf")) -> Iterator[tuple[int, Outcome]]:
        """Yield the position of each item and its outcome, as they end; none starts later than `limit_s`.

        After a Ctrl-C only those come that have ended by then.
        """
        end = time.monotonic() + limit_s
        threads = ThreadPoolExecutor(jobs)
        futures = {threads.submit(self._run_one, item, end): position for position, item in enumerate(items)}
        with tqdm(total=len(items), desc="mutations", unit="mutation", disable=len(items) == 1) as bar:
            try:
                for future in as_completed(futures):
                    bar.update()
                    if (outcome := future.result()) is not None:
                        yield futures[future], outcome
            except KeyboardInterrupt:
                bar.write("stopped: what has not ended counts for nothing")
            finally:
                threads.shutdown(wait=False, cancel_futures=True)
                for group in list(self._running):
                    _kill(group)

    def _run_one(self, item: Any, end: float) -> Outcome | None:
        begin = time.monotonic()
        if begin > end:
            return None
        with tempfile.TemporaryDirectory(prefix="mutation-", ignore_cleanup_errors=True) as folder:
            copy = Path(folder) / "copy"
            selection = self._prepare(item, copy)
            limit_s = START_S + SLOWER * selection.seconds
            process = self._context.Process(target=_run_pytest, args=(copy, self._package, selection))
            process.start()
            assert process.pid is not None
            self._running.add(process.pid)
            has_ended = bool(wait([process.sentinel], limit_s))
            _kill(process.pid)  # and what the tests started
            self._running.discard(process.pid)
            seconds = time.monotonic() - begin
            if not has_ended:
                return Outcome("caught", f"no end within {limit_s:.0f} s", seconds)
            output = copy.with_name("output")
            return _outcome(output.read_text(errors="replace") if output.exists() else "", seconds)


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


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


def _run_pytest(copy: Path, package: str, selection: Selection) -> None:
    """Run the tests in this process, and end it; the last line of what it writes is the status of pytest."""
    os.setpgid(0, 0)  # so that what the tests start ends with them
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
    output = os.open(copy.parent / "output", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
    os.chdir(copy)
    os.environ["PYTHONPATH"] = str(copy)  # before an editable install of the checkout
    os.environ.pop("PYTEST_ADDOPTS", None)
    sys.path.insert(0, str(copy))
    for name in [name for name in sys.modules if name.split(".")[0] in (package, "tests", "conftest")]:
        del sys.modules[name]  # of the checkout, where this is itself run by a test
    status = 3
    try:
        import torch

        torch.set_num_threads(1)
        options = ["-q", "--rootdir=.", f"--timeout={TEST_S}", *(["-x"] if selection.ends_at_first else [])]
        options += ["-p", "no:cacheprovider", "-p", "no:randomly", "-p", "no:xdist"]
        for tests in filter(None, selection.stages):
            files = list(dict.fromkeys(test.split("::")[0] for test in tests))
            status = int(pytest.main([*options, *files], plugins=[_Only(tests, copy / package)]))
            if status:
                break
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(1, f"\nstatus {status}\n".encode())
        os._exit(0)


def _outcome(output: str, seconds: float) -> Outcome:
    ended = re.search(r"^status (\d+)$\s*\Z", output, re.MULTILINE)
    status = int(ended[1]) if ended else None
    failed = tuple(re.findall(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", output, re.MULTILINE))
    if status == 0:
        return Outcome("survived", "", seconds)
    if status == 1 and failed:
        return Outcome("caught", failed[0], seconds, failed)
    if status == 2 and "SyntaxError" not in output:  # pytest was interrupted, or a file could not be collected
        ended_by = "an interrupt ends the tests" if "KeyboardInterrupt" in output else "it cannot be imported"
        return Outcome("caught", ended_by, seconds)
    if status is None and output:
        return Outcome("caught", "the process was ended by a signal", seconds)
    return Outcome("error", output[-500:], seconds)
