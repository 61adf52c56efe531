# SPDX-License-Identifier: Apache-2.0
"""Mutations of the engine's decisions: conditions, comparisons, sums and calls, each changed in one place."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_NAMES = {
    "_saved": "store mover eligibility",
    "_policy": "horizon window reactive lowest_peak resident planned shape_log share keeping leaving executor",
    "planning": "planner budget copy_ins steps releases chosen",
    "_budget": "idleness learn verify",
    "_host": "pool slabs extents leases",
}
FILES = tuple(f"{folder}/{name}.py" for folder, names in _NAMES.items() for name in names.split())
"""Of the package: their decisions are changed. Those of `_observe` are not: they change what is reported only."""
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
    last_line: int
    is_wait: bool = False  # or a hand-over of an event that is waited for; else a decision

    def apply(self, source: str) -> str:
        return source[: self.start] + self.replacement + source[self.end :]


def mutation(node: ast.expr | ast.stmt, replacement: str, title: str, source: str, path: Path) -> Mutation:
    """Return the mutation that writes `replacement` in place of `node`."""
    lines = source.splitlines(keepends=True)
    assert node.end_lineno is not None and node.end_col_offset is not None
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    return Mutation(path, node.lineno, start, end, replacement, title, lines[node.lineno - 1].strip(), node.end_lineno)


def find_decisions(root: Path, package: str) -> list[Mutation]:
    """Return the mutations of the decisions in `FILES`, in source order, each once."""
    found: dict[tuple[Path, int, int, str], Mutation] = {}
    for name in FILES:
        path = Path(package) / name
        source = (root / path).read_text()
        if not source.isascii():
            raise ValueError(f"{path} is not ASCII: offsets of the parser count bytes")
        for node in _code(ast.parse(source)):
            for one in _mutations_of(node, source, path):
                found.setdefault((one.path, one.start, one.end, one.replacement), one)
    return sorted(found.values(), key=lambda one: (FILES.index(str(one.path.relative_to(package))), one.start))


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
    elif operands := _swappable(node):
        left, kind, right = operands
        operator = _SWAPPED[type(kind)]
        swapped = f"({ast.unparse(left)} {operator} {ast.unparse(right)})"
        assert isinstance(node, ast.expr)
        yield mutation(node, swapped, f"{operator} instead", source, path)
    elif isinstance(node, ast.AugAssign):
        yield mutation(node, "pass", f"{ast.unparse(node.target)} not changed", source, path)
    elif isinstance(node, ast.Assign) and any(isinstance(target, ast.Attribute) for target in node.targets):
        if not _is_first(node, source):
            yield mutation(node, "pass", f"{ast.unparse(node.targets[0])} not set", source, path)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and name_of(node.value) not in _ONLY_SAID:
        yield mutation(node, "pass", f"no {name_of(node.value)}", source, path)
    elif isinstance(node, ast.Return) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
        yield mutation(node, f"return {not node.value.value}", "the other answer", source, path)


def _swappable(node: ast.AST) -> tuple[ast.expr, ast.AST, ast.expr] | None:
    """Return the operands and the operator of a comparison or sum whose operator has another to be swapped with."""
    found: tuple[ast.expr, ast.AST, ast.expr] | None = None
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        found = node.left, node.ops[0], node.comparators[0]
    elif isinstance(node, ast.BinOp):
        found = node.left, node.op, node.right
    return found if found and type(found[1]) in _SWAPPED else None


def _is_first(node: ast.Assign, source: str) -> bool:
    """Return whether it is an assignment in a constructor: without it nothing runs."""
    functions = (other for other in ast.walk(ast.parse(source)) if isinstance(other, ast.FunctionDef))
    return any(f.name == "__init__" and f.lineno <= node.lineno <= (f.end_lineno or 0) for f in functions)


def name_of(call: ast.Call) -> str:
    """Return the name of the function or method that is called."""
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
