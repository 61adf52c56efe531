# SPDX-License-Identifier: Apache-2.0
"""The installed megatron-core version and the supported range."""

from __future__ import annotations

import functools

from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED = ">=0.16.1,<0.20"
"""megatron-core versions that the patches were written for; the tests run on 0.16.1 and 0.19.2."""


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
    """Return whether a version lies in a range such as ">=0.16.1,<0.20"; release candidates in the range count."""
    return SpecifierSet(specifiers).contains(Version(version), prereleases=True)


def check_supported(version: str | None = None) -> str:
    """Return the installed version (or the given one) if it is supported.

    Raises:
        RuntimeError: if it is not; names the version and the supported range.
    """
    version = installed_version() if version is None else version
    if not is_in_range(version, SUPPORTED):
        raise RuntimeError(
            f"megatron-core {version} is not supported: the patches are for {SUPPORTED} and were tested with 0.16.1 "
            f"and 0.19.2. Install a supported version: pip install 'megatron-core{SUPPORTED}'. A checkout of "
            "Megatron-LM hides the installed one: there, git checkout core_v0.19.0"
        )
    return version
