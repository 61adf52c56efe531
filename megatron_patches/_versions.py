# SPDX-License-Identifier: Apache-2.0
"""Finds the installed megatron-core version, and checks it against the supported range."""

from __future__ import annotations

import functools
from importlib import metadata
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED = ">=0.16.1,<0.21"
"""megatron-core versions that the patches were written for.

The tests run on 0.16.1 and 0.19.2. Of 0.20 no release exists: a checkout of main was tested (docs/compatibility.md).
"""

_DISTRIBUTION = "megatron-core"


def installed_version() -> str:
    """Return the version of the megatron-core that `import megatron.core` finds (a wheel or a source tree).

    Raises:
        RuntimeError: if megatron-core cannot be imported.
    """
    try:
        from megatron.core.package_info import __version__
    except ImportError as error:
        raise RuntimeError(
            f"megatron-core cannot be imported ({error}). Install it: pip install 'megatron-core{SUPPORTED}'"
        ) from error
    return str(__version__)


@functools.cache  # some rows are applied around each forward of the experts
def is_in_range(version: str, specifiers: str) -> bool:
    """Return whether a version lies in a range such as ">=0.16.1,<0.21"; a release candidate counts as its release."""
    return SpecifierSet(specifiers).contains(Version(version).base_version)


def checkout() -> Path | None:
    """Return the directory that megatron.core is imported from, if it is not where pip installed it; else None.

    A checkout of Megatron-LM in the working directory or on PYTHONPATH hides the installed package.
    """
    try:
        import megatron.core
    except ImportError:
        return None
    imported = Path(next(iter(megatron.core.__path__))).resolve()
    try:
        installed = Path(str(metadata.distribution(_DISTRIBUTION).locate_file("megatron/core"))).resolve()
    except metadata.PackageNotFoundError:
        return imported
    return None if imported == installed else imported


def described(version: str) -> str:
    """Return a version of megatron-core in words, with the place of a checkout."""
    place = checkout()
    return f"megatron-core {version}" if place is None else f"megatron-core {version} (imported from {place})"


def check_supported(version: str | None = None) -> str:
    """Return the installed version (or the given one) if it is supported.

    Raises:
        RuntimeError: if it is not; names the version, the supported range, and what to do.
    """
    version = installed_version() if version is None else version
    if not is_in_range(version, SUPPORTED):
        raise RuntimeError(
            f"{described(version)} is not supported: the patches are for {SUPPORTED} and were tested with 0.16.1, "
            f"0.19.2 and main of August 2026 (0.20.0). {_advice()}"
        )
    return version


def _advice() -> str:
    if checkout() is None:
        return f"Install a supported version: pip install '{_DISTRIBUTION}{SUPPORTED}'"
    return (
        "That is a checkout, which hides an installed package: check out a supported release there, such as "
        "git checkout core_v0.19.0, or take it off PYTHONPATH and run in another directory"
    )
