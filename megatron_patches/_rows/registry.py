# SPDX-License-Identifier: Apache-2.0
"""Applies patches that are rows of a table: what is replaced, by what, why, and in which versions of megatron-core.

Nothing is patched at import. `apply_patches` installs rows, all or none; `Applied.remove` restores all targets.
Independent of offloading.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_patches._versions import SUPPORTED, described, installed_version, is_in_range

logger = logging.getLogger(__name__)

# The book of rows in force is an attribute of the patched module or class, so it lives exactly as long as the target,
# and this module needs no global state.
_BOOK = "_megatron_patches_in_force"


class PatchError(RuntimeError):
    """Raised if a row cannot be applied or removed; names target, reason and installed version."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One replaced attribute. Two rows with the same target and reason are the same row."""

    target: str
    """"package.module:attribute" or "package.module:Class.attribute"."""

    wrapper: Callable[[Any], Any]
    """Takes the original attribute (of a static or class method the plain function) and returns its replacement."""

    why: str
    """What goes wrong without this row."""

    versions: str = SUPPORTED
    """megatron-core versions that need the row; it is skipped with any other version."""

    is_new: bool = False
    """The target does not exist and this row defines it: `wrapper` is called with None."""

    def __post_init__(self) -> None:
        module, separator, attribute = self.target.partition(":")
        if not (module and separator and attribute):
            raise ValueError(f"a patch target must read 'package.module:attribute', got {self.target!r}")
        if not self.why:
            raise ValueError(f"{self.target}: a patch needs a reason")

    def __str__(self) -> str:
        return f"{self.target} ({self.why})"


class Applied:
    """Owns the rows that one call of `apply_patches` installed. As a context manager it removes them on exit."""

    def __init__(self) -> None:
        self._installed: list[_Installed] = []

    @property
    def rows(self) -> tuple[Patch, ...]:
        """Return the rows in force, in the order they were applied, without rows skipped by version."""
        return tuple(installed.row for installed in self._installed)

    def remove(self) -> None:
        """Restore every target, in reverse order. Idempotent.

        Raises:
            PatchError: see `check_uncovered`; all rows stay in force.
        """
        self.check_uncovered()
        while self._installed:
            self._installed[-1].restore()
            self._installed.pop()

    def check_uncovered(self) -> None:
        """Check that no other patch lies on top of these.

        Raises:
            PatchError: if a row applied later to one of the targets is still in force.
        """
        own = {_key(row) for row in self.rows}
        for installed in self._installed:
            installed.check_uncovered(own)

    def _add(self, installed: _Installed) -> None:
        self._installed.append(installed)

    def __enter__(self) -> Applied:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"Applied({len(self._installed)} rows)"


def apply_patches(rows: Sequence[Patch], *, version: str | None = None) -> Applied:
    """Apply the rows in order, except those for other versions; on an error remove all of them.

    Args:
        rows: rows of the table.
        version: version of megatron-core; None: the installed one.

    Raises:
        PatchError: if a target is missing (or, with `is_new`, exists), or a row is already in force.
    """
    version = installed_version() if version is None else version
    applied = Applied()
    try:
        for row in rows:
            if is_in_range(version, row.versions):
                applied._add(_install(row, version))
            else:
                logger.debug("not needed with megatron-core %s: %s", version, row)
    except BaseException:
        applied.remove()
        raise
    return applied


class _Installed:
    """One row in force, with the owner of its target and the original attribute."""

    def __init__(self, row: Patch, owner: Any, name: str, before: Any, is_own: bool) -> None:
        self.row = row
        self._owner = owner
        self._name = name
        self._before = before
        self._is_own = is_own  # False: the owner inherited the attribute or had none

    @property
    def _in_force(self) -> tuple[tuple[str, str], ...]:
        return _book(self._owner).get(self._name, ())

    def check_uncovered(self, own: Collection[tuple[str, str]]) -> None:
        in_force, key = self._in_force, _key(self.row)
        above = in_force[in_force.index(key) :] if key in in_force else [(key[0], "something unknown")]
        if later := [other for other in above if other not in own]:
            raise PatchError(
                f"cannot remove {self.row}: the patch for '{later[-1][1]}' was applied after it. Remove that one first."
            )

    def restore(self) -> None:
        if self._is_own:
            setattr(self._owner, self._name, self._before)
        else:
            delattr(self._owner, self._name)
        _write_book(self._owner, self._name, self._in_force[:-1])


def _install(row: Patch, version: str) -> _Installed:
    owner, name = locate(row, version)
    in_force = _book(owner).get(name, ())
    if _key(row) in in_force:
        raise PatchError(f"already in force: {row}. Remove it before applying it again.")
    if fact := misfit(row, owner, name):
        raise PatchError(f"{row.target} {fact} in {described(version)}; the patch is for: {row.why}")
    is_own = name in vars(owner)
    before = vars(owner)[name] if is_own else None
    setattr(owner, name, _replacement(row, owner, name, before))
    _write_book(owner, name, (*in_force, _key(row)))
    return _Installed(row, owner, name, before, is_own)


def _replacement(row: Patch, owner: Any, name: str, before: Any) -> Any:
    if row.is_new:
        return row.wrapper(None)
    if isinstance(before, (staticmethod, classmethod)):
        return type(before)(row.wrapper(before.__func__))
    return row.wrapper(getattr(owner, name))


def locate(row: Patch, version: str) -> tuple[Any, str]:
    """Return the module or class that holds the target, and the attribute's name."""
    module, _, path = row.target.partition(":")
    *outer, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for part in outer:
            owner = getattr(owner, part)
    except (ImportError, AttributeError) as error:
        raise PatchError(
            f"{row.target} cannot be found in {described(version)} ({error}); the patch is for: {row.why}"
        ) from error
    return owner, name


def misfit(row: Patch, owner: Any, name: str) -> str | None:
    """Return what is wrong with the attribute that a row is for, as a predicate; None: nothing.

    Args:
        row: of the table.
        owner: see `locate`.
        name: of the attribute.
    """
    if row.is_new == hasattr(owner, name):
        return "exists already" if row.is_new else "does not exist"
    return None


def _key(row: Patch) -> tuple[str, str]:
    return row.target, row.why


def _book(owner: Any) -> dict[str, tuple[tuple[str, str], ...]]:
    # vars(): a subclass must not see the book of its base
    return vars(owner).get(_BOOK, {})


def _write_book(owner: Any, name: str, in_force: tuple[tuple[str, str], ...]) -> None:
    book = {**_book(owner), name: in_force}
    book = {target: keys for target, keys in book.items() if keys}
    if book:
        setattr(owner, _BOOK, book)
    elif _BOOK in vars(owner):
        delattr(owner, _BOOK)
