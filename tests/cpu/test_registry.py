# SPDX-License-Identifier: Apache-2.0
"""Patch rows: applied all or none, refused twice, removed in reverse order, explicit about what is missing."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from megatron_patches._rows.registry import Applied, Patch, PatchError, apply_patches
from megatron_patches._versions import SUPPORTED, check_supported, checkout, is_in_range

VERSION = "0.17.0"


class Base:
    def inherited(self) -> str:
        return "inherited"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    class Target(Base):
        def method(self) -> str:
            return "method"

        @staticmethod
        def static() -> str:
            return "static"

        @classmethod
        def of_class(cls) -> str:
            return cls.__name__

    fake = types.ModuleType("patched_module")
    fake.__dict__.update(function=lambda: "function", Target=Target)
    monkeypatch.setitem(sys.modules, "patched_module", fake)
    return fake


def shout(original: Callable[..., str]) -> Callable[..., str]:
    return lambda *args: original(*args).upper()


def row(attribute: str, wrapper: Callable[[Any], Any] = shout, why: str = "test", **settings: Any) -> Patch:
    return Patch(target=f"patched_module:{attribute}", wrapper=wrapper, why=why, **settings)


def apply(*rows: Patch) -> Applied:
    return apply_patches(rows, version=VERSION)


def test_functions_and_methods_are_wrapped_and_restored(module: types.ModuleType) -> None:
    before, before_class = dict(vars(module)), dict(vars(module.Target))
    attributes = ["function", "Target.method", "Target.static", "Target.of_class", "Target.inherited"]
    with apply(*[row(attribute) for attribute in attributes]) as applied:
        assert [patch.target.partition(":")[2] for patch in applied.rows] == attributes
        assert module.function() == "FUNCTION"
        target = module.Target()
        called = (target.method(), target.static(), module.Target.static(), target.of_class(), target.inherited())
        assert called == ("METHOD", "STATIC", "STATIC", "TARGET", "INHERITED")
        assert Base().inherited() == "inherited"
    assert dict(vars(module)) == before
    assert dict(vars(module.Target)) == before_class


def test_a_missing_target_names_target_reason_and_version_and_leaves_no_row_behind(module: types.ModuleType) -> None:
    before = dict(vars(module))
    for target in ("patched_module:gone", "patched_module:Gone.method", "no_such_module:f"):
        with pytest.raises(PatchError, match=f"{target}.*{VERSION}.*for: the test needs it"):
            apply(row("function"), Patch(target=target, wrapper=shout, why="the test needs it"))
        assert dict(vars(module)) == before


def test_the_same_row_twice_is_refused_until_removed(module: types.ModuleType) -> None:
    applied = apply(row("function"))
    with pytest.raises(PatchError, match="already in force"):
        apply(row("function", wrapper=lambda original: original))
    for _ in range(2):
        applied.remove()
    apply(row("function")).remove()
    assert module.function() == "function"


def test_rows_on_one_target_stack_and_come_off_in_reverse(module: types.ModuleType) -> None:
    first = apply(row("function"))
    second = apply(row("function", wrapper=lambda original: lambda: original() + "!", why="another"))
    assert module.function() == "FUNCTION!"
    with pytest.raises(PatchError, match="'another' was applied after it"):
        first.remove()
    assert module.function() == "FUNCTION!"
    second.remove()
    assert module.function() == "FUNCTION"
    first.remove()
    assert module.function() == "function"


def test_a_new_name_is_defined_and_deleted_again_and_a_row_for_other_versions_is_skipped(
    module: types.ModuleType,
) -> None:
    with apply(row("added", wrapper=lambda original: (original, 7), is_new=True)):
        assert module.added == (None, 7)
        with pytest.raises(PatchError, match="exists already"):
            apply(row("added", why="another", is_new=True))
    assert not hasattr(module, "added")
    applied = apply(row("function", versions=">=0.18"), row("gone", versions="<0.17"))
    assert applied.rows == () and module.function() == "function"


def test_the_supported_versions() -> None:
    assert is_in_range("0.19.2", SUPPORTED) and is_in_range("0.17.0rc1", SUPPORTED)
    assert check_supported("0.16.1") == "0.16.1"
    for version in ("0.15.3", "0.16.0", "0.21.0", "0.21.0rc0", "1.0"):
        with pytest.raises(RuntimeError, match=f"{version} .*is not supported.*>=0.16.1,<0.21.* pip install"):
            check_supported(version)


def test_errors_tell_where_a_checkout_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    core = pytest.importorskip("megatron.core")
    place = tmp_path / "Megatron-LM/megatron/core"
    monkeypatch.setattr(core, "__path__", [str(place)])
    with pytest.raises(RuntimeError, match=rf"0.99 \(imported from {place}\) is not.*a checkout, which hides"):
        check_supported("0.99")
    with pytest.raises(PatchError, match=rf"gone cannot be found in megatron-core {VERSION} \(imported from {place}\)"):
        apply(row("gone"))
    monkeypatch.setattr(
        metadata, "distribution", lambda name: SimpleNamespace(locate_file=lambda path: tmp_path / "Megatron-LM" / path)
    )
    assert checkout() is None
    monkeypatch.setattr(metadata, "distribution", Mock(side_effect=metadata.PackageNotFoundError))
    assert checkout() == place
