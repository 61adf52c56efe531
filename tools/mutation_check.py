#!/usr/bin/env python3
"""Removes each ordering wait of the engine in turn, and reports which test catches it.

python tools/mutation_check.py [--list] [--only N ...] [-j JOBS]

A wait that no test misses is either untested or not needed. The exit status is 0 if every mutation was caught, 1 if
one survived, 2 if the tests fail without any mutation. The waits are found in the source (`find_mutations`), so a new
one is checked from the day it is written; the tests that run are those on the adversarial device.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "offload_engine"
FOLDERS = (".", "_chunk", "_host", "_policy", "_saved")  # where waits are; a test holds that no other folder has any
# Targeted tests first: they are the fastest, and the name of the test that fails says the most.
_TARGETS = ("copy_order", "held_elsewhere", "engine", "host_pool", "random_pipelines")
TESTS = tuple(f"tests/cpu/test_{name}.py" for name in _TARGETS)
NUM_BATCHES = 8  # of random pipelines
TIMEOUT_S = 300

_WAITS = re.compile(r"^(wait_event|wait_stream|synchronize|settle|_?await_\w+|_?wait_for\w*)$")
_EVENT_ARGUMENTS = {"give_back": 1, "put": 3, "give_up_part": 0}  # method -> position of the events it hands over
_WAITED_FOR = (
    "events",
    "readers",
    "pending",
    "copied_out",
    "copied_in",
    "last_read",
)  # attributes: what they hold is waited for later
_NOT_FOR_ORDER = "early wait"  # in a comment on a wait: it only comes sooner than the one that keeps the order


class Mutation(NamedTuple):
    """One edit of one file: the source between two offsets is replaced."""

    path: Path  # relative to the repository
    line: int
    start: int
    end: int
    replacement: str
    title: str  # what is lost
    code: str  # the line as it was

    def apply(self, source: str) -> str:
        return source[: self.start] + self.replacement + source[self.end :]


class Outcome(NamedTuple):
    """How the tests took one mutation."""

    verdict: str  # "caught", "survived" or "error"
    detail: str  # the first failing test, or the end of the output
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    with tempfile.TemporaryDirectory(prefix="mutation-check-") as folder:
        snapshot = _copy(ROOT, Path(folder) / "snapshot")  # the checkout may change while this runs
        mutations = find_mutations(snapshot)
        chosen = [(i, m) for i, m in enumerate(mutations) if not options.only or i in options.only]
        if options.list:
            console.print(_table(chosen, {}))
            return 0
        baseline = run_tests(None, snapshot)
        if baseline.verdict != "survived":
            console.print(f"the tests fail without any mutation: {baseline.detail}", style="bold red")
            return 2
        outcomes = _check_all(chosen, snapshot, options.jobs)
    console.print(_table(chosen, outcomes))
    survivors = [index for index, outcome in outcomes.items() if outcome.verdict != "caught"]
    console.print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} mutations caught")
    return 1 if survivors else 0


def find_mutations(root: Path) -> list[Mutation]:
    """Return every wait of the engine, and every hand-over of an event that is awaited later, in source order."""
    mutations: list[Mutation] = []
    for path in sorted(path for folder in FOLDERS for path in (root / PACKAGE / folder).glob("*.py")):
        source = path.read_text()
        found = [m for node in ast.walk(ast.parse(source)) for m in _mutations_of(node, source, path.relative_to(root))]
        needed = (mutation for mutation in found if _NOT_FOR_ORDER not in mutation.code)
        mutations += sorted(needed, key=lambda mutation: mutation.start)
    return mutations


def run_tests(mutation: Mutation | None, root: Path) -> Outcome:
    """Run the tests on a copy of the repository `root` with `mutation` applied; None: unchanged."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="mutation-") as folder:
        copy = _copy(root, Path(folder) / "copy")
        if mutation is not None:
            target = copy / mutation.path
            target.write_text(mutation.apply(target.read_text()))
        verdict, detail = _pytest(copy)
    return Outcome(verdict, detail, time.perf_counter() - started)


