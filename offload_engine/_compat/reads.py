# SPDX-License-Identifier: Apache-2.0
"""Provides the functions of `tensor_reads`, in C if the core is compiled."""

from __future__ import annotations

from typing import Any, Final

from offload_engine._compat import tensor_reads


def _fastest() -> Any:
    try:
        from offload_engine._compat import _tensor_reads
    except ImportError:  # installed as pure Python
        return tensor_reads
    return _tensor_reads


_reads: Any = _fastest()
read_plain: Final[Any] = _reads.read_plain
is_unmodified: Final[Any] = _reads.is_unmodified
address_of: Final[Any] = _reads.address_of
