"""tools/mutation_check.py: it finds the waits and decisions of the engine, and a change of one is caught."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.tool_scripts import load_tool

pytest.importorskip("rich")
pytest.importorskip("tqdm")
ROOT = Path(__file__).parents[2]


mutation_check = load_tool("mutation_check")
mutations = load_tool("mutations")


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
            if re.search(r"\.(wait_event|synchronize)\(", line):
                assert (path.relative_to(ROOT), number) in found, f"{path.name}:{number}: {line.strip()}"


def test_no_mutation_is_lost_when_files_move() -> None:
    assert len(mutation_check.find_waits(ROOT)) >= 41


def test_mutations_are_programs_that_differ() -> None:
    found = mutation_check.find_mutations(ROOT)
    for mutation in found:
        source = (ROOT / mutation.path).read_text()
        mutated = mutation.apply(source)
        assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source)), mutation
    assert len({mutation[:5] for mutation in found}) == len(found)


def test_every_file_of_decisions_has_some_and_its_tests_exist() -> None:
    found = {mutation.path for mutation in mutation_check.find_decisions(ROOT, "offload_engine")}
    assert found == {Path("offload_engine") / name for name in mutations.TESTS_OF}
    tests = {name for names in mutations.TESTS_OF.values() for name in names}
    assert all((ROOT / f"tests/cpu/test_{name}.py").exists() for name in tests)


def test_what_is_only_said_is_no_decision() -> None:
    lines = [one.code for one in mutation_check.find_decisions(ROOT, "offload_engine")]
    assert lines and not any(line.startswith(("logger.", "assert ", "raise ")) for line in lines)


def test_a_sample_is_the_same_for_the_same_seed() -> None:
    found = mutation_check.find_mutations(ROOT)
    first, again, other = (
        mutation_check._choose(found, mutation_check._parse(["--sample", "9", "--seed", seed])) for seed in "112"
    )
    assert first == again != other and len(first) == 9


def test_a_wrong_decision_is_caught_and_named() -> None:
    """The version that tells a save from an earlier one of the same storage."""
    (one,) = [m for m in mutation_check.find_decisions(ROOT, "offload_engine") if "== tensor._version" in m.replacement]
    outcome = mutation_check.run_tests(one, ROOT)
    assert outcome.verdict == "caught", outcome
    assert outcome.detail.startswith("test_versions.py::"), outcome


def test_a_missing_wait_is_caught_and_named() -> None:
    (mutation,) = [m for m in mutation_check.find_waits(ROOT) if "Rule 5" in m.code]
    outcome = mutation_check.run_tests(mutation, ROOT)
    assert outcome.verdict == "caught", outcome
    assert outcome.detail.startswith("test_copy_order.py::"), outcome


def test_a_program_that_does_not_load_is_an_error_not_a_catch() -> None:
    (mutation,) = [m for m in mutation_check.find_waits(ROOT) if "Rule 5" in m.code]
    assert mutation_check.run_tests(mutation._replace(replacement="pass )"), ROOT).verdict == "error"


def test_list_names_the_places(capsys: pytest.CaptureFixture[str]) -> None:
    assert mutation_check.main(["--list"]) == 0
    assert "_saved/transfers.py:" in capsys.readouterr().out
