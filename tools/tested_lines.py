# SPDX-License-Identifier: Apache-2.0
"""Which tests run each line of the engine, and how long each takes: found once, by running them with line events."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import pytest

NOT_FOR_MUTANTS = (
    "budget_curve compile cuda_calls ended_processes environment examples frontend_examples host_cost imports "
    "lightning_trainer random_interrupts readme tools torch_private "
    "transformers_trainer"
).split()
"""Files of tests/cpu whose tests start processes, wait for compilers, measure times, or test tools and documents."""
OUTPUT = "TESTED_LINES_OUTPUT"  # in the environment of the recording process: the package, and the file that it writes
# megatron-core takes seconds, and the copies for mutants have no benchmarks.
_IMPORTS_OTHERS = re.compile(r"^(from|import) (megatron|benchmarks)|importorskip\(.megatron", re.MULTILINE)
_TOOL_ID = 4  # one of those that sys.monitoring leaves free


class LinesOfTests(NamedTuple):
    """What recorded runs of the tests have shown.

    Attributes:
        seconds: duration of each test that passed, by its node ID.
        tests: the tests that run a line, by (file below the repository, line).
        files: a hash of each test file that was recorded.
        sources: a hash of the engine's source, to whose lines this belongs.
    """

    seconds: dict[str, float]
    tests: dict[tuple[str, int], set[str]]
    files: dict[str, str]
    sources: str

    def of(self, path: str, first: int, last: int) -> list[str]:
        """Return the tests that run one of some lines, fastest first."""
        found: set[str] = set().union(*(self.tests.get((path, line), ()) for line in range(first, last + 1)))
        return sorted(found, key=lambda test: (self.seconds[test], test))

    def save(self, path: Path) -> None:
        names = list(self.seconds)
        numbers = {name: number for number, name in enumerate(names)}
        lines = [[*line, sorted(numbers[test] for test in tests)] for line, tests in self.tests.items()]
        content = [[[name, self.seconds[name]] for name in names], lines, self.files, self.sources]
        path.write_bytes(gzip.compress(json.dumps(content).encode()))


def load(path: Path) -> LinesOfTests:
    """Return what `save` wrote to `path`; nothing recorded if there is no such file."""
    if not path.exists():
        return LinesOfTests({}, {}, {}, "")
    seconds, lines, files, sources = json.loads(gzip.decompress(path.read_bytes()))
    names = [name for name, _ in seconds]
    tests = {(file, line): {names[number] for number in numbers} for file, line, numbers in lines}
    return LinesOfTests(dict(seconds), tests, files, sources)


def bring_up_to_date(path: Path, root: Path, package: str) -> LinesOfTests:
    """Record the test files below `root` that are new or have changed, all if the engine has; save to `path`."""
    known, sources = load(path), _hash(*sorted((root / package).rglob("*.py")))
    if known.sources != sources:
        known = LinesOfTests({}, {}, {}, sources)
    hashes = {str(file.relative_to(root)): _hash(file) for file in _test_files(root)}
    changed = [name for name, value in hashes.items() if known.files.get(name) != value]
    if not changed:
        return known
    kept = {test for test in known.seconds if test.split("::")[0] in hashes and test.split("::")[0] not in changed}
    new = _merged(_record_all(changed, root, package))
    seconds = {test: known.seconds[test] for test in kept} | new.seconds
    lines = set(known.tests) | set(new.tests)
    tests = {line: (known.tests.get(line, set()) & kept) | new.tests.get(line, set()) for line in lines}
    found = LinesOfTests(seconds, tests, hashes, sources)
    path.parent.mkdir(parents=True, exist_ok=True)
    found.save(path)
    return found


def _test_files(root: Path) -> Iterator[Path]:
    left_out = {f"test_{name}.py" for name in NOT_FOR_MUTANTS}
    for file in sorted((root / "tests/cpu").glob("test_*.py")):
        if file.name not in left_out and not _IMPORTS_OTHERS.search(file.read_text()):
            yield file


def _hash(*paths: Path) -> str:
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]


def _record_all(files: Sequence[str], root: Path, package: str) -> list[LinesOfTests]:
    """Record files in as many processes as there are cores; the largest files come first."""
    if not hasattr(sys, "monitoring"):
        raise SystemExit("recording which tests run which lines needs Python 3.12 (sys.monitoring)")
    largest = sorted(files, key=lambda name: -(root / name).stat().st_size)
    num_parts = min(len(files), os.cpu_count() or 1)
    parts = [largest[number::num_parts] for number in range(num_parts)]
    with ThreadPoolExecutor(num_parts) as threads:
        return list(threads.map(lambda number: _record(parts[number], root, package, number), range(num_parts)))


def _merged(parts: Sequence[LinesOfTests]) -> LinesOfTests:
    seconds: dict[str, float] = {}
    tests: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
    for part in parts:
        seconds |= part.seconds
        for line, found in part.tests.items():
            tests[line] |= found
    return LinesOfTests(seconds, dict(tests), {}, "")


def _record(files: Sequence[str], root: Path, package: str, number: int) -> LinesOfTests:
    """Run the tests of `files` in a process of its own, and return what they run."""
    output = root / f"tested-lines-{number}"
    environment = {
        **os.environ,
        OUTPUT: f"{package}{os.pathsep}{output}",
        "PYTHONPATH": f"{root}{os.pathsep}{Path(__file__).parent}",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tested_lines", "-p", "no:cacheprovider", "-p", "no:xdist"]
    ended = subprocess.run([*command, *files], cwd=root, env=environment, stdout=subprocess.PIPE, text=True)
    if ended.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not output.exists():
        raise SystemExit(f"the tests could not be recorded:\n{ended.stdout[-3000:]}")
    return load(output)


def _monitoring() -> Any:
    return vars(sys)["monitoring"]  # since Python 3.12


class _Recorder:
    """A plugin of pytest: which lines of a package each test runs. A test that fails counts for nothing."""

    def __init__(self, root: Path, package: str, output: Path) -> None:
        self._root = str(root) + os.sep
        self._package = str(root / package) + os.sep
        self._output = output
        self._found: set[tuple[str, int]] = set()
        self._tests: defaultdict[tuple[str, int], set[str]] = defaultdict(set)
        self._seconds: dict[str, float] = {}
        self._has_failed = False

    def pytest_sessionstart(self) -> None:
        monitoring = _monitoring()
        monitoring.use_tool_id(_TOOL_ID, "tested lines")
        monitoring.register_callback(_TOOL_ID, monitoring.events.PY_START, self._enter)
        monitoring.register_callback(_TOOL_ID, monitoring.events.LINE, self._note)
        monitoring.set_events(_TOOL_ID, monitoring.events.PY_START)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._found.clear()
        self._has_failed = False
        _monitoring().restart_events()
        begin = time.perf_counter()
        yield
        if self._has_failed:
            return
        self._seconds[item.nodeid] = round(time.perf_counter() - begin, 4)
        for line in self._found:
            self._tests[line].add(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_failed |= not report.passed

    def pytest_sessionfinish(self) -> None:
        _monitoring().set_events(_TOOL_ID, 0)
        LinesOfTests(self._seconds, self._tests, {}, "").save(self._output)

    def _enter(self, code: CodeType, offset: int) -> Any:
        if code.co_filename.startswith(self._package):
            _monitoring().set_local_events(_TOOL_ID, code, _monitoring().events.LINE)
        return _monitoring().DISABLE

    def _note(self, code: CodeType, line: int) -> Any:
        self._found.add((code.co_filename.removeprefix(self._root), line))
        return _monitoring().DISABLE


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder: this module is a plugin of the process that `bring_up_to_date` starts."""
    if OUTPUT in os.environ:
        package, output = os.environ[OUTPUT].split(os.pathsep)
        config.pluginmanager.register(_Recorder(Path.cwd(), package, Path(output)))
