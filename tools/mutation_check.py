#!/usr/bin/env python3
"""Changes the engine in one place at a time, and reports which test catches it.

python tools/mutation_check.py [--list] [--all | --sample N --seed S | --only N ...] [-j JOBS]

Two kinds of places are found in the source, so a new one is checked from the day it is written: the waits and
hand-overs of events that keep copies in order (`find_waits`), each removed, and the decisions of the store, the
policies, the planner, the eligibility and the host pool (`mutations.find_decisions`): conditions negated, comparisons
off by one, calls and assignments dropped. Without `--all` a sample is drawn from both.

What no test misses is either untested or not needed. The exit status is 0 if every mutation was caught, 1 if one
survived, 2 if the tests fail without any mutation.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent))  # tools is no package

from forked_tests import ForkedTests, Outcome  # noqa: E402
from mutations import TESTS_OF, Mutation, find_decisions, mutation  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "offload_engine"
FOLDERS = (".", "_chunk", "_host", "_policy", "_saved")  # where waits are; a test holds that no other folder has any
# Targeted tests first: they are the fastest, and the name of the test that fails says the most.
_TARGETS = ("copy_order", "held_elsewhere", "engine", "host_pool", "random_pipelines")
TESTS = tuple(f"tests/cpu/test_{name}.py" for name in _TARGETS)
NUM_BATCHES = 8  # of random pipelines
SAMPLE = 120

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


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 160)
    with tempfile.TemporaryDirectory(prefix="mutation-check-") as folder:
        snapshot = _copy(ROOT, Path(folder) / "snapshot")  # the checkout may change while this runs
        chosen = _choose(find_mutations(snapshot), options)
        if options.list:
            console.print(_table(chosen, {}))
            return 0
        baseline = run_tests(None, snapshot)
        if baseline.verdict != "survived":
            console.print(f"the tests fail without any mutation: {baseline.detail}", style="bold red")
            return 2
        outcomes = check_all(chosen, snapshot, options.jobs)
    console.print(_table([item for item in chosen if item[0] in outcomes], outcomes))
    survivors = [index for index, outcome in outcomes.items() if outcome.verdict != "caught"]
    share = 100 * (1 - len(survivors) / max(1, len(outcomes)))
    console.print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} mutations caught ({share:.1f} %)")
    if survivors:
        console.print(f"not caught: --only {' '.join(map(str, survivors))}")
    return 1 if survivors else 0


def find_mutations(root: Path) -> list[Mutation]:
    """Return the waits, then the decisions that are none of them."""
    waits = find_waits(root)
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


def run_tests(changed: Mutation | None, root: Path) -> Outcome:
    """Run the tests on a copy of the repository `root` with `changed` applied; None: unchanged."""
    return check_all([(0, changed)], root, 1)[0]


def check_all(chosen: Sequence[tuple[int, Mutation | None]], root: Path, jobs: int) -> dict[int, Outcome]:
    """Run the tests for each mutation, in processes of their own; return the outcomes by number."""

    def prepare(item: tuple[int, Mutation | None], folder: Path) -> list[str]:
        copy, changed = _copy(root, folder), item[1]
        if changed is not None:
            target = copy / changed.path
            target.write_text(changed.apply(target.read_text()))
        if changed is None:
            names = dict.fromkeys(name for tests in TESTS_OF.values() for name in tests)
            return [*TESTS, *(f"tests/cpu/test_{name}.py" for name in names if name not in _TARGETS)]
        if not changed.tests:
            return [name for name in TESTS if (copy / name).exists()]
        return [f"tests/cpu/test_{name}.py" for name in (*changed.tests, "random_pipelines")]

    def environment(item: tuple[int, Mutation | None]) -> dict[str, str]:
        is_wait = item[1] is None or not item[1].tests
        return {"RANDOM_PIPELINE_BATCHES": str(NUM_BATCHES if is_wait else 1), "OMP_NUM_THREADS": "1"}

    outcomes = ForkedTests(prepare, environment).run(chosen, jobs)
    return {chosen[position][0]: outcome for position, outcome in outcomes.items()}


def _choose(mutations: list[Mutation], options: argparse.Namespace) -> list[tuple[int, Mutation]]:
    numbered = list(enumerate(mutations))
    if options.only:
        return [numbered[index] for index in options.only]
    if options.all or options.sample >= len(numbered):
        return numbered
    return sorted(random.Random(options.seed).sample(numbered, options.sample))


def _copy(root: Path, target: Path) -> Path:
    """Copy the parts of the repository that the tests need."""
    for name in (PACKAGE, "tests"):
        shutil.copytree(root / name, target / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(root / "pyproject.toml", target)
    return target


def _mutations_of(node: ast.AST, source: str, path: Path) -> Iterator[Mutation]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        name = _name_of(node.value)
        if _is_wait(node):
            yield mutation(node, "pass", f"no {name}", source, path)
        elif name == "append" and _name_of_owner(node.value) in _WAITED_FOR:
            yield mutation(node, "pass", f"not added to {_name_of_owner(node.value)}", source, path)
    if isinstance(node, ast.Call) and (position := _EVENT_ARGUMENTS.get(_name_of(node))) is not None:
        arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
        if position < len(arguments):
            nothing = "None" if _name_of(node) == "give_up_part" else "()"
            yield mutation(arguments[position], nothing, f"{_name_of(node)} without its events", source, path)
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
    for index, one in chosen:
        outcome = outcomes.get(index, Outcome("-", "", 0.0))
        style = {"caught": "green", "-": ""}.get(outcome.verdict, "bold red")
        where = f"{one.path.relative_to(PACKAGE)}:{one.line}"
        row = (str(index), where, f"{one.title}\n{one.code}", outcome.verdict, outcome.detail)
        table.add_row(*map(escape, row), f"{outcome.seconds:.0f}", style=style)
    return table


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="show the mutations and stop")
    parser.add_argument("--all", action="store_true", help="check every mutation, which takes hours")
    parser.add_argument("--sample", type=int, default=SAMPLE, metavar="N", help="check as many, drawn by the seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="+", metavar="N", help="check these mutations, by their number")
    parser.add_argument("-j", "--jobs", type=int, default=os.cpu_count() or 1, help="how many run at once")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
