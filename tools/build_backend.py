"""The build backend: setuptools, and mypyc as one more requirement where the compiled core is asked for."""

from __future__ import annotations

import os
from typing import Any

from setuptools.build_meta import *  # noqa: F403  # all its hooks but the one below
from setuptools.build_meta import get_requires_for_build_wheel as _requirements

_MYPYC = "mypy[mypyc]>=1.18"


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """List what pip installs into the environment of the build."""
    compiler = [_MYPYC] if os.environ.get("OFFLOAD_ENGINE_COMPILE") == "1" else []
    return [*_requirements(config_settings), *compiler]
