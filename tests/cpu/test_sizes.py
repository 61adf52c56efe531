# SPDX-License-Identifier: Apache-2.0
"""Both packages stay in small pieces: a class that outgrows the limits lacks a collaborator."""

from __future__ import annotations

import ast
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAX_CLASS_LINES = 250
MEDIAN_FUNCTION_LINES = 10  # more than half of the functions are shorter
DECISIONS = ("offload_engine/_policy", "offload_engine/planning")  # executor, policies, planner, simulator
MAX_DECISION_LINES = 300


def test_classes_functions_and_files_of_decisions_are_small() -> None:
    paths = [path for package in ("offload_engine", "megatron_patches") for path in (ROOT / package).rglob("*.py")]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    lines = {node: (node.end_lineno or 0) - node.lineno + 1 for node in nodes if isinstance(node, ast.stmt)}
    classes = {node.name: lines[node] for node in lines if isinstance(node, ast.ClassDef)}
    functions = [lines[node] for node in lines if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    assert len(classes) > 100 and [name for name, number in classes.items() if number > MAX_CLASS_LINES] == []
    assert len(functions) > 1000 and statistics.median(functions) < MEDIAN_FUNCTION_LINES
    decisions = [path for folder in DECISIONS for path in (ROOT / folder).glob("*.py")]
    assert len(decisions) > 10
    assert [path for path in decisions if len(path.read_text().splitlines()) >= MAX_DECISION_LINES] == []
