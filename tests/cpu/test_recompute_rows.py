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

    def leave_with(self, output: Any) -> Any:
        self.seen.append(output)
        return f"marked {output}"

    def leave(self) -> None:
        self.seen.append("leave")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.target)
def test_its_call_is_bracketed(row: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, name = row.target.partition(":")
    if not is_in_range(installed_version(), row.versions):
        with pytest.raises(ImportError):
            importlib.import_module(module)
        pytest.skip(f"megatron-core {installed_version()} has no such function; needed is {row.versions}")
    owner = importlib.import_module(module)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: f"output of {args} {kwargs}")
    active, passive, runner = Bracket(True), Bracket(False), SimpleNamespace()
    with apply_patches([r for r in recompute_rows(runner) if r.target == row.target]):
        call = getattr(owner, name)
        for bracket, expected in (
            (active, "marked output of (1, 2) {'a': 3}"),
            (passive, "output of (1, 2) {'a': 3}"),
            (None, "output of (1, 2) {'a': 3}"),
        ):
            runner.checkpoint_bracket = lambda _, bracket=bracket: bracket
            assert call(1, 2, a=3) == expected
    assert (active.seen, passive.seen) == (["enter", "output of (1, 2) {'a': 3}"], ["enter"])


def test_it_is_left_after_an_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("in the layer")

    owner = importlib.import_module("megatron.core.tensor_parallel")
    monkeypatch.setattr(owner, "checkpoint", fail)
    bracket = Bracket(True)
    with apply_patches(recompute_rows(SimpleNamespace(checkpoint_bracket=lambda _: bracket))):
        with pytest.raises(ValueError, match="in the layer"):
            owner.checkpoint()
    assert bracket.seen == ["enter", "leave"]


def test_without_transformer_engine_its_function_stays_none(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = importlib.import_module("megatron.core.transformer.transformer_block")
    monkeypatch.setattr(owner, "te_checkpoint", None)
    with apply_patches(recompute_rows(SimpleNamespace())):
        assert owner.te_checkpoint is None
