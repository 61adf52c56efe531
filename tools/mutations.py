"""Mutations of the engine's decisions: conditions, comparisons, sums and calls, each changed in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Files -> the tests that run for them, fastest and most specific first.
_SAVED = (
    "versions",
    "parts",
    "saved_forms",
    "copy_order",
    "held_elsewhere",
    "abandoned_graphs",
    "engine",
    "interrupts",
)
_POLICY = ("horizon", "release", "waiting_copies", "prefetch_of_chunks", "combined_prefetch", "head", "plan_and_policy")
_POOL = ("host_pool", "extents", "host_limit", "engine")
_PLAN = ("planner", "planned_policy", "plan", "simulate")
TESTS_OF = {
    "_saved/store.py": (*_SAVED, "quantized"),
    "_saved/mover.py": (*_SAVED, "observe_engine"),
    "_saved/eligibility.py": ("saved_forms", "quantized", "engine", "layers", "observe_recorder"),
    "_policy/horizon.py": _POLICY,
    "_policy/window.py": (*_POLICY, "engine"),
    "_policy/reactive.py": (*_POLICY, "engine"),
    "_policy/lowest_peak.py": _POLICY,
    "_policy/resident.py": ("resident_budget", *_POLICY, "layers"),
    "planning/planner.py": _PLAN,
    "planning/budget.py": _PLAN,
    "planning/copy_ins.py": _PLAN,
    "_host/pool.py": _POOL,
    "_host/slabs.py": _POOL,
    "_host/extents.py": _POOL,
    "_host/leases.py": (*_POOL, "copy_order"),
}
_SWAPPED: dict[type[ast.AST], str] = {
    **{ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "=="},
    **{ast.Is: "is not", ast.IsNot: "is", ast.In: "not in", ast.NotIn: "in"},
    **{ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*"},
}
_ONLY_SAID = ("debug", "info", "warning", "note_saved", "note_staying", "note_storage_stays", "note_residency")


class Mutation(NamedTuple):
    """One edit of one file: the source between two offsets is replaced."""

    path: Path  # relative to the repository
    line: int
    start: int
    end: int
    replacement: str
    title: str  # what is lost
    code: str  # the line as it was
    tests: tuple[str, ...] = ()  # that run; empty: those for the order of copies

    def apply(self, source: str) -> str:
        return source[: self.start] + self.replacement + source[self.end :]


def mutation(node: ast.expr | ast.stmt, replacement: str, title: str, source: str, path: Path) -> Mutation:
    """Return the mutation that writes `replacement` in place of `node`."""
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None and node.end_col_offset is not None
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    return Mutation(path, node.lineno, start, end, replacement, title, lines[node.lineno - 1].strip())


def find_decisions(root: Path, package: str) -> list[Mutation]:
    """Return the mutations of the decisions in `TESTS_OF`, in source order, each once."""
    found: dict[tuple[Path, int, int, str], Mutation] = {}
    for name, tests in TESTS_OF.items():
        path = Path(package) / name
        source = (root / path).read_text()
        if not source.isascii():
            raise ValueError(f"{path} is not ASCII: offsets of the parser count bytes")
        for node in _code(ast.parse(source)):
            for one in _mutations_of(node, source, path):
                found.setdefault((one.path, one.start, one.end, one.replacement), one._replace(tests=tests))
    return sorted(found.values(), key=lambda one: (list(TESTS_OF).index(str(one.path.relative_to(package))), one.start))


def _code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that run: not annotations, assertions, raised messages, or what is only said."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "args") and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, (ast.Assert, ast.Raise, ast.JoinedStr)):
                yield from _code(child)


def _mutations_of(node: ast.AST, source: str, path: Path) -> Iterator[Mutation]:
    if isinstance(node, (ast.If, ast.IfExp)) and not isinstance(node.test, ast.Compare):
        yield mutation(node.test, f"(not ({ast.unparse(node.test)}))", "condition negated", source, path)
    elif isinstance(node, ast.BoolOp):
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        swapped = ast.unparse(ast.BoolOp(other, node.values))
        yield mutation(node, f"({swapped})", "and, or swapped", source, path)
    elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _SWAPPED:
        operator = _SWAPPED[type(node.ops[0])]
        swapped = f"({ast.unparse(node.left)} {operator} {ast.unparse(node.comparators[0])})"
        yield mutation(node, swapped, f"{operator} instead", source, path)
    elif isinstance(node, ast.BinOp) and type(node.op) in _SWAPPED:
        operator = _SWAPPED[type(node.op)]
        swapped = f"({ast.unparse(node.left)} {operator} {ast.unparse(node.right)})"
        yield mutation(node, swapped, f"{operator} instead", source, path)
    elif isinstance(node, ast.AugAssign):
        yield mutation(node, "pass", f"{ast.unparse(node.target)} not changed", source, path)
    elif isinstance(node, ast.Assign) and any(isinstance(target, ast.Attribute) for target in node.targets):
        if not _is_first(node, source):
            yield mutation(node, "pass", f"{ast.unparse(node.targets[0])} not set", source, path)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _name_of(node.value) not in _ONLY_SAID:
        yield mutation(node, "pass", f"no {_name_of(node.value)}", source, path)
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
        yield mutation(node, f"return {not node.value.value}", "the other answer", source, path)


def _is_first(node: ast.Assign, source: str) -> bool:
    """Return whether it is an assignment in a constructor: without it nothing runs."""
    for other in ast.walk(ast.parse(source)):
        if isinstance(other, ast.FunctionDef) and other.name == "__init__":
            if other.lineno <= node.lineno <= (other.end_lineno or 0):
                return True
    return False


def _name_of(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
