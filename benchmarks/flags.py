# SPDX-License-Identifier: Apache-2.0
"""Flags that several benchmarks have, parsed before torch is imported, or without it, so that mistakes are cheap.

`offload_engine.sizes` is loaded from its file, because the package around it imports torch.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
_SOURCE = Path(__file__).resolve().parents[1] / "offload_engine" / "sizes.py"


def bytes_flag(unit: str = "B") -> Callable[[str], int]:
    """Return `offload_engine.sizes.bytes_flag(unit)`."""
    spec = importlib.util.spec_from_file_location("sizes", _SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    flag: Callable[[str], int] = module.bytes_flag(unit)
    return flag


def add_engine_flag(parser: argparse.ArgumentParser) -> None:
    """Add --engine, whose values `engine_settings` reads."""
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="setting of ours, see OffloadConfig.from_flags",
    )


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return what --engine says.

    Raises:
        ValueError: if one is not NAME=VALUE.
    """
    return dict(assignment(text) for text in args.engine)


def settings_of(kind: type[T], args: argparse.Namespace, **changes: Any) -> T:
    """Make a dataclass whose fields are the flags of the same names, except for `changes`."""
    names = [field.name for field in dataclasses.fields(kind) if field.name not in changes]  # type: ignore[arg-type]
    return kind(**{name: getattr(args, name) for name in names}, **changes)


def words(text: str) -> tuple[str, ...]:
    """Split a list on the command line into words, separated by commas or spaces."""
    return tuple(word for word in text.replace(",", " ").split())


def assignment(text: str) -> tuple[str, Any]:
    """Parse a field of `OffloadConfig` as the command line gives it.

    Raises:
        ValueError: if it is not NAME=VALUE.
    """
    name, separator, value = text.partition("=")
    if not (name and separator and value):
        raise ValueError(f"{text!r} is not NAME=VALUE: an argument of OffloadConfig.from_flags and its value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
