"""Whether a graph that runs already can be made to wait for copies that the host issues only then."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

_IS_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_MANY, _FEW = 60, 10


class _Race:
    """A graph of a few products and a look at a flag, beside many products behind which the flag is set."""

    def __init__(self) -> None:
        self.a, self.b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self.outs = [torch.empty_like(self.a) for _ in range(2)]
        self.flag, self.seen = torch.zeros(1, device="cuda"), torch.zeros(1, device="cuda")
        self.stream, self.side = torch.cuda.Stream(), torch.cuda.Stream()
        self.graph = torch.cuda.CUDAGraph()
        for stream, out in zip((self.stream, self.side), self.outs, strict=True):
            with torch.cuda.stream(stream):
                torch.mm(self.a, self.b, out=out)
        torch.cuda.synchronize()

    def capture(self, wait: Callable[[], object]) -> None:
        with torch.cuda.graph(self.graph, stream=self.stream):
            for _ in range(_FEW):
                torch.mm(self.a, self.b, out=self.outs[0])
            wait()
            self.seen.copy_(self.flag)

    def has_waited(self, tell: Callable[[], object]) -> bool:
        """Launch the graph first, and after that what sets the flag and tells so."""
        self.flag.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            self.graph.replay()
        with torch.cuda.stream(self.side):
            for _ in range(_MANY):
                torch.mm(self.a, self.b, out=self.outs[1])
            self.flag.fill_(5)
            tell()
        torch.cuda.synchronize()
        return self.seen.item() == 5


def late_events() -> dict[str, Any]:
    """An external event that is recorded after the launch: CUDA may take the record from before it."""
    race, ready = _Race(), torch.cuda.Event(external=True)
    ready.record(race.side)
    torch.cuda.synchronize()
    race.capture(lambda: ready.wait(race.stream))
    return {"graph_waited": [race.has_waited(lambda: ready.record(race.side)) for _ in range(3)]}


def late_values() -> dict[str, Any]:
    """A value in memory that a stream writes after the launch, and the graph takes back.

    A graph that waits for ever ends the process by its time limit: the last experiment.
    """
    race, word = _Race(), torch.zeros(2, device="cuda", dtype=torch.int32)
    driver, codes = ctypes.CDLL("libcuda.so.1"), []

    def call(name: str, stream: torch.cuda.Stream, value: int, flags: int) -> None:
        function = getattr(driver, f"{name}_v2", None) or getattr(driver, name)
        handle, address = ctypes.c_void_p(stream.cuda_stream), ctypes.c_uint64(word.data_ptr())
        codes.append(function(handle, address, ctypes.c_uint32(value), ctypes.c_uint(flags)))

    def wait() -> None:
        call("cuStreamWaitValue32", race.stream, 1, _IS_EQUAL)
        call("cuStreamWriteValue32", race.stream, 0, 0)

    race.capture(wait)
    if any(codes):
        return {"codes": codes}
    waited = [race.has_waited(lambda: call("cuStreamWriteValue32", race.side, 1, 0)) for _ in range(3)]
    return {"codes": codes, "graph_waited": waited}
