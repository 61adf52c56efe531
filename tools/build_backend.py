# SPDX-License-Identifier: Apache-2.0
"""The build backend: setuptools, with mypyc for the compiled core, and without leftovers of earlier builds."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from setuptools.build_meta import *  # type: ignore[import-untyped]  # noqa: F403  # all its hooks but those below
from setuptools.build_meta import build_editable as _build_editable
from setuptools.build_meta import build_wheel as _build_wheel
from setuptools.build_meta import get_requires_for_build_wheel as _requirements
from setuptools.build_meta import prepare_metadata_for_build_editable as _prepare_editable

_MYPYC = "mypy[mypyc]>=1.18"


@contextmanager
def _alone() -> Iterator[None]:
    """Wait for other builds of this checkout, such as that of another environment: they write the same files."""
    with open("setup.py") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def prepare_metadata_for_build_editable(directory: str, config_settings: Any = None) -> str:
    """Write the metadata of an editable installation."""
    with _alone():
        return str(_prepare_editable(directory, config_settings))


def build_editable(directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Build an editable installation."""
    with _alone():
        return str(_build_editable(directory, config_settings, metadata_directory))


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """Build a wheel of what is in the checkout now: an earlier build leaves modules that have gone since."""
    for left in Path("build").glob("lib*"):
        shutil.rmtree(left)
    return str(_build_wheel(wheel_directory, config_settings, metadata_directory))


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """List what pip installs into the environment of the build."""
    compiler = [_MYPYC] if os.environ.get("OFFLOAD_ENGINE_COMPILE") == "1" else []
    return [*_requirements(config_settings), *compiler]
