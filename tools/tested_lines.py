# SPDX-License-Identifier: Apache-2.0
"""Which tests run each line of the engine, and how long each takes: found once, by running them with line events."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest

NOT_FOR_MUTANTS = (
    "bench_frontends compile cuda_calls ended_processes environment examples host_cost imports "
    "lightning_trainer random_interrupts readme soak tools torch_private "
    "transformers_trainer"
).split()
"""Files of tests/cpu whose tests start processes, wait for compilers, measure times, or test tools and documents."""
RECORD = "TESTED_LINES_RECORD"  # in the environment of recording processes: the arguments of `_Recorder`
# megatron-core takes seconds, and the copies for mutants have no benchmarks.
_IMPORTS_OTHERS = re.compile(r"^(from|import) (megatron|benchmarks)|importorskip\(.megatron", re.MULTILINE)
_TOOL_ID = 4  # one of those that sys.monitoring leaves free


class LinesOfTests(NamedTuple):
    """What recorded runs of the tests have shown, of those that passed.

    Attributes:
        seconds: duration of each test, by its node ID.
        tests: the tests that run a line, by (file below the repository, line).
    """

    seconds: dict[str, float]
    tests: Mapping[tuple[str, int], set[str]]

    def of(self, path: str, first: int, last: int) -> list[str]:
        """Return the tests that run one of some lines, fastest first."""
        found: set[str] = set().union(*(self.tests.get((path, line), ()) for line in range(first, last + 1)))
        return sorted(found, key=lambda test: (self.seconds[test], test))


def lines_of_tests(folder: Path, root: Path, package: str) -> LinesOfTests:
    """Return what the tests below `root` run; the record of it stays in `folder` until the engine or they change."""
    names = {f"test_{name}.py" for name in NOT_FOR_MUTANTS}
    found = (file for file in sorted((root / "tests/cpu").glob("test_*.py")) if file.name not in names)
    files = [file for file in found if not _IMPORTS_OTHERS.search(file.read_text())]
    sources = [file.read_bytes() for file in (*files, *sorted((root / package).rglob("*.py")))]
    record = folder / hashlib.sha256(b"".join(sources)).hexdigest()[:16]
    if not record.exists():
        shutil.rmtree(folder, ignore_errors=True)
        (unfinished := folder / "unfinished").mkdir(parents=True)
        _record(files, unfinished, root, package)
        unfinished.rename(record)
    seconds: dict[str, float] = {}
    tests: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for part in record.iterdir():
        for test, (duration, lines_of_files) in json.loads(part.read_text()).items():
            seconds[test] = duration
            for file, lines in lines_of_files.items():
                for line in lines:
                    tests[file, line].add(test)
    return LinesOfTests(seconds, tests)


def _record(files: Sequence[Path], folder: Path, root: Path, package: str) -> None:
    """Run the tests of some files, on all cores; each process writes what they run to a file in `folder`."""
    if not hasattr(sys, "monitoring"):
        raise SystemExit("recording which tests run which lines needs Python 3.12 (sys.monitoring)")
    paths = f"{root}{os.pathsep}{Path(__file__).parent}"
    environment = {**os.environ, RECORD: json.dumps([str(root), package, str(folder)]), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tested_lines", "-p", "no:cacheprovider"]
    command += ["-n", str(os.cpu_count() or 1), "--dist", "worksteal", *map(str, files)]
    ended = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
    if ended.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"the tests could not be recorded:\n{ended.stdout[-3000:]}")


class _Recorder:
    """A plugin of pytest: which lines of a package each test runs. A test that fails counts for nothing."""

    def __init__(self, root: str, package: str, folder: str) -> None:
        self._root = root + os.sep
        self._package = os.path.join(root, package) + os.sep
        self._record = Path(folder) / f"{os.getpid()}.json"
        self._tests: dict[str, tuple[float, dict[str, list[int]]]] = {}
        self._found: defaultdict[str, list[int]] = defaultdict(list)
        self._has_failed = False
        self._monitoring: Any = vars(sys)["monitoring"]  # since Python 3.12
        events = self._monitoring.events
        self._monitoring.use_tool_id(_TOOL_ID, "tested lines")
        self._monitoring.register_callback(_TOOL_ID, events.PY_START, self._enter)
        self._monitoring.register_callback(_TOOL_ID, events.LINE, self._note)
        self._monitoring.set_events(_TOOL_ID, events.PY_START)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._found.clear()
        self._has_failed = False
        self._monitoring.restart_events()
        begin = time.perf_counter()
        yield
        if not self._has_failed:
            self._tests[item.nodeid] = round(time.perf_counter() - begin, 4), dict(self._found)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_failed |= not report.passed

    def pytest_sessionfinish(self) -> None:
        self._monitoring.set_events(_TOOL_ID, 0)
        self._record.write_text(json.dumps(self._tests))

    def _enter(self, code: CodeType, offset: int) -> Any:
        if code.co_filename.startswith(self._package):
            self._monitoring.set_local_events(_TOOL_ID, code, self._monitoring.events.LINE)
        return self._monitoring.DISABLE

    def _note(self, code: CodeType, line: int) -> Any:
        self._found[code.co_filename.removeprefix(self._root)].append(line)
        return self._monitoring.DISABLE


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder: this module is a plugin of the processes that `lines_of_tests` starts."""
    if RECORD in os.environ:
        config.pluginmanager.register(_Recorder(*json.loads(os.environ[RECORD])))
