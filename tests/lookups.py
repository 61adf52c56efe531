# SPDX-License-Identifier: Apache-2.0
"""What tests look up and cannot do without: a value that may be None, a module that may be missing."""

from __future__ import annotations

from typing import Any, TypeVar

import pytest

T = TypeVar("T")


def present(value: T | None) -> T:
    """Return `value`, such as a gradient; fail if there is none."""
    assert value is not None
    return value


def import_or_skip(name: str) -> Any:
    """Import a module of TransformerEngine; skip the test if that fails, for whatever reason."""
    return pytest.importorskip(name, exc_type=Exception)  # type: ignore[arg-type]
