# SPDX-License-Identifier: Apache-2.0
"""Checks that both packages stay in small pieces, read from the source by `ast`."""

from __future__ import annotations

import ast
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("offload_engine", "megatron_patches")
MAX_CLASS_LINES = 250
MAX_PUBLIC_NAMES = 20  # methods and properties, also those inherited from a class of the packages
MEDIAN_FUNCTION_LINES = 10  # more than half of the functions are shorter
DECISIONS = ("offload_engine/_policy", "offload_engine/planning")  # executor, policies, planner, simulator
MAX_DECISION_LINES = 300

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _trees() -> Iterator[ast.Module]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield ast.parse(path.read_text())


def _classes(trees: Iterator[ast.Module]) -> list[ast.ClassDef]:
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def _num_lines(node: ast.ClassDef | Function) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _public_names(node: ast.ClassDef, by_name: Mapping[str, ast.ClassDef]) -> set[str]:
    own = {item.name for item in node.body if isinstance(item, Function) and not item.name.startswith("_")}
    bases = (by_name[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in by_name)
    return own.union(*(_public_names(base, by_name) for base in bases))


def _too_large(classes: Sequence[ast.ClassDef]) -> list[str]:
    by_name = {node.name: node for node in classes}
    sizes = [(node.name, _num_lines(node), len(_public_names(node, by_name))) for node in classes]
    return [
        f"{name} has {lines} lines and {public} public methods and properties"
        for name, lines, public in sizes
        if lines > MAX_CLASS_LINES or public > MAX_PUBLIC_NAMES
    ]


def _function_lines(trees: Iterator[ast.Module]) -> list[int]:
    return [_num_lines(node) for tree in trees for node in ast.walk(tree) if isinstance(node, Function)]


def test_no_class_is_too_large() -> None:
    """A class that outgrows the limits lacks a collaborator."""
    classes = _classes(_trees())
    assert len(classes) > 100
    assert not _too_large(classes)


def test_most_functions_are_short() -> None:
    lines = _function_lines(_trees())
    assert len(lines) > 1000
    assert statistics.median(lines) < MEDIAN_FUNCTION_LINES


def test_each_file_of_decisions_can_be_read_at_one_go() -> None:
    lines = {
        path.name: len(path.read_text().splitlines()) for folder in DECISIONS for path in (ROOT / folder).glob("*.py")
    }
    assert {"executor.py", "planned.py", "lowest_peak.py", "planner.py", "simulate.py"} <= lines.keys()
    assert not {name: number for name, number in lines.items() if number >= MAX_DECISION_LINES}
