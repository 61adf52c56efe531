"""How long copies take as nodes of a graph, alone and beside matrix products, and what makes them slower there."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from graph_probe.stage import MIB
from offload_engine._devices.cuda import CudaDevice
from offload_engine._devices.regions import HostRegion

_EACH_WAY = 1024 * MIB
_PRODUCTS = 30


@dataclass(frozen=True)
class Mix:
    """What runs at the same time."""

    products: bool = True
    out: bool = True
    into: bool = True
    copy_mib: int = 64
    """Of each copy; all of one direction have 1 GiB."""
    products_first: bool = False
    """They are issued before the copies."""
    priority: int = 0
    """Of the stream of the products; less is more urgent."""


MIXES = {
    "products": Mix(out=False, into=False),
    "out": Mix(products=False, into=False),
    "in": Mix(products=False, out=False),
    "both": Mix(products=False),
    "products and out": Mix(into=False),
    "products and in": Mix(out=False),
    "products and both": Mix(),
    "products first and both": Mix(products_first=True),
    "products and both, 16 MiB each": Mix(copy_mib=16),
    "products and both, 1024 MiB each": Mix(copy_mib=1024),
    "urgent products and both": Mix(priority=-1),
}


def copies_in_a_graph() -> dict[str, Any]:
    """Return times in ms: eagerly in batches, eagerly one by one, and as nodes of a graph."""
    bench = _Bench()
    found: dict[str, Any] = {"copied_mib_each_way": _EACH_WAY // MIB}
    for name, mix in MIXES.items():
        stream = torch.cuda.Stream(priority=mix.priority)
        with torch.cuda.stream(stream):
            bench.prepare(mix)
            found[f"eager {name}"] = best(lambda mix=mix: bench.work(mix))
            with bench.one_by_one():
                found[f"single {name}"] = best(lambda mix=mix: bench.work(mix))
            graph = torch.cuda.CUDAGraph()
            with bench.one_by_one(), torch.cuda.graph(graph, stream=stream):
                bench.work(mix)
            found[f"graph {name}"] = best(graph.replay)
    return found


class _Bench:
    def __init__(self) -> None:
        self._device = CudaDevice()
        self._slab = self._device.new_slab(2 * _EACH_WAY)
        self._buffers: list[list[torch.Tensor]] = []
        self._a, self._b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        self._c = torch.mm(self._a, self._b)
        self._sides = self._device.new_stream("out"), self._device.new_stream("in")

    def prepare(self, mix: Mix) -> None:
        """Allocate what is copied, outside of the times and the graph: a buffer for each copy."""
        self._buffers.clear()
        for _ in self._sides:
            count = _EACH_WAY // MIB // mix.copy_mib
            self._buffers.append(
                [torch.zeros(mix.copy_mib * MIB, dtype=torch.uint8, device="cuda") for _ in range(count)]
            )
        torch.cuda.synchronize()

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Issue each copy by a call of its own, as a capture has to."""
        torch.cuda.synchronize()
        assert self._device.graphs is not None
        self._device.graphs.record(True)
        try:
            yield
        finally:
            self._device.graphs.record(False)

    def work(self, mix: Mix) -> None:
        device, compute = self._device, torch.cuda.current_stream().cuda_stream
        for side in self._sides:
            device.wait_stream(side, compute)
        if mix.products_first:
            self._multiply(mix)
        if mix.out:
            device.copy_out(self._sides[0], [(part, region) for region, part in self._parts(0)])
        if mix.into:
            device.copy_in(self._sides[1], self._parts(1))
        if not mix.products_first:
            self._multiply(mix)
        for side in self._sides:
            device.wait_stream(compute, side)

    def _multiply(self, mix: Mix) -> None:
        for _ in range(_PRODUCTS if mix.products else 0):
            torch.mm(self._a, self._b, out=self._c)

    def _parts(self, direction: int) -> list[tuple[HostRegion, torch.Tensor]]:
        begin = direction * _EACH_WAY
        buffers = self._buffers[direction]
        return [
            (HostRegion(self._slab, begin + i * buffer.nbytes, buffer.nbytes), buffer)
            for i, buffer in enumerate(buffers)
        ]


def best(run: Callable[[], object]) -> float:
    """Return the shortest of five runs, in ms."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return round(min(times), 3)
