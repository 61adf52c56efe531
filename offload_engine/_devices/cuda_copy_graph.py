# SPDX-License-Identifier: Apache-2.0
"""`CopyGraph`: copies as a CUDA graph, with the waits in front of them and the record of an event behind them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from offload_engine._devices.cuda_calls import HANDLE

# The runtimes whose calls take these arguments: cudaGraphInstantiate has had others before, and may have again.
_VERSIONS: Final = range(12000, 14000)
_ADD_COPY, _ADD_WAIT, _ADD_RECORD = (
    "cudaGraphAddMemcpyNode1D",
    "cudaGraphAddEventWaitNode",
    "cudaGraphAddEventRecordNode",
)
_CALLS = ("cudaGraphCreate", _ADD_COPY, _ADD_WAIT, _ADD_RECORD, "cudaGraphInstantiate", "cudaGraphDestroy")


def has_copy_graphs(library: Any) -> bool:
    """Return whether the runtime in `library` can make such graphs."""
    version = ctypes.c_int()
    code: int = library.cudaRuntimeGetVersion(ctypes.byref(version))
    return code == 0 and version.value in _VERSIONS and all(hasattr(library, call) for call in _CALLS)


class CopyGraph:
    """Made once, and launched by one call, which takes the host less time than a wait, copies and a record.

    Args:
        library: the CUDA runtime.
        device: of the copies.
        check: raises the error of a code.
        kind: of the copies.
        addresses: target, source and size in bytes of each.
        waits: the handles of the events in front.
        event: the handle of that behind.

    Attributes:
        handle: to launch it by.
    """

    def __init__(
        self,
        library: Any,
        device: torch.device,
        check: Callable[[int], None],
        kind: int,
        addresses: Sequence[int],
        waits: Sequence[int],
        event: int,
    ) -> None:
        self.handle: int = 0
        self._library = library
        self._check = check
        self._graph, self._last = HANDLE(), HANDLE()  # and its last node: each follows the one before
        with torch.cuda.device(device):
            check(library.cudaGraphCreate(ctypes.byref(self._graph), 0))
            try:
                for wait in waits:
                    self._add(_ADD_WAIT, HANDLE(wait))
                for i in range(0, len(addresses), 3):
                    target, source, nbytes = addresses[i : i + 3]
                    self._add(_ADD_COPY, HANDLE(target), HANDLE(source), ctypes.c_size_t(nbytes), kind)
                self._add(_ADD_RECORD, HANDLE(event))
                found = HANDLE()
                check(library.cudaGraphInstantiate(ctypes.byref(found), self._graph, ctypes.c_ulonglong(0)))
                self.handle = found.value or 0
            finally:
                library.cudaGraphDestroy(self._graph)

    def __del__(self) -> None:
        if self.handle:
            self._library.cudaGraphExecDestroy(HANDLE(self.handle))

    def _add(self, call: str, *arguments: Any) -> None:
        node = HANDLE()
        count = ctypes.c_size_t(int(self._last.value is not None))
        add = getattr(self._library, call)
        self._check(add(ctypes.byref(node), self._graph, ctypes.byref(self._last), count, *arguments))
        self._last = node
