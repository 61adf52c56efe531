#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Changes the engine in one place at a time, and reports which test catches it.

python tools/mutation_check.py [--list] [--all | --sample N | --only N ...] [--seed S] [-j JOBS] [--results FILE]

Two kinds of places are found in the source, so a new one is checked from the day it is written: the waits and
hand-overs of events that keep copies in order (`find_waits`), each removed, and the decisions of the store, the
policies, the planner, the eligibility and the host pool (`mutations.find_decisions`): conditions negated, comparisons
off by one, calls and assignments dropped. All waits come first, then the decisions in an order that the seed draws.

For each mutation those tests run that run its line, as a first run of the tests has recorded (`tested_lines`; minutes,
Python 3.12): what has caught another mutation of that file first, then the fastest. Each runs in a copy of the
repository of its own. Before them unchanged copies run the same tests; one that fails there counts for nothing.

What no test misses is either untested or not needed. With `--results` each outcome is a line of JSON there, and what
the file says is caught is not run again; what survived is, last of all. The exit status is 0 if every mutation was
caught, 1 if one survived, 2 if the tests fail without any mutation.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))  # tools is no package

from forked_tests import ForkedTests, Outcome, Selection  # noqa: E402
from mutations import Mutation, find_decisions, mutation, name_of  # noqa: E402
from tested_lines import LinesOfTests, lines_of_tests  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "offload_engine"
# Where waits are; a test holds that no other folder has any.
FOLDERS = (".", "_captured", "_chunk", "_host", "_policy", "_saved")
SAMPLE = 120
NUM_BATCHES = 8  # of random pipelines
NUM_FILES_FIRST = 5  # whose tests run before any other file is imported
RECORD = ROOT / "out/tested-lines"  # which tests run which lines
_Numbered = tuple[int, Mutation]
_Item = _Numbered | tuple[int, tuple[str, ...]]  # or tests of an unchanged copy, numbered below 0
_KEY = ("path", "line", "start", "title", "replacement")  # of a mutation, in files of results

