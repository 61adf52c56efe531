# SPDX-License-Identifier: Apache-2.0
"""Parses least sizes of storages that move: one for all names, and some for single names, as "1MiB,moe_act=350MB"."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

from megatron_patches._model.modules import drop_parts, row_of
from offload_engine.sizes import parse_bytes, size_setting

SETTING = "offload_min_tensor_bytes"


class Thresholds(NamedTuple):
    """Storages smaller than these stay on the device."""

    of_all: int | None = None
    """Bytes for names without their own threshold; None: the default."""

    by_name: tuple[tuple[str, int], ...] = ()
    """Names of the table, each with bytes."""

    def least_bytes(self, default: int) -> int:
        """Return the least of all, below which nothing moves."""
        return min([default if self.of_all is None else self.of_all, *(nbytes for _, nbytes in self.by_name)])

    def with_default(self, default: int) -> Thresholds:
        """Return these thresholds for groups; empty if no name has its own, because the engine's setting is enough."""
        if not self.by_name:
            return Thresholds()
        return self._replace(of_all=default if self.of_all is None else self.of_all)

    def check(self, names: Sequence[str]) -> None:
        """Check that each name with its own bytes has groups.

        Args:
            names: names that are offloaded; empty: not known yet.

        Raises:
            ValueError: if one has none.
        """
        groups, _ = drop_parts(names)
        for name, nbytes in self.by_name if groups else ():
            if name not in groups:
                raise ValueError(
                    f"{SETTING} has {name}={nbytes:,}, but {name!r} has no group of its own here: name "
                    f"one of {', '.join(groups)}"
                )

    def of_groups(self) -> dict[str, int]:
        """Return `GroupTraits.min_bytes` by name; "" stands for names that are not listed. Empty: 0 for all."""
        return {} if self.of_all is None else {"": self.of_all, **dict(self.by_name)}


def thresholds_of(source: Any) -> Thresholds:
    """Return the thresholds of a configuration or of parsed flags.

    Raises:
        ValueError: if the value is neither a size nor such a list, or has an unknown name; names the setting.
    """
    value = size_setting(SETTING, getattr(source, SETTING, None), parse_thresholds)
    return value if isinstance(value, Thresholds) else Thresholds(value)


def parse_thresholds(text: str) -> Thresholds:
    """Parse "SIZE", "NAME=SIZE", or several of these with commas between them.

    Raises:
        ValueError: for anything else, a name that is unknown or comes twice, and a second size without a name.
    """
    of_all: int | None = None
    by_name: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.rpartition("=")
        nbytes = parse_bytes(size)
        key = row_of(name.strip()).name if equals else ""
        if key in by_name or (not equals and of_all is not None):
            raise ValueError(f"{text!r} has two sizes for {key or 'all names'}: omit one")
        if equals:
            by_name[key] = nbytes
        else:
            of_all = nbytes
    return Thresholds(of_all, tuple(by_name.items()))


def thresholds_flag(text: str) -> int | str:
    """Check the value of the flag, for argparse; return a number for one size of all names, otherwise the text."""
    try:
        parsed = parse_thresholds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text if parsed.by_name or parsed.of_all is None else parsed.of_all
