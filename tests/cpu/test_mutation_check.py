# SPDX-License-Identifier: Apache-2.0
"""tools/mutation_check.py: it finds the waits and decisions of the engine, and a change of one is caught."""

from __future__ import annotations

import ast
import re
import shutil
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.tool_scripts import load_tool

pytest.importorskip("rich")
pytest.importorskip("tqdm")
ROOT = Path(__file__).parents[2]


mutation_check = load_tool("mutation_check")
mutations = load_tool("mutations")
tested_lines = load_tool("tested_lines")


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


def test_mutations_are_programs_that_differ() -> None:
    found = mutation_check.find_mutations(ROOT)
    sources = {path: (ROOT / path).read_text() for path in {mutation.path for mutation in found}}
    dumps = {path: ast.dump(ast.parse(source)) for path, source in sources.items()}
    for mutation in found:
        assert ast.dump(ast.parse(mutation.apply(sources[mutation.path]))) != dumps[mutation.path], mutation
    assert len({mutation[:5] for mutation in found}) == len(found)


def test_every_file_of_decisions_has_some() -> None:
    found = {mutation.path for mutation in mutation_check.find_decisions(ROOT, "offload_engine")}
    assert found == {Path("offload_engine") / name for name in mutations.FILES}


def test_files_that_are_left_out_exist() -> None:
    assert all((ROOT / f"tests/cpu/test_{name}.py").exists() for name in tested_lines.NOT_FOR_MUTANTS)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs sys.monitoring")
def test_a_record_tells_which_tests_run_a_line_and_is_kept_up_to_date(tmp_path: Path) -> None:
    root, record = tmp_path / "root", tmp_path / "record"
    (root / "package").mkdir(parents=True)
    (root / "tests/cpu").mkdir(parents=True)
    (root / "package" / "__init__.py").write_text("def one():\n    return 1\n\n\ndef two():\n    return 2\n")
    of_one, of_two = root / "tests/cpu/test_one.py", root / "tests/cpu/test_two.py"
    of_one.write_text("from package import one, two\n\n\ndef test():\n    one()\n\n\ndef test_fails():\n    1 / 0\n")
    of_two.write_text("from package import one, two\n\n\ndef test_both():\n    one()\n    two()\n")
    found = tested_lines.bring_up_to_date(record, root, "package")
    assert set(found.of("package/__init__.py", 2, 2)) == {
        "tests/cpu/test_one.py::test",
        "tests/cpu/test_two.py::test_both",
    }
    assert found.of("package/__init__.py", 5, 6) == ["tests/cpu/test_two.py::test_both"]
    assert tested_lines.load(record) == found
    of_one.write_text("from package import two\n\n\ndef test_new():\n    two()\n")
    found = tested_lines.bring_up_to_date(record, root, "package")
    assert found.of("package/__init__.py", 2, 2) == ["tests/cpu/test_two.py::test_both"]
    assert set(found.seconds) == {"tests/cpu/test_one.py::test_new", "tests/cpu/test_two.py::test_both"}


def check(changed: Any, *tests: str) -> Any:
    """Return the outcome of a mutation with these tests, by node ID below tests/cpu."""
    ids = [f"tests/cpu/{test}" for test in tests]
    lines = mutation_check.TestedLines(dict.fromkeys(ids, 1.0), {(str(changed.path), changed.line): set(ids)}, {}, "")
    ((_, outcome),) = mutation_check.Check(ROOT, lines).run([(0, changed)], 1)
    return outcome


VERSIONS = "test_versions.py::test_a_storage_written_after_a_group_has_saved_it_is_saved_anew[None]"
RULE_5 = "test_copy_order.py::test_rule_5_every_stream_that_reads_waits[seed=None]"
OTHER = "test_copy_order.py::test_rule_3_copy_out_without_a_wait[seed=None]"


def wrong_version() -> Any:
    """Return the mutation of the version that tells a save from an earlier one of the same storage."""
    (one,) = [m for m in mutation_check.find_decisions(ROOT, "offload_engine") if "== found[4]" in m.replacement]
    return one


def no_rule_5() -> Any:
    (one,) = [m for m in mutation_check.find_waits(ROOT) if "copied_in)  # Rule 5" in m.code]
    return one


def test_a_wrong_decision_is_caught_and_the_test_named() -> None:
    assert check(wrong_version(), OTHER, VERSIONS)[:2] == ("caught", f"tests/cpu/{VERSIONS}")


def test_a_missing_wait_is_caught_and_the_test_named() -> None:
    assert check(no_rule_5(), OTHER, RULE_5)[:2] == ("caught", f"tests/cpu/{RULE_5}")


def test_what_no_test_misses_survives() -> None:
    assert check(no_rule_5(), OTHER).verdict == "survived"


def test_a_program_that_does_not_load_is_an_error_not_a_catch() -> None:
    assert check(no_rule_5()._replace(replacement="pass )"), RULE_5).verdict == "error"


def test_tests_of_another_tree_than_the_changed_one_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an installed package that comes before the copy would be."""
    copy = mutation_check._copy

    def copy_beside(root: Path, target: Path) -> Path:
        copy(root, target)
        shutil.copytree(target / "offload_engine", target / "tests" / "offload_engine")
        imports = (
            "import sys; sys.path.insert(0, str(__import__('pathlib').Path(__file__).parent)); import offload_engine\n"
        )
        (target / "tests" / "__init__.py").write_text(imports)
        return target

    monkeypatch.setattr(mutation_check, "_copy", copy_beside)
    outcome = check(no_rule_5(), OTHER)
    assert outcome.verdict == "error" and "another offload_engine was tested" in outcome.detail


def test_a_test_that_fails_without_a_mutation_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = mutation_check._copy

    def copy_with_a_failing_test(root: Path, target: Path) -> Path:
        copy(root, target)
        (target / "tests/cpu/test_failing.py").write_text("def test(): raise OSError\n")
        return target

    monkeypatch.setattr(mutation_check, "_copy", copy_with_a_failing_test)
    changed, failing = no_rule_5(), "tests/cpu/test_failing.py::test"
    ids = [failing, f"tests/cpu/{OTHER}"]
    lines = mutation_check.TestedLines(dict.fromkeys(ids, 1.0), {(str(changed.path), changed.line): set(ids)}, {}, "")
    check = mutation_check.Check(ROOT, lines)
    assert check.leave_out_failing([(0, changed)], 1) == {failing}
    assert [outcome.verdict for _, outcome in check.run([(0, changed)], 1)] == ["survived"]


def test_a_run_is_resumed_from_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = {0: mutation_check.Outcome("caught", "a test", 1.0), 1: mutation_check.Outcome("survived", "", 1.0)}
    options = mutation_check._parse(["--results", str(tmp_path / "results"), "--jobs", "1"])
    chosen = list(enumerate(mutation_check.find_waits(ROOT)))[:3]
    run = mock.Mock(side_effect=lambda items, *_: iter([((i, one), outcomes[i]) for i, one in items if i in outcomes]))
    monkeypatch.setattr(mutation_check.Check, "run", run)
    check = mutation_check.Check(ROOT, mutation_check.TestedLines({}, {}, {}, ""))
    assert mutation_check.check_all(check, chosen, options) == outcomes
    assert mutation_check._read(options.results, chosen) == outcomes
    other = [(0, chosen[0][1]._replace(line=7))]
    assert mutation_check._read(options.results, other) == {}
