# SPDX-License-Identifier: Apache-2.0
"""Both packages stay in small pieces: a class that outgrows the limits lacks a collaborator."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_CLASS_LINES = 250
MAX_PUBLIC_NAMES = 20  # methods and properties, also those inherited from a class of the packages
MEDIAN_FUNCTION_LINES = 10  # more than half of the functions are shorter
DECISIONS = ("offload_engine/_policy", "offload_engine/planning")  # executor, policies, planner, simulator
MAX_DECISION_LINES = 300


def test_classes_functions_and_files_of_decisions_are_small() -> None:
    paths = [path for package in ("offload_engine", "megatron_patches") for path in (ROOT / package).rglob("*.py")]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    assert len(functions) > 1000 and statistics.median(map(num_lines, functions)) < MEDIAN_FUNCTION_LINES
    assert len(classes) > 100
    assert [name for name, node in classes.items() if num_lines(node) > MAX_CLASS_LINES] == []
    assert [name for name, node in classes.items() if len(public_names(node, classes)) > MAX_PUBLIC_NAMES] == []
    decisions = [path for folder in DECISIONS for path in (ROOT / folder).glob("*.py")]
    assert len(decisions) > 10
    assert [path for path in decisions if len(path.read_text().splitlines()) >= MAX_DECISION_LINES] == []


def num_lines(node: ast.stmt) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def public_names(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> set[str]:
    own = {item.name for item in node.body if isinstance(item, ast.FunctionDef) and not item.name.startswith("_")}
    bases = (classes[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in classes)
    return own.union(*(public_names(base, classes) for base in bases))
