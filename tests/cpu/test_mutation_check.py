# SPDX-License-Identifier: Apache-2.0
"""tools/mutation_check.py: it finds the waits and decisions of the engine, and a change of one is caught."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.tool_scripts import TOOLS, load_tool

pytest.importorskip("rich")
pytest.importorskip("tqdm")
ROOT = TOOLS.parent
mutation_check, mutations = load_tool("mutation_check"), load_tool("mutations")


def test_every_documented_rule_has_a_wait_to_remove() -> None:
    rules = set(re.findall(r"^ (\d)\. ", (ROOT / "offload_engine/_saved/transfers.py").read_text(), re.MULTILINE))
    found = {rule for m in mutation_check.find_waits(ROOT) for rule in re.findall(r"Rule (\d)", m.code)}
    assert rules and rules <= found, f"rules {sorted(rules - found)} are named at no wait"


def test_every_wait_on_an_event_is_found() -> None:
    found = {(mutation.path, mutation.line) for mutation in mutation_check.find_waits(ROOT)}
    devices = ROOT / "offload_engine" / "_devices"  # implement the waits; they do not decide on any
    others = {ROOT / "offload_engine" / name for name in ("rehearsal/device.py", "_budget/link.py")}  # no saved tensor
    for path in (ROOT / "offload_engine").rglob("*.py"):
        if path.is_relative_to(devices) or path in others:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"(?<!def )\b(wait_event|synchronize|_?await_\w+|wait_for_last_copy)\(", line):
                is_found = (path.relative_to(ROOT), number) in found or "early wait" in line
                assert is_found, f"{path.name}:{number}: {line.strip()}"


def test_decisions_of_every_policy_are_changed() -> None:
    policies = {f"_policy/{path.name}" for path in (ROOT / "offload_engine/_policy").glob("*.py")}
    without_decisions = {"_policy/__init__.py", "_policy/policy.py", "_policy/choose.py"}
    assert policies - without_decisions <= set(mutations.FILES)
    assert len(set(mutations.FILES)) == len(mutations.FILES) > 20


def check_with(changed: Any, *tests: str) -> Any:
    """Make a check of a mutation whose line these tests run, by node ID below tests/cpu."""
    ids = [f"tests/cpu/{test}" for test in tests]
    lines = {(str(changed.path), changed.line): set(ids)}
    return mutation_check.Check(ROOT, mutation_check.LinesOfTests(dict.fromkeys(ids, 1.0), lines))


RULE_5 = "test_copy_order.py::test_rule_5_every_stream_that_reads_waits[seed=None]"
OTHER = "test_copy_order.py::test_rule_3_unused_copy_in[seed=None]"


def no_rule_5() -> Any:
    (one,) = [m for m in mutation_check.find_waits(ROOT) if "copied_in)  # Rule 5" in m.code]
    return one


def test_a_missing_wait_is_caught_by_the_test_of_it_alone() -> None:
    rule_5 = no_rule_5()
    ((_, outcome),) = check_with(rule_5, OTHER, RULE_5).run([(0, rule_5)], 1)
    assert outcome[:2] == ("caught", f"tests/cpu/{RULE_5}")
    ((_, outcome),) = check_with(rule_5, OTHER).run([(0, rule_5)], 1)
    assert outcome.verdict == "survived"
    no_program = rule_5._replace(replacement="pass )")
    ((_, outcome),) = check_with(no_program, RULE_5).run([(0, no_program)], 1)
    assert outcome.verdict == "error", "it is not caught"
