# SPDX-License-Identifier: Apache-2.0
"""Which tests run each line of the engine, and how long each takes: found once, by running them with line events."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest

NOT_FOR_MUTANTS = (
    "bench_frontends compile cuda_calls ended_processes environment examples host_cost imports "
    "lightning_trainer random_interrupts readme tools torch_private "
    "transformers_trainer"
).split()
"""Files of tests/cpu whose tests start processes, wait for compilers, measure times, or test tools and documents."""
OUTPUTS = (
    "TESTED_LINES_OUTPUTS"  # in the environment of the recording process: the package, and a file for each of tests
)
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
    """Record in `folder` the test files below `root` that are new or have changed, all if the engine has; read all."""
    sources = b"".join(path.read_bytes() for path in sorted((root / package).rglob("*.py")))
    hashes = {file: hashlib.sha256(sources + file.read_bytes()).hexdigest()[:16] for file in _test_files(root)}
    outputs = {str(file.relative_to(root)): folder / f"{file.stem}-{value}.json" for file, value in hashes.items()}
    folder.mkdir(parents=True, exist_ok=True)
    for old in set(folder.iterdir()) - set(outputs.values()):
        old.unlink()
    _record_all({name: str(output) for name, output in outputs.items() if not output.exists()}, root, package)
    seconds: dict[str, float] = {}
    tests: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for output in outputs.values():
        for test, (duration, files) in json.loads(output.read_text()).items():
            seconds[test] = duration
            for file, lines in files.items():
                for line in lines:
                    tests[file, line].add(test)
    return LinesOfTests(seconds, tests)


def _test_files(root: Path) -> Iterator[Path]:
    left_out = {f"test_{name}.py" for name in NOT_FOR_MUTANTS}
    for file in sorted((root / "tests/cpu").glob("test_*.py")):
        if file.name not in left_out and not _IMPORTS_OTHERS.search(file.read_text()):
            yield file


def _record_all(outputs: Mapping[str, str], root: Path, package: str) -> None:
    """Record files in as many processes as there are cores; the largest files come first."""
    if outputs and not hasattr(sys, "monitoring"):
        raise SystemExit("recording which tests run which lines needs Python 3.12 (sys.monitoring)")
    largest = sorted(outputs, key=lambda name: -(root / name).stat().st_size)
    num_parts = os.cpu_count() or 1
    parts = [{name: outputs[name] for name in largest[number::num_parts]} for number in range(num_parts)]
    with ThreadPoolExecutor(num_parts) as threads:
        list(threads.map(lambda part: _record(part, root, package), filter(None, parts)))


def _record(outputs: Mapping[str, str], root: Path, package: str) -> None:
    """Run the tests of some files in a process of its own, which writes what they run."""
    paths = f"{root}{os.pathsep}{Path(__file__).parent}"
    environment = {**os.environ, OUTPUTS: json.dumps([package, outputs]), "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tested_lines", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ended = subprocess.run([*command, *outputs], cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
    if ended.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"the tests could not be recorded:\n{ended.stdout[-3000:]}")


class _Recorder:
    """A plugin of pytest: which lines of a package each test runs. A test that fails counts for nothing."""

    def __init__(self, root: Path, package: str, outputs: Mapping[str, str]) -> None:
        self._root = str(root) + os.sep
        self._package = str(root / package) + os.sep
        self._records: dict[str, dict[str, Any]] = {name: {} for name in outputs}
        self._outputs = outputs
        self._found: defaultdict[str, list[int]] = defaultdict(list)
        self._has_failed = False
        self._monitoring: Any = vars(sys)["monitoring"]  # since Python 3.12

    def pytest_sessionstart(self) -> None:
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
            of_file = self._records[item.nodeid.split("::")[0]]
            of_file[item.nodeid] = [round(time.perf_counter() - begin, 4), dict(self._found)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_failed |= not report.passed

    def pytest_sessionfinish(self) -> None:
        self._monitoring.set_events(_TOOL_ID, 0)
        for name, output in self._outputs.items():
            Path(output).write_text(json.dumps(self._records[name]))

    def _enter(self, code: CodeType, offset: int) -> Any:
        if code.co_filename.startswith(self._package):
            self._monitoring.set_local_events(_TOOL_ID, code, self._monitoring.events.LINE)
        return self._monitoring.DISABLE

    def _note(self, code: CodeType, line: int) -> Any:
        self._found[code.co_filename.removeprefix(self._root)].append(line)
        return self._monitoring.DISABLE


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder: this module is a plugin of the process that `lines_of_tests` starts."""
    if OUTPUTS in os.environ:
        config.pluginmanager.register(_Recorder(Path.cwd(), *json.loads(os.environ[OUTPUTS])))