def _copy(root: Path, target: Path) -> Path:
    """Copy the parts of the repository that the tests need."""
    for name in (PACKAGE, "tests"):
        shutil.copytree(root / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(root / "pyproject.toml", target)
    return target


def _pytest(copy: Path) -> tuple[str, str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command += [name for name in TESTS if (copy / name).exists()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANDOM_PIPELINE_BATCHES": str(NUM_BATCHES)}
    environment.pop("PYTEST_ADDOPTS", None)
    environment["PYTHONPATH"] = str(copy)  # before an editable install of the checkout
    try:
        done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return "error", f"no end within {TIMEOUT_S} s"
    if done.returncode == 0:
        return "survived", ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+::\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed is not None:
        return "caught", failed.group(1).removeprefix("tests/cpu/")
    return "error", (done.stdout + done.stderr)[-500:]


def _check_all(chosen: list[tuple[int, Mutation]], root: Path, jobs: int) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    with ThreadPoolExecutor(jobs) as executor:
        running = {executor.submit(run_tests, mutation, root): index for index, mutation in chosen}
        for future in tqdm(as_completed(running), total=len(running), desc="mutations", unit="mutation"):
            outcomes[running[future]] = future.result()
    return dict(sorted(outcomes.items()))


def _mutations_of(node: ast.AST, source: str, path: Path) -> Iterator[Mutation]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = _name_of(node.value)
        if _is_wait(node):
            yield _mutation(node, "pass", f"no {name}", source, path)
        elif name == "append" and _name_of_owner(node.value) in _WAITED_FOR:
            yield _mutation(node, "pass", f"not added to {_name_of_owner(node.value)}", source, path)
    if isinstance(node, ast.Call) and (position := _EVENT_ARGUMENTS.get(_name_of(node))) is not None:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if position < len(arguments):
            nothing = "None" if _name_of(node) == "give_up_part" else "()"
            yield _mutation(arguments[position], nothing, f"{_name_of(node)} without its events", source, path)
    if isinstance(node, ast.Assign) and ast.unparse(node.value) not in ("None", "()"):
        for target in node.targets:
            if isinstance(target, ast.Attribute) and target.attr in _WAITED_FOR:
                yield _mutation(node, _without(node, target), f"{target.attr} not noted", source, path)
    if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple) and any(map(_is_wait, ast.walk(node))):
        for element in node.iter.elts:
            rest = ", ".join(ast.unparse(other) for other in node.iter.elts if other is not element)
            yield _mutation(node.iter, f"({rest},)", f"no wait for {ast.unparse(element)}", source, path)


def _without(node: ast.Assign, target: ast.expr) -> str:
    """Remove one target of an assignment: `a = b = event` without `a` is `b = event`, with `a` as it was."""
    others = [other for other in node.targets if other is not target]
    return f"{' = '.join(map(ast.unparse, others))} = {ast.unparse(node.value)}" if others else "pass"


def _mutation(node: ast.expr | ast.stmt, replacement: str, title: str, source: str, path: Path) -> Mutation:
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None and node.end_col_offset is not None
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    return Mutation(path, node.lineno, start, end, replacement, title, lines[node.lineno - 1].strip())


def _is_wait(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and bool(_WAITS.match(_name_of(node.value)))


def _name_of(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _name_of_owner(call: ast.Call) -> str:
    """Return `b` of `a.b.append(x)`."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")


def _table(chosen: list[tuple[int, Mutation]], outcomes: dict[int, Outcome]) -> Table:
    table = Table("#", "where", "removed", "verdict", "first failing test", "s")
    for index, mutation in chosen:
        outcome = outcomes.get(index, Outcome("-", "", 0.0))
        style = {"caught": "green", "-": ""}.get(outcome.verdict, "bold red")
        where = f"{mutation.path.relative_to(PACKAGE)}:{mutation.line}"
        row = (str(index), where, f"{mutation.title}\n{mutation.code}", outcome.verdict, outcome.detail)
        table.add_row(*map(escape, row), f"{outcome.seconds:.0f}", style=style)
    return table


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the mutations and stop")
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="check these mutations, by their number")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="how many run at once")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
