# SPDX-License-Identifier: Apache-2.0
"""Every function that keeps inputs to recompute from brackets what it saves, where that is asked for."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core")

from megatron_patches._rows.recompute import recompute_rows  # noqa: E402
from megatron_patches._rows.registry import Patch, apply_patches  # noqa: E402
from megatron_patches._versions import installed_version, is_in_range  # noqa: E402

ROWS = [row for row in recompute_rows(SimpleNamespace()) if row.target.endswith((":checkpoint", ":te_checkpoint"))]


class Bracket:
    """Notes its entries and exits."""

    def __init__(self, is_active: bool) -> None:
        self.is_active = is_active
        self.seen: list[Any] = []

    def enter(self) -> bool:
        self.seen.append("enter")
        return self.is_active

    def commit(self, output: Any) -> Any:
        self.seen.append(output)
        return f"marked {output}"

    def abandon(self) -> None:
        self.seen.append("abandon")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.target)
def test_its_call_is_bracketed_and_left_after_an_exception(row: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, name = row.target.partition(":")
    if not is_in_range(installed_version(), row.versions):
        with pytest.raises(ImportError):
            importlib.import_module(module)
        pytest.skip(f"megatron-core {installed_version()} has no such function; needed is {row.versions}")
    owner, runner = importlib.import_module(module), SimpleNamespace()
    monkeypatch.setattr(owner, name, lambda x: f"1 / {x} = {1 // x}")
    active, passive = Bracket(True), Bracket(False)
    with apply_patches([r for r in recompute_rows(runner) if r.target == row.target]):
        for bracket, expected in ((active, "marked 1 / 1 = 1"), (passive, "1 / 1 = 1"), (None, "1 / 1 = 1")):
            runner.checkpoint_bracket = lambda _, bracket=bracket: bracket
            assert getattr(owner, name)(1) == expected
        runner.checkpoint_bracket = lambda _: active
        with pytest.raises(ZeroDivisionError):
            getattr(owner, name)(0)
    assert (active.seen, passive.seen) == (["enter", "1 / 1 = 1", "enter", "abandon"], ["enter"])


def test_without_transformer_engine_its_function_stays_none(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = importlib.import_module("megatron.core.transformer.transformer_block")
    monkeypatch.setattr(owner, "te_checkpoint", None)
    with apply_patches(recompute_rows(SimpleNamespace())):
        assert owner.te_checkpoint is None
