# SPDX-License-Identifier: Apache-2.0
"""Opens ranges in profiles: `Offload::copy_out (c1 m3 core_attn)` around the work that the engine issues."""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, Literal, Protocol

import torch
from torch.autograd import profiler

from offload_engine._compat import torch_private
from offload_engine.planning.moves import Op
from offload_engine.schedule import ChunkKey

_VERBS: Final = {Op.OUT: "copy_out", Op.DROP: "release", Op.IN: "copy_in", "wait": "wait"}
_record_function: Final[Any] = torch_private.record_function


class LabelledGroup(Protocol):
    """The attributes of a group that a label shows."""

    @property
    def chunk(self) -> ChunkKey: ...

    @property
    def name(self) -> str: ...


def range_label(op: Op | Literal["wait"], group: str, chunk: ChunkKey | None = None) -> str:
    """Return the name of a range, as `Offload::copy_out (c1 m3 core_attn)`.

    Args:
        op: the move, or "wait" if compute waits for a copy.
        group: name of the group, which is that of the submodule.
        chunk: chunk of the group; None: the work belongs to no chunk.
    """
    where = "" if chunk is None else f"c{chunk.stage} m{chunk.microbatch} "
    return f"Offload::{_VERBS[op]} ({where}{group})"


class _NoRange:
    """Does nothing, in less time than `contextlib.nullcontext`."""

    __slots__ = ()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        pass


_NO_RANGE: Final = _NoRange()


class Ranges:
    """Opens a range around each piece of work while a profiler listens; otherwise a call takes 0.1 microseconds.

    `torch.profiler` shows the ranges, and so does `torch.autograd.profiler.emit_nvtx`. A profiler outside torch, such
    as Nsight Systems, cannot be detected, so `is_nvtx_on` must be set for it.

    Attributes:
        is_nvtx_on: push NVTX ranges too, whether or not one of torch's profilers listens.
    """

    __slots__ = ("is_nvtx_on",)

    def __init__(self, is_nvtx_on: bool = False) -> None:
        self.is_nvtx_on = is_nvtx_on

    def around(self, op: Op | Literal["wait"], group: LabelledGroup) -> AbstractContextManager[Any]:
        """Return a context manager for the work of one group; see `range_label`."""
        if not (profiler._is_profiler_enabled or self.is_nvtx_on):
            return _NO_RANGE
        label = range_label(op, group.name, group.chunk)
        if not self.is_nvtx_on:
            range_of_torch: AbstractContextManager[Any] = _record_function(label)
            return range_of_torch
        return _NvtxRange(label)


class _NvtxRange:
    """Opens an NVTX range, inside a range of torch's profiler if one listens."""

    __slots__ = ("_label", "_range_of_torch")

    def __init__(self, label: str) -> None:
        self._label = label
        self._range_of_torch = _record_function(label)

    def __enter__(self) -> None:
        self._range_of_torch.__enter__()
        torch.cuda.nvtx.range_push(self._label)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        torch.cuda.nvtx.range_pop()
        self._range_of_torch.__exit__(kind, error, at)
