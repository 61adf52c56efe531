# SPDX-License-Identifier: Apache-2.0
"""Flags of the benchmarks, parsed before torch is imported, or without it, so that mistakes are cheap."""

from __future__ import annotations

import argparse
import ast
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def positive(text: str) -> int:
    """Parse a number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return int(text)


def new_parser(name: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """Make the parser of a benchmark."""
    layout = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"benchmarks/run.py {name}", None, description, epilog, formatter_class=layout)


def add_flags(parser: argparse._ActionsContainer, *flags: tuple[str, Any, Any, str]) -> None:
    """Add flags, each by its name or names, type (of bool it is a switch), default and help."""
    for names, kind, default, text in flags:
        if kind is bool:
            parser.add_argument(*names.split(), action="store_true", help=text)
            continue
        stated = ",".join(default) if isinstance(default, tuple) else default
        shown = "" if default is None else f" (default {stated})"
        metavar = {int: "N", positive: "N", float: "X", words: "A,B", str: "A,B"}.get(kind, "FILE")
        parser.add_argument(*names.split(), type=kind, default=default, metavar=metavar, help=f"{text}{shown}")


def refuse(parser: argparse.ArgumentParser, mistakes: Mapping[str, Any]) -> None:
    """End the process with the first text whose value is true."""
    for text, is_mistake in mistakes.items():
        if is_mistake:
            parser.error(text)


def output_file(text: str) -> Path:
    """Parse an output file, and check it now rather than at the end of a run, when it is written."""
    if not Path(text).parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {Path(text).parent}")
    return Path(text)


def input_file(text: str) -> Path:
    """Parse a file that is there."""
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return Path(text)


def words(text: str) -> tuple[str, ...]:
    """Split a list on the command line into words, separated by commas or spaces."""
    return tuple(text.replace(",", " ").split())


def assignment(text: str) -> tuple[str, Any]:
    """Parse a field of `OffloadConfig` as the command line gives it."""
    name, separator, value = text.partition("=")
    if not (name and separator and value):
        raise ValueError(f"{text!r} is not NAME=VALUE: an argument of OffloadConfig.from_flags and its value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def set_defaults(environment: Mapping[str, str]) -> None:
    """Set variables that are not set yet; call it before anything reads them."""
    for name, value in environment.items():
        os.environ.setdefault(name, value)
