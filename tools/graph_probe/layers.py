"""G2: each layer's forward and backward is a graph of its own; copies are issued eagerly between the replays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from graph_probe.stage import MIB, PARTS, Job, Shape, kernels, memory, pool_segments, timed
from offload_engine._devices.cuda import CudaDevice
from offload_engine._devices.regions import HostSlab

_HOLD = 2
"""A saved tensor's memory is given to the graph that is captured this many later."""
_OUT, _IN = 2, 1  # kinds of copies, as CUDA numbers them


class Slot:
    """One saved storage: where it is saved, on the host, and where it returns to; addresses are fixed by capture."""

    def __init__(self, tensor: torch.Tensor, region: int) -> None:
        storage = tensor.untyped_storage()
        self.nbytes = storage.nbytes()
        self.region = region
        self.source = storage.data_ptr()
        self.held: torch.Tensor | None = tensor.detach()  # until its bytes may be used again
        self.incoming: torch.Tensor | None = None
        self.target = 0

    def arrive(self) -> None:
        """Allocate, in a capture, where the bytes return to."""
        self.incoming = torch.empty(self.nbytes, dtype=torch.uint8, device="cuda")
        self.target = self.incoming.data_ptr()


class Replayed:
    """A graph and what is issued around its launch."""

    def __init__(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.waits: list[list[Slot]] = []  # compute waits for these copy-outs first: the graph reuses their bytes
        self.arrives: list[Slot] = []  # copied in while it runs
        self.reads: list[Slot] | None = None  # compute waits for their copy-in first
        self.leaves: list[Slot] = []  # copied out behind it


class _Cut(torch.autograd.Function):
    """Begins a graph of autograd whose first node keeps no tensor."""

    @staticmethod
    def forward(ctx: Any, dummy: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None


class LayerGraphs:
    """The graphs of a step, in the order of their captures, which is that of their replays."""

    def __init__(self, job: Job, part: str | None, stream: torch.cuda.Stream, device: CudaDevice) -> None:
        self.job, self.part, self.stream, self.device = job, part, stream, device
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: list[Replayed] = []
        self.slots: dict[tuple[int, int], list[Slot]] = {}
        self.slab: HostSlab | None = None
        self.host_bytes = 0
        self._leaving: list[tuple[int, list[Slot]]] = []
        self._weights = {p.untyped_storage().data_ptr() for p in job.parameters}
        self._own = {p.untyped_storage().data_ptr() for p in (*job.inputs, *job.grads)} | self._weights
        self._dummy = torch.zeros(1, device="cuda", requires_grad=True)
        self._edges: dict[tuple[int, int], tuple[GradientEdge, GradientEdge]] = {}
        # All but the last layer, which would return in front of its backward and nothing to hide behind.
        self._modules = [PARTS[part](layer) for layer in job.stage.layers[:-1]] if part else []

    def capture(self) -> None:
        """Capture the whole step."""
        with self._next() as first:
            self.job.zero()
        del first
        losses: dict[int, torch.Tensor] = {}
        grads: dict[int, torch.Tensor] = {}
        for kind, (_, microbatch) in self.job.shape.actions():
            if kind == "F":
                losses[microbatch], grads[microbatch] = self._capture_forward(microbatch)
            else:
                self._capture_backward(microbatch, grads.pop(microbatch))
        self.job.losses = [losses[m] for m in sorted(losses)]
        if self.part:
            self.slab = self.device.new_slab(-(-self.host_bytes // self.device.host_alignment) * 512)

    def _capture_forward(self, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.job.inputs[microbatch]
        for number, layer in enumerate(self.job.stage.layers):
            slots: dict[int, Slot] = {}
            with self._next() as replayed:
                begin = _Cut.apply(self._dummy, hidden)
                cut = get_gradient_edge(begin)
                with self._hooks(number, slots):
                    out = layer(begin)
                self._edges[microbatch, number] = get_gradient_edge(out), cut
                hidden = out.detach()
                del out, begin
            replayed.leaves = self.slots[microbatch, number] = list(slots.values())
            if slots:
                self._leaving.append((len(self.graphs) + _HOLD, replayed.leaves))
        with self._next():
            leaf = hidden.detach().requires_grad_()
            loss = self.job.loss(leaf)
            (grad,) = torch.autograd.grad(loss, leaf)
        return loss.detach(), grad

    def _capture_backward(self, microbatch: int, grad: torch.Tensor) -> None:
        layers = list(self.job.stage.layers)
        last = len(layers) - 1
        for number in range(last, -1, -1):
            slots = self.slots[microbatch, number]
            coming = self.slots[microbatch, number - 1] if number else []
            with self._next() as replayed:
                for slot in coming:
                    slot.arrive()
                replayed.arrives, replayed.reads = coming, slots
                edge, cut = self._edges.pop((microbatch, number))
                parameters = list(layers[number].parameters())
                grad, *found = torch.autograd.grad([edge], [cut, *parameters], [grad])
                for parameter, own in zip(parameters, found, strict=True):
                    assert parameter.grad is not None
                    parameter.grad.add_(own)
                del found, edge, cut
            for slot in slots:
                slot.incoming = None

    @contextmanager
    def _next(self) -> Iterator[Replayed]:
        replayed = Replayed()
        index = len(self.graphs)
        for when, slots in list(self._leaving):
            if when <= index:
                self._leaving.remove((when, slots))
                for slot in slots:
                    slot.held = None
                replayed.waits.append(slots)
        with torch.cuda.graph(replayed.graph, pool=self.pool, stream=self.stream):
            yield replayed
        self.graphs.append(replayed)

    @contextmanager
    def _hooks(self, number: int, slots: dict[int, Slot]) -> Iterator[None]:
        """Make slots of what the offloaded part of a layer saves."""
        if number >= len(self._modules):
            yield
            return
        stack = ExitStack()

        def enter(*_: Any) -> None:
            stack.enter_context(saved_tensors_hooks(lambda tensor: self._pack(tensor, slots), _unpack))

        def leave(*_: Any) -> None:
            stack.close()

        module = self._modules[number]
        handles = module.register_forward_pre_hook(enter), module.register_forward_hook(leave)
        yield
        for handle in handles:
            handle.remove()

    def _pack(self, tensor: torch.Tensor, slots: dict[int, Slot]) -> Any:
        storage = tensor.untyped_storage()
        if storage.nbytes() < MIB or storage.data_ptr() in self._own:
            return tensor
        slot = slots.get(storage.data_ptr())
        if slot is None:
            slot = slots[storage.data_ptr()] = Slot(tensor, self.host_bytes)
            self.host_bytes += -(-slot.nbytes // 512) * 512
        return slot, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride()


def _unpack(saved: Any) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    slot, dtype, offset, shape, stride = saved
    assert slot.incoming is not None, "the bytes have not been brought back"
    return torch.empty(0, dtype=dtype, device="cuda").set_(slot.incoming.untyped_storage(), offset, shape, stride)


class Player:
    """Replays the graphs of a step, with copies on two streams between them."""

    def __init__(self, graphs: LayerGraphs) -> None:
        self._graphs = graphs
        runtime: Any = graphs.device._runtime
        self._runtime = runtime
        self._out, self._in = graphs.device.new_stream("copy_out"), graphs.device.new_stream("copy_in")
        self._compute = graphs.stream.cuda_stream
        slab: Any = graphs.slab
        host = 0 if slab is None else slab.address
        self._values: dict[tuple[int, int], list[int]] = {}
        for number, replayed in enumerate(graphs.graphs):
            self._values[number, _OUT] = [v for s in replayed.leaves for v in (host + s.region, s.source, s.nbytes)]
            self._values[number, _IN] = [v for s in replayed.arrives for v in (s.target, host + s.region, s.nbytes)]

    def step(self) -> None:
        runtime, compute = self._runtime, self._compute
        copied: dict[int, Any] = {}
        for number, replayed in enumerate(self._graphs.graphs):
            for slots in replayed.waits:
                runtime.wait(compute, copied[id(slots[0])])
            if replayed.reads:
                runtime.wait(compute, copied[-id(replayed.reads[0])])
            if replayed.arrives:
                runtime.wait_stream(self._in, compute)
                event = runtime._copy(self._in, _IN, self._values[number, _IN])
                copied[-id(replayed.arrives[0])] = event
            replayed.graph.replay()
            if replayed.leaves:
                runtime.wait_stream(self._out, compute)
                copied[id(replayed.leaves[0])] = runtime._copy(self._out, _OUT, self._values[number, _OUT])


def run_layers(shape: Shape, part: str | None, rounds: int, emit: Callable[..., None], exact: bool = False) -> None:
    """Measure steps of one graph for each layer, pass and microbatch."""

    def bits() -> dict[str, Any]:
        return {"bits": job.bits()} if exact else {}

    with ExitStack() as stack:
        stack.enter_context(kernels(exact))
        stream = torch.cuda.Stream()
        stack.enter_context(torch.cuda.stream(stream))
        job = Job(shape)
        job.step()
        torch.cuda.synchronize()
        emit(stage="warm", **bits())
        job.losses = []
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        emit(stage="before capture", **memory("before"))
        device = CudaDevice()
        graphs = LayerGraphs(job, part, stream, device)
        begin = time.perf_counter()
        graphs.capture()
        emit(
            stage="captured",
            capture_s=round(time.perf_counter() - begin, 2),
            num_graphs=len(graphs.graphs),
            host_mib=graphs.host_bytes // MIB,
            **memory("captured"),
        )
        torch.cuda.empty_cache()
        emit(stage="emptied", **memory("emptied"), pool_mib=sum(n for _, n in pool_segments(graphs.pool)) // MIB)
        player = Player(graphs)
        player.step()
        torch.cuda.synchronize()
        emit(stage="compared", which="first replay", **bits())
        emit(stage="timed", **timed(player.step, rounds), **memory("graphs"))
        emit(stage="compared", which="after timed replays", **bits())
        if graphs.slab is not None:
            slab: Any = graphs.slab
            slab.view(0, slab.nbytes).fill_(0xFF)
            player.step()
            torch.cuda.synchronize()
            emit(stage="compared", which="host poisoned", **bits())
