"""Which megatron-core is installed, and which ones this package knows."""

from __future__ import annotations

from packaging.specifiers import SpecifierSet
from packaging.version import Version

SUPPORTED = ">=0.16.1,<0.20"
"""megatron-core versions that the patches were written for; the tests run on 0.16.1 and 0.19.2."""


def installed_version() -> str:
    """Version of the megatron-core that `import megatron.core` finds (a wheel or a source tree on the path).

    Raises:
        RuntimeError: if there is none.
    """
    try:
        from megatron.core.package_info import __version__
    except ImportError as error:
        raise RuntimeError(
            f"megatron-core cannot be imported ({error}). Install it: pip install 'megatron-core{SUPPORTED}'"
        ) from error
    return str(__version__)


def is_in_range(version: str, specifiers: str) -> bool:
    """Whether a version lies in a range such as ">=0.16.1,<0.20"; release candidates inside the range count."""
    return SpecifierSet(specifiers).contains(Version(version), prereleases=True)


def check_supported(version: str | None = None) -> str:
    """Returns the installed version (or the given one) if it is supported.

    Raises:
        RuntimeError: if it is not, naming both the version and the supported range.
    """
    version = installed_version() if version is None else version
    if not is_in_range(version, SUPPORTED):
        raise RuntimeError(
            f"megatron-core {version} is not supported: the patches know {SUPPORTED} and were tested with 0.16.1 and "
            f"0.19.2. Install one of them: pip install 'megatron-core{SUPPORTED}'"
        )
    return version
