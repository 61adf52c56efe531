# SPDX-License-Identifier: Apache-2.0
"""Parses and formats sizes of memory: "60GiB", "60G", "512MiB", "1.5 GB", "1048576", "90%", "auto". No torch here."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar

from offload_engine.counted import counted

_Parsed = TypeVar("_Parsed")

_LETTERS = "KMGTP"
# As GNU's coreutils: "G" is GiB, and only "GB" is decimal.
_BINARY = {"B": 1, **{f"{letter}iB": 1 << 10 * power for power, letter in enumerate(_LETTERS, 1)}}
_DECIMAL = {f"{letter}B": 1000**power for power, letter in enumerate(_LETTERS, 1)}
_SHORT = {letter: _BINARY[f"{letter}iB"] for letter in _LETTERS}
_UNITS = {unit.lower(): nbytes for unit, nbytes in {**_BINARY, **_DECIMAL, **_SHORT}.items()}
_NUMBER = re.compile(r"(-?)(\d+(?:\.\d+)?|\.\d+)\s*([a-z]*|%)", re.IGNORECASE | re.ASCII)
_LEAST_MARGIN_SHARE = 64
_AUTO = "auto"
_SHARES = ", a share (90%), or auto"


def least_margin_bytes(total_bytes: int) -> int:
    """Return what "auto" leaves of a GPU at the least, a 64th: communicators, libraries and checkpoints allocate later.

    The first step with a decision may also hold some hundred MiB more than later ones.
    """
    return total_bytes // _LEAST_MARGIN_SHARE


class Size(NamedTuple):
    """A size that may depend on the total memory: bytes, a share of it, or, without either, all but a margin.

    `str()` gives a text that `parse_size` reads as the same size.
    """

    nbytes: int | None = None
    percent: Decimal | None = None
    """Above 0, at most 100."""

    def resolve(self, total_bytes: int, margin_bytes: int = 0) -> int:
        """Return the bytes of this size, of a total of `total_bytes`, of which "auto" leaves `margin_bytes`.

        A size in bytes is returned unchanged, even above the total. A share is rounded down.
        """
        if self.nbytes is not None:
            return self.nbytes
        if self.percent is not None:
            return int(Fraction(self.percent) * total_bytes / 100)
        return max(0, total_bytes - margin_bytes)

    def __str__(self) -> str:
        if self.nbytes is not None:
            return _exact(self.nbytes)
        return _AUTO if self.percent is None else f"{self.percent:f}%"


def parse_size(text: str) -> Size:
    """Parse a size in bytes, a share or "auto".

    Raises:
        ValueError: for anything else, a negative size, and a share that is not above 0% and at most 100%.
    """
    if text.strip().lower() == _AUTO:
        return Size()
    number, unit = _split(text, "B", _SHARES)
    return Size(percent=_percent(text, number)) if unit == "%" else Size(_whole(text, number, unit))


def parse_bytes(text: str, unit: str = "B") -> int:
    """Parse a size in bytes; a fraction of a byte is truncated.

    Args:
        text: a whole number, or a number with a unit.
        unit: of a number without one.

    Raises:
        ValueError: for anything else, a negative size, a share and "auto".
    """
    if text.strip().lower() == _AUTO or text.strip().endswith("%"):
        raise ValueError(
            f"{text!r} is not a number of bytes, and only gpu_budget may be a share or auto: {_accepted(unit)}"
        )
    return _whole(text, *_split(text, unit))


def size_setting(name: str, value: Any, parse: Callable[[str], _Parsed]) -> _Parsed | int | None:
    """Return the value of a setting that is a size: bytes unchanged, text as `parse` reads it, None if it is not set.

    Raises:
        ValueError: if it is not a size; names the setting.
    """
    if isinstance(value, str):
        try:
            return parse(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number of bytes or a text such as '60GiB', got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must not be negative, got {value:,}")
    return value


def bytes_flag(unit: str = "B") -> Callable[[str], int]:
    """Return the `type` of an argparse flag that takes a size in bytes, as `parse_bytes`."""

    def parse(text: str) -> int:
        try:
            return parse_bytes(text, unit)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def format_bytes(nbytes: int) -> str:
    """Return a readable size, in GiB with two digits; `str(Size(nbytes))` is exact."""
    return f"{nbytes / _BINARY['GiB']:,.2f} GiB"


def short_size(nbytes: int) -> str:
    """Return a readable size, in the largest binary unit that it reaches: "12.40 GiB", "383 MiB", "12 KiB"."""
    return _in_unit(nbytes, 2 if nbytes >= _BINARY["GiB"] else 0)


def fine_size(nbytes: int) -> str:
    """Return a size in that unit with two digits, so that it differs from a similar one: "2.52 MiB", "2.49 MiB"."""
    return _in_unit(nbytes, 2)


def _in_unit(nbytes: int, num_digits: int) -> str:
    unit = next((unit for unit in ("GiB", "MiB", "KiB") if nbytes >= _BINARY[unit]), None)
    return counted(nbytes, "byte") if unit is None else f"{nbytes / _BINARY[unit]:,.{num_digits}f} {unit}"


def _split(text: str, default_unit: str, also: str = "") -> tuple[Decimal, str]:
    """Return the number and the unit of a size, in lower case."""
    found = _NUMBER.fullmatch(text.strip().replace("_", ""))
    units = {*_UNITS, "%"} if also else {*_UNITS}
    if found is None or (unit := (found[3] or default_unit).lower()) not in units:
        raise ValueError(f"{text!r} is not a size: {_accepted(default_unit, also)}")
    if found[1]:
        raise ValueError(f"{text!r} is negative: {_accepted(default_unit, also)}")
    return Decimal(found[2]), unit


def _whole(text: str, number: Decimal, unit: str) -> int:
    if unit == "b" and number != int(number):
        raise ValueError(f"{text!r} is not a whole number of bytes: {_accepted('B')}")
    return int(Fraction(number) * _UNITS[unit])


def _percent(text: str, number: Decimal) -> Decimal:
    if not 0 < number <= 100:
        raise ValueError(f"{text!r} is not a share: give more than 0% and at most 100%")
    return number


def _accepted(unit: str, also: str = "") -> str:
    plain = "bytes (1048576)" if unit == "B" else f"{unit} (2)"
    return f"give a number of {plain}, or one with a unit (512MiB, 60GiB, 60G, 1.5 GB){also}"


def _exact(nbytes: int) -> str:
    """Return the largest binary unit of which `nbytes` is a whole number, as "60GiB"."""
    unit = next((unit for unit, size in reversed(_BINARY.items()) if nbytes and nbytes % size == 0), "B")
    return f"{nbytes // _BINARY[unit]}{unit}"
