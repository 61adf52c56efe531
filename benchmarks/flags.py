# SPDX-License-Identifier: Apache-2.0
"""Flags that take sizes, for tools that parse their command line before torch is imported, or without it.

`offload_engine.sizes` is loaded from its file, because the package around it imports torch.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

_SOURCE = Path(__file__).resolve().parents[1] / "offload_engine" / "sizes.py"


def bytes_flag(unit: str = "B") -> Callable[[str], int]:
    """Return `offload_engine.sizes.bytes_flag(unit)`."""
    spec = importlib.util.spec_from_file_location("sizes", _SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    flag: Callable[[str], int] = module.bytes_flag(unit)
    return flag