_WAITS = re.compile(r"^(wait_event|wait_stream|synchronize|_?await_\w+|_?wait_for\w*)$")
_EVENT_ARGUMENTS = {"return_lease": 1, "put": 3, "return_parts": 0}  # method -> position of the events it hands over
_WAITED_FOR = ("events", "readers", "pending", "copied_out", "copied_in", "last_read")  # attributes: it is, later
_NOT_FOR_ORDER = "early wait"  # in a comment on a wait: it only comes sooner than the one that keeps the order


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    os.environ.update({"RANDOM_PIPELINE_BATCHES": str(NUM_BATCHES), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    with tempfile.TemporaryDirectory(prefix="mutation-check-") as folder:
        snapshot = _copy(ROOT, Path(folder) / "snapshot")  # the checkout may change while this runs
        chosen = _choose(find_mutations(snapshot), options)
        if options.list:
            console.print(_table(chosen, {}))
            return 0
        known = _read(options.results, chosen)
        wanted = [item for item in chosen if item[0] not in known]
        wanted += [item for item in chosen if item[0] in known and known[item[0]].verdict != "caught"]
        check = Check(snapshot, lines_of_tests(RECORD, snapshot, PACKAGE))
        _compile(snapshot)
        failing = check.leave_out_failing(wanted, options.jobs)
        outcomes = dict(known)
        for (index, changed), outcome in check.run(wanted, options.jobs, options.seconds):
            assert isinstance(changed, Mutation)
            outcomes[index] = outcome
            if options.results is not None:
                with options.results.open("a") as file:
                    file.write(json.dumps({**_key(changed), "code": changed.code, **outcome._asdict()}) + "\n")
    console.print(_table([item for item in chosen if item[0] in outcomes], outcomes))
    return _sum_up(console, len(chosen), outcomes, failing)


def _sum_up(console: Console, num_chosen: int, judged: dict[int, Outcome], failing: set[str]) -> int:
    missed = [str(index) for index, outcome in judged.items() if outcome.verdict != "caught"]
    num_caught, num_left = len(judged) - len(missed), num_chosen - len(judged)
    console.print(f"{num_caught} of {len(judged)} mutations caught; {num_left} were not run")
    if missed:
        console.print(f"not caught: --only {' '.join(missed)}")
    if failing:
        left_out = f"left out, because they fail without any mutation: {'; '.join(failing)}"
        console.print(escape(left_out), style="bold red")
    return 2 if failing else 1 if missed else 0


def find_mutations(root: Path) -> list[Mutation]:
    """Return the waits, then the decisions that are none of them."""
    waits = [wait._replace(is_wait=True) for wait in find_waits(root)]
    known = {wait[:5] for wait in waits}
    return [*waits, *(one for one in find_decisions(root, PACKAGE) if one[:5] not in known)]


def find_waits(root: Path) -> list[Mutation]:
    """Return every wait of the engine, and every hand-over of an event that is awaited later, in source order."""
    mutations: list[Mutation] = []
    for path in sorted(path for folder in FOLDERS for path in (root / PACKAGE / folder).glob("*.py")):
        source = path.read_text()
        found = [m for node in ast.walk(ast.parse(source)) for m in _mutations_of(node, source, path.relative_to(root))]
        needed = (one for one in found if _NOT_FOR_ORDER not in one.code)
        mutations += sorted(needed, key=lambda one: one.start)
    return mutations


class Check:
    """Runs tests for mutations."""

    def __init__(self, root: Path, lines: LinesOfTests) -> None:
        self._root = root
        self._lines = lines
        self._num_caught: defaultdict[Path, Counter[str]] = defaultdict(Counter)  # by each test, in each file
        self._failing: set[str] = set()

    def run(self, chosen: Sequence[_Item], jobs: int, limit_s: float = float("inf")) -> Iterator[tuple[_Item, Outcome]]:
        """Run the tests for each mutation, in processes of their own; yield the outcomes as they come."""
        for position, outcome in ForkedTests(self._prepare, PACKAGE).run(chosen, jobs, limit_s):
            item = chosen[position]
            if isinstance(item[1], Mutation) and "::" in outcome.detail:
                self._num_caught[item[1].path][outcome.detail] += 1
            yield item, outcome

    def leave_out_failing(self, chosen: Sequence[_Numbered], jobs: int) -> set[str]:
        """Run all tests that `chosen` will run on unchanged copies; leave out those that fail, and return them."""
        tests = sorted({test for _, one in chosen for test in self._tests_of(one)})
        controls = [(-number, tuple(tests[number - 1 :: jobs])) for number in range(1, jobs + 1)]
        for (number, _), outcome in self.run([control for control in controls if control[1]], jobs):
            part = controls[-number - 1][1]
            self._failing.update(outcome.failed or (part if outcome.verdict != "survived" else ()))
        return self._failing

    def _prepare(self, item: _Item, folder: Path) -> Selection:
        copy, changed = _copy(self._root, folder), item[1]
        if not isinstance(changed, Mutation):
            return Selection((changed,), sum(map(self._lines.seconds.__getitem__, changed)), ends_at_first=False)
        target = copy / changed.path
        target.write_text(changed.apply(target.read_text()))
        tests = self._tests_of(changed)
        files = list(dict.fromkeys(map(_file_of, tests)))[:NUM_FILES_FIRST]
        first = [test for test in tests if _file_of(test) in files]
        rest = [test for test in tests if _file_of(test) not in files]
        return Selection((first, rest), sum(map(self._lines.seconds.__getitem__, tests)))

    def _tests_of(self, changed: Mutation) -> list[str]:
        """Return the tests that run the changed lines: what has caught most in that file first, then the fastest."""
        num_caught = self._num_caught[changed.path]
        tests = self._lines.of(str(changed.path), changed.line, changed.last_line)
        return sorted((test for test in tests if test not in self._failing), key=lambda test: -num_caught[test])


def _read(results: Path | None, chosen: Sequence[_Numbered]) -> dict[int, Outcome]:
    """Return what a file of results knows of `chosen`, the last word on each."""
    if results is None or not results.exists():
        return {}
    found = {}
    for line in results.read_text().splitlines():
        record = json.loads(line)
        found[tuple(record[name] for name in _KEY)] = Outcome(record["verdict"], record["detail"], record["seconds"])
    keys = {index: tuple(_key(one).values()) for index, one in chosen}
    return {index: found[key] for index, key in keys.items() if key in found}


def _key(one: Mutation) -> dict[str, str | int]:
    return dict(zip(_KEY, (str(one.path), one.line, one.start, one.title, one.replacement), strict=True))


def _file_of(test: str) -> str:
    return test.split("::")[0]


def _choose(mutations: list[Mutation], options: argparse.Namespace) -> list[_Numbered]:
    """Return the waits, then decisions as the seed shuffles them, with their numbers in the source's order."""
    numbered = list(enumerate(mutations))
    if options.only:
        return [numbered[index] for index in options.only]
    waits = [item for item in numbered if item[1].is_wait]
    decisions = [item for item in numbered if not item[1].is_wait]
    random.Random(options.seed).shuffle(decisions)
    return [*waits, *decisions][: None if options.all else options.sample]


def _compile(snapshot: Path) -> None:
    """Have Python and pytest write what they make of the source, which takes longer than most tests, for all copies."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {**os.environ, "PYTHONPATH": str(snapshot)}
    subprocess.run([*command, "tests/cpu"], cwd=snapshot, env=environment, stdout=subprocess.DEVNULL)


def _copy(root: Path, target: Path) -> Path:
    """Copy the parts of the repository that the tests need."""
    for name in (PACKAGE, "megatron_patches", "benchmarks", "tests"):
        shutil.copytree(root / name, target / name, ignore=shutil.ignore_patterns("*.so"))
    shutil.copy(root / "pyproject.toml", target)
    (target / "docs").mkdir()
    (target / "docs/results").symlink_to((root / "docs/results").resolve())  # tests only read what GPUs have recorded
    return target


def _mutations_of(node: ast.AST, source: str, path: Path) -> Iterator[Mutation]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = name_of(node.value)
        if _is_wait(node):
            yield mutation(node, "pass", f"no {name}", source, path)
        elif name == "append" and _name_of_owner(node.value) in _WAITED_FOR:
            yield mutation(node, "pass", f"not added to {_name_of_owner(node.value)}", source, path)
    if isinstance(node, ast.Call) and (position := _EVENT_ARGUMENTS.get(name_of(node))) is not None:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if position < len(arguments):
            nothing = "None" if name_of(node) == "return_parts" else "()"
            yield mutation(arguments[position], nothing, f"{name_of(node)} without its events", source, path)
    if isinstance(node, ast.Assign) and ast.unparse(node.value) not in ("None", "()"):
        for target in node.targets:
            if isinstance(target, ast.Attribute) and target.attr in _WAITED_FOR:
                yield mutation(node, _without(node, target), f"{target.attr} not noted", source, path)
    if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple) and any(map(_is_wait, ast.walk(node))):
        for element in node.iter.elts:
            rest = ", ".join(ast.unparse(other) for other in node.iter.elts if other is not element)
            yield mutation(node.iter, f"({rest},)", f"no wait for {ast.unparse(element)}", source, path)


def _without(node: ast.Assign, target: ast.expr) -> str:
    """Remove one target of an assignment: `a = b = event` without `a` is `b = event`, with `a` as it was."""
    others = [other for other in node.targets if other is not target]
    return f"{' = '.join(map(ast.unparse, others))} = {ast.unparse(node.value)}" if others else "pass"


def _is_wait(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and bool(_WAITS.match(name_of(node.value)))


def _name_of_owner(call: ast.Call) -> str:
    """Return `b` of `a.b.append(x)`."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")


def _table(chosen: list[tuple[int, Mutation]], outcomes: dict[int, Outcome]) -> Table:
    table = Table("#", "where", "removed", "verdict", "first failing test", "s")
    for index, one in chosen:
        outcome = outcomes.get(index, Outcome("-", "", 0.0))
        style = {"caught": "green", "-": ""}.get(outcome.verdict, "bold red")
        where = f"{one.path.relative_to(PACKAGE)}:{one.line}"
        row = (str(index), where, f"{one.title}\n{one.code}", outcome.verdict, outcome.detail)
        table.add_row(*map(escape, row), f"{outcome.seconds:.0f}", style=style)
    return table


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Any = parser.add_argument
    number = {"type": int, "metavar": "N"}
    add("--list", action="store_true", help="show the mutations and stop")
    add("--all", action="store_true", help="check every mutation")
    add("--sample", **number, default=SAMPLE, help="check the first N (default: %(default)s)")
    add("--seed", **number, default=0, help="draws the order of the decisions (default: %(default)s)")
    add("--only", **number, nargs="+", help="check these mutations, by their number")
    add("--seconds", type=float, default=float("inf"), help="start no mutation later than this")
    add("--results", type=Path, metavar="FILE", help="read, and append each outcome, as lines of JSON")
    add("-j", "--jobs", **number, default=os.cpu_count() or 1, help="how many run at once (default: one for each core)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
