# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs on the CPU: captures of kernels that write to fixed addresses, and one memory pool for all of them.

A capture runs its kernels, and notes them with the addresses that they read and write. A replay runs them again. Memory
that a capture has freed is given to the next that asks for as many bytes or fewer, in this or another capture, as
torch's caching allocator does with the memory pool of graphs: what is read too late or written too early is wrong then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload_engine._devices.regions import storage_at, whole

_POOL_BYTES = 1 << 22
_CPU = torch.device("cpu")
Kernel = Callable[..., Any]


class ToyPool:
    """The memory of the graphs, and the capture that runs."""

    def __init__(self) -> None:
        self._arena = torch.zeros(_POOL_BYTES, dtype=torch.uint8)
        self._end = 0
        self._blocks: list[tuple[int, int, StorageWeakRef]] = []  # begin and end, and who has it
        self.kernels: list[tuple[Kernel, torch.Tensor, tuple[torch.Tensor, ...]]] | None = None

    @property
    def used_bytes(self) -> int:
        """Return how far the pool has grown."""
        return self._end

    def empty(self, *shape: int) -> torch.Tensor:
        """Return a tensor of float32 in the pool."""
        numel = int(torch.Size(shape).numel())
        storage = self._storage(4 * numel)
        return torch.empty(0).set_(storage, 0, shape)  # type: ignore[call-overload]

    def allocate(self, nbytes: int, stream: Any, spec: Any = None) -> torch.Tensor:
        """As `Device.allocate`, which gets its memory from the pool while something is captured."""
        assert self.kernels is not None and spec is None
        return whole(self._storage(nbytes))

    def launch(self, kernel: Kernel, out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        """Run `kernel(*inputs, out=out)`, and in each replay of the graph that is captured again."""
        kernel(*map(alias, inputs), out=alias(out))
        if self.kernels is not None:
            self.kernels.append((kernel, alias(out), tuple(map(alias, inputs))))
        return out

    def graph_class(self) -> type:
        """Return what stands for `torch.cuda.CUDAGraph`."""
        pool = self

        class ToyGraph:
            def __init__(self) -> None:
                self.kernels: list[Any] = []

            def capture_begin(self) -> None:
                pool.kernels = self.kernels

            def capture_end(self) -> None:
                pool.kernels = None

            def replay(self) -> None:
                for kernel, out, inputs in self.kernels:
                    kernel(*inputs, out=out)

            def reset(self) -> None:
                self.kernels.clear()

        return ToyGraph

    def _storage(self, nbytes: int) -> torch.UntypedStorage:
        self._blocks = sorted((block for block in self._blocks if not block[2].expired()), key=lambda block: block[0])
        ends = [0, *(end for _, end, _ in self._blocks)]
        begins = [*(begin for begin, _, _ in self._blocks), _POOL_BYTES]
        begin = next(end for end, begin in zip(ends, begins, strict=True) if begin - end >= nbytes)
        self._end = max(self._end, begin + nbytes)
        storage = storage_at(self._arena.data_ptr() + begin, nbytes, _CPU)
        self._blocks.append((begin, begin + nbytes, StorageWeakRef(storage)))
        return storage


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same bytes that does not hold them."""
    storage = tensor.untyped_storage()
    same = storage_at(storage.data_ptr(), storage.nbytes(), _CPU)
    return torch.empty(0).set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())


class Layer:
    """`out = a * b`: both are made of the input, and saved."""

    def __init__(self, pool: ToyPool, width: int, factor: float) -> None:
        self.pool = pool
        self.width = width
        self.factor = factor
        self.stash: list[torch.Tensor] | None = None  # what a backward keeps for a graph of its own

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _Layer.apply(x, self)


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        pool = layer.pool
        a = pool.launch(lambda x, out: torch.mul(x, layer.factor, out=out), pool.empty(layer.width), x)
        b = pool.launch(lambda a, out: torch.sin(a, out=out), pool.empty(layer.width), a)
        ctx.layer = layer
        ctx.save_for_backward(a, b)
        return pool.launch(torch.mul, pool.empty(layer.width), a, b)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (a, b), layer, pool = ctx.saved_tensors, ctx.layer, ctx.layer.pool
        if layer.stash is not None:
            layer.stash.append(a)
        part = pool.launch(lambda a, b, out: torch.addcmul(b, a, a.cos(), out=out), pool.empty(layer.width), a, b)
        part = pool.launch(torch.mul, pool.empty(layer.width), part, grads[0])
        return pool.launch(lambda x, out: torch.mul(x, layer.factor, out=out), pool.empty(layer.width), part), None


class GraphedChunk:
    """Layers with a graph for each forward and each backward, of one microbatch.

    Args:
        layers: in the order of the forward.
        owner: makes graphs: it has the attribute `CUDAGraph`.
    """

    def __init__(self, layers: Sequence[Layer], owner: Any) -> None:
        self.layers = layers
        self._owner = owner
        self._forwards: list[Any] = []
        self._backwards: list[Any] = []
        self._static: list[tuple[torch.Tensor, torch.Tensor]] = []  # input and output of each layer
        self._grads: list[tuple[torch.Tensor, torch.Tensor]] = []  # from the last layer on

    def capture_forward(self) -> None:
        for layer in self.layers:
            x = layer.pool.empty(layer.width).fill_(1.0).requires_grad_()
            graph = self._owner.CUDAGraph()
            self._forwards.append(graph)
            graph.capture_begin()
            out = layer(x)
            graph.capture_end()
            self._static.append((x, out))

    def capture_backward(self) -> None:
        for layer, (x, out) in zip(reversed(self.layers), reversed(self._static), strict=True):
            grad = layer.pool.empty(layer.width).fill_(1.0)
            graph = self._owner.CUDAGraph()
            self._backwards.append(graph)
            graph.capture_begin()
            (found,) = torch.autograd.grad(out, x, grad)
            graph.capture_end()
            self._grads.append((grad, alias(found)))
        self._static = [(x.detach(), alias(out.detach())) for x, out in self._static]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for graph, (x, out) in zip(self._forwards, self._static, strict=True):
            x.detach().copy_(value)
            graph.replay()
            value = out.detach().clone()
        return value

    def backward(self, grad: torch.Tensor) -> torch.Tensor:
        for graph, (static, found) in zip(self._backwards, self._grads, strict=True):
            static.copy_(grad)
            graph.replay()
            grad = found.clone()
        return grad

    def reset(self) -> None:
        for graph in (*self._forwards, *self._backwards):
            graph.reset()
