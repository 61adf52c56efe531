# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_patches --check`: the rows fit the installed megatron-core, and what would break is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from megatron.core.pipeline_parallel import schedules
from packaging.version import Version

from megatron_patches._arguments import Settings
from megatron_patches._check import KNOWN_TARGETS, State, accept, check_rows, read_known
from megatron_patches._handle import patch_rows
from megatron_patches._rows.registry import Patch
from megatron_patches._runtime import ModelRuntime
from megatron_patches._versions import installed_version
from offload_engine import OffloadConfig

SCHEDULE = "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining"


def rows() -> list[Patch]:
    return patch_rows(ModelRuntime(Settings(OffloadConfig(), ()), None))


def state_of(target: str, known: Any = None) -> State:
    findings = check_rows(rows(), installed_version(), known or read_known())
    [found] = [each for each in findings if each.row.target == target]
    return found.state


def test_every_row_was_read_against_the_installed_version() -> None:
    findings = check_rows(rows(), installed_version(), read_known())
    assert {each.state for each in findings} <= {State.HOLDS, State.NOT_NEEDED}
    assert {each.row.target for each in findings if not each.row.is_new} <= set(read_known())


def test_what_would_break_is_named_and_ends_the_command_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_patches.__main__ import main

    def another(*, model: Any, num_microbatches: int) -> None: ...

    monkeypatch.setattr(schedules, "forward_backward_no_pipelining", another)
    assert state_of(SCHEDULE) is State.OTHER_ARGUMENTS
    with pytest.raises(SystemExit) as ended:
        main(["--check"])
    first, detail, why, *_, last = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1 and first.split() == ["may", "break:", "other", "arguments", SCHEDULE]
    assert "is now (model, num_microbatches)" in detail and "the order of the chunks" in why
    assert last.endswith(f"1 of {len(rows())} rows break or may break")
    monkeypatch.delattr(schedules, "forward_backward_no_pipelining")
    assert state_of(SCHEDULE) is State.MISSING


def test_other_code_with_the_same_arguments_is_to_be_read() -> None:
    known = {
        target: {f"0.{i}": [code[0], "other"] for i, code in enumerate(codes.values())}
        for target, codes in read_known().items()
    }
    assert state_of(SCHEDULE, known=known) is State.CHANGED


def test_accepted_code_is_kept_by_release(tmp_path: Path) -> None:
    """In a clone the version has the commit, of whatever repository the working directory is in."""
    accept(rows(), f"{Version(installed_version()).public}+0123abc", tmp_path / "known.json")
    versions = {version for codes in read_known(tmp_path / "known.json").values() for version in codes}
    assert versions == {Version(installed_version()).public}
    assert not any("+" in version for codes in read_known().values() for version in codes)


def test_what_is_missing_cannot_be_accepted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from megatron_patches.__main__ import main

    before = KNOWN_TARGETS.read_text()
    monkeypatch.delattr(schedules, "forward_backward_no_pipelining")
    with pytest.raises(SystemExit) as ended:
        main(["--check", "accept"])
    out, error = capsys.readouterr()
    assert ended.value.code == 1 and not out and error.count("\n") == 1
    assert f"--check accept: {SCHEDULE} is missing" in error and "fix that row" in error
    assert KNOWN_TARGETS.read_text() == before
