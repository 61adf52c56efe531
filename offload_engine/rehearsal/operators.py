# SPDX-License-Identifier: Apache-2.0
"""Reads from the schema of a torch operator what it does to its arguments."""

from __future__ import annotations

import enum
from typing import Any, Final, NamedTuple

_ALIASES_UNSAID: Final = ("_unsafe_view", "_reshape_alias", "lift_fresh", "resize_", "set_")


class Kind(enum.Enum):
    """What an operator does."""

    VIEW = enum.auto()
    """Touches no contents, or returns no tensor."""
    WRITE = enum.auto()
    """Writes to an argument."""
    MAKE = enum.auto()
    """Returns new tensors."""
    COMMUNICATE = enum.auto()
    """Communicates with other ranks."""


VIEW: Final = Kind.VIEW
WRITE: Final = Kind.WRITE
COMMUNICATE: Final = Kind.COMMUNICATE


class Operator(NamedTuple):
    """An operator of torch."""

    func: Any
    name: str
    """Without its overload."""
    kind: Kind
    names: tuple[str, ...]
    """Names of its arguments, in order."""
    written: tuple[str, ...]
    """Names of the arguments that it writes to."""
    num_returns: int
    takes_device: bool


def operator_of(func: Any) -> Operator:
    """Return what the schema of an operator says."""
    schema = func._schema
    name = func._overloadpacket.__name__
    names = tuple(argument.name for argument in schema.arguments)
    written = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    returned = [value.alias_info for value in schema.returns]
    if func.namespace == "c10d":
        kind = Kind.COMMUNICATE
    elif name in _ALIASES_UNSAID or not any("Tensor" in str(value.type) for value in schema.returns) and not written:
        kind = Kind.VIEW
    elif any(alias is not None and not alias.is_write for alias in returned):
        kind = Kind.VIEW
    else:
        kind = Kind.WRITE if written else Kind.MAKE
    return Operator(func, name, kind, names, written, len(returned), "device" in names)
