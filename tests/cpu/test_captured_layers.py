# SPDX-License-Identifier: Apache-2.0
"""Captured layers: what they save is copied between the replays of their graphs, in order, and nothing else is."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload_engine import OffloadConfig, OffloadEngine, OffloadError, captured_layers
from offload_engine._captured.saves import CapturedStorage, CapturedTensor
from offload_engine._compat import reads
from offload_engine._devices.base import HostRegion
from offload_engine.captured_layers import CapturedLayers
from tests.graph_device import GraphDevice
from tests.lookups import present
from tests.program_order import PASSES, ByteUse, Node, edges_of, unordered
from tests.toy_graphs import GraphedChunk, Layer, ToyPool, alias

WIDTH, NUM_LAYERS = 64, 6
LAYER_BYTES = 2 * 4 * WIDTH  # that a layer saves
FACTORS = [0.7, 1.3, 0.9, 1.1, 0.8, 1.2]
ORDERS = {
    "one microbatch": "F0 B0",
    "all forwards first": "F0 F1 F2 B2 B1 B0",
    "1F1B": "F0 F1 B0 F2 B1 F3 B2 B3",
    "interleaved": "F0 F1 F2 B2 F3 B3 B0 B1",  # two microbatches of the first chunk, and of the second
}


@contextmanager
def engine_with(**settings: Any) -> Iterator[OffloadEngine]:
    device = GraphDevice()
    engine = OffloadEngine(OffloadConfig(**{"min_tensor_bytes": 1, **settings}), device)
    yield engine
    for layers in engine.graphs.layers:
        layers.release()
    engine.close()
    assert not device.hazards


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    with engine_with() as engine:
        yield engine


@pytest.fixture
def graphs() -> Graphs:
    return Graphs("F0 B0")


class Graphs:
    """Chunks that are captured, and replayed in the same order."""

    def __init__(self, order: str) -> None:
        self.pool = ToyPool()
        self.owner: Any = SimpleNamespace(CUDAGraph=self.pool.graph_class())
        self.order = order.split()
        self.layers = [Layer(self.pool, WIDTH, factor) for factor in FACTORS]
        self.chunks: dict[str, GraphedChunk] = {}

    @contextmanager
    def graph(self) -> Iterator[Any]:
        """Capture one more graph."""
        graph = self.owner.CUDAGraph()
        graph.capture_begin()
        yield graph
        graph.capture_end()

    def capture(self) -> None:
        for action in self.order:
            chunk = self.chunks.setdefault(action[1:], GraphedChunk(self.layers, self.owner))
            (chunk.capture_forward if action[0] == "F" else chunk.capture_backward)()

    def run(self, seed: int, order: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Return the outputs and the gradients of a pass."""
        found, generator = {}, torch.Generator().manual_seed(seed)
        for action in self.order if order is None else order:
            chunk = self.chunks[action[1:]]
            value = torch.rand(WIDTH, generator=generator)
            found[action] = chunk.forward(value) if action[0] == "F" else chunk.backward(value)
        return found

    def reset(self) -> None:
        for chunk in self.chunks.values():
            chunk.reset()


def captured(graphs: Graphs, engine: OffloadEngine, **options: Any) -> CapturedLayers:
    with capturing(graphs, engine, **options) as layers:
        graphs.capture()
    return layers


@contextmanager
def capturing(graphs: Graphs, engine: OffloadEngine, **options: Any) -> Iterator[CapturedLayers]:
    with pytest.MonkeyPatch.context() as patch, engine.graphs.capture_layers(owner=graphs.owner, **options) as layers:
        patch.setattr(engine.device, "allocate", graphs.pool.allocate)
        yield layers


def has_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def expected(order: str, seeds: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    graphs = Graphs(order)
    graphs.capture()
    return [graphs.run(seed) for seed in seeds]


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check_replays(graphs: Graphs) -> None:
    assert are_equal(graphs.run(3), expected(" ".join(graphs.order), [3])[0])


@pytest.mark.parametrize("beside", [0, 1, 2])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_replays_are_those_without_offload_and_ordered(order: str, beside: int, engine: OffloadEngine) -> None:
    wanted = expected(order, range(3))
    graphs = Graphs(order)
    layers = captured(graphs, engine, graphs_beside=beside)
    assert layers.copied_out_bytes > 0 and layers.host_bytes > 0
    assert not unordered(layers, edges_of(layers), list(uses_of_kernels(graphs)))
    for seed, result in enumerate(wanted):
        assert are_equal(graphs.run(seed), result), seed
        assert engine.device.is_settled  # type: ignore[attr-defined]  # the graphs' memory may be returned now


@pytest.mark.parametrize("beside", [0, 1])
def test_the_memory_of_what_left_is_used_again(beside: int, engine: OffloadEngine) -> None:
    order = ORDERS["all forwards first"]
    without, graphs = Graphs(order), Graphs(order)
    without.capture()
    layers = captured(graphs, engine, graphs_beside=beside)
    assert layers.copied_out_bytes == (3 * NUM_LAYERS - 1) * LAYER_BYTES  # the last comes back at once
    # What the next captures take first is what the last ones wait for: as many layers are there at a time.
    assert without.pool.used_bytes - graphs.pool.used_bytes >= (3 * NUM_LAYERS - 4 - beside) * LAYER_BYTES
    assert layers.slot_bytes == (1 + beside) * LAYER_BYTES


def test_a_pass_that_was_broken_off_leaves_the_next_one_right(engine: OffloadEngine) -> None:
    order = ORDERS["1F1B"]
    (wanted,) = expected(order, [5])
    graphs = Graphs(order)
    captured(graphs, engine)
    for stop in range(1, len(graphs.order)):
        graphs.run(1, graphs.order[:stop])
        assert are_equal(graphs.run(5), wanted), stop


def test_another_order_of_replays_is_refused(engine: OffloadEngine) -> None:
    graphs = Graphs("F0 F1 B1 B0")
    captured(graphs, engine)
    with pytest.raises(OffloadError, match="CUDA graph 6 is replayed where graph 0 was captured"):
        graphs.run(0, ["F1"])
    graphs.run(0)
    with pytest.raises(OffloadError, match="CUDA graph 18 is replayed where graph 12 was captured"):
        graphs.run(0, ["F0", "F1", "B0"])


def test_compute_is_the_stream_that_is_current_when_a_graph_is_replayed(engine: OffloadEngine, graphs: Graphs) -> None:
    captured(graphs, engine)
    device, context = engine.device, engine._context
    assert isinstance(device, GraphDevice)
    for name in ("one", "other"):
        with device.compute_stream(name) as stream:
            device.wait_stream(stream, context.copy_in_stream)
            with mock.patch.object(device, "record_event", wraps=device.record_event) as record:
                graphs.run(0)
        recorded = {call.args[0] for call in record.call_args_list}
        assert stream in recorded and recorded <= {stream, context.copy_out_stream, context.copy_in_stream}


class ReplayedTwice:
    """A graph whose replays raise an error at first, in front of their kernels or behind them, and are repeated."""

    def __init__(self, graph: Any, is_behind: bool) -> None:
        self._graph = graph
        self._at = len(graph.kernels) if is_behind else 0

    def replay(self) -> None:
        self.fail()
        self._graph.replay()

    def fail(self) -> None:
        kernels = self._graph.kernels
        kernels.insert(self._at, (lambda *, out: 1 // 0, torch.empty(0), ()))
        with pytest.raises(ZeroDivisionError):
            self._graph.replay()
        kernels.pop(self._at)


@pytest.mark.parametrize("is_behind", [True, False])
def test_a_replay_that_has_raised_is_repeated(is_behind: bool, engine: OffloadEngine) -> None:
    graphs = Graphs("F0 F1 B1 B0")
    captured(graphs, engine)
    graphs.run(0, ["F0", "F1", "B1"])
    ReplayedTwice(graphs.chunks["0"]._forwards[0], is_behind=False).fail()  # a new pass, which ends the one before
    with pytest.raises(OffloadError, match="CUDA graph 18 is replayed where graph 0 was captured"):
        graphs.run(0, ["B0"])
    for chunk in graphs.chunks.values():
        chunk._forwards = [ReplayedTwice(graph, is_behind) for graph in chunk._forwards]
        chunk._backwards = [ReplayedTwice(graph, is_behind) for graph in chunk._backwards]
    for _ in range(2):
        check_replays(graphs)


@pytest.mark.parametrize("call", ["copy_out", "copy_in"])
def test_behind_copies_that_were_not_all_issued_only_a_new_pass_is_right(call: str, engine: OffloadEngine) -> None:
    graphs = Graphs("F0 F1 B1 B0")
    layers = captured(graphs, engine)
    num_calls = sum(bool(step.copy_outs if call == "copy_out" else step.copy_ins) for step in layers.steps)
    forwards, backwards = (
        [getattr(graphs.chunks[n], name) for n in o] for name, o in (("_forwards", "01"), ("_backwards", "10"))
    )
    later = [graph for chunk in (*forwards, *backwards) for graph in chunk][1:]
    original = getattr(engine.device, call)
    for failing in range(num_calls):
        effects = iter([*[original] * failing, None])

        def limited(*args: Any, effects: Iterator[Any] = effects) -> Any:
            effect = next(effects)
            if effect is None:
                raise ZeroDivisionError
            return effect(*args)

        with mock.patch.object(engine.device, call, limited), pytest.raises(ZeroDivisionError):
            graphs.run(0)
        for graph in later:
            with pytest.raises(OffloadError, match="where graph 0 was captured"):
                graph.replay()
        check_replays(graphs)


@pytest.mark.parametrize("is_original", [True, False])
def test_what_others_hold_stays(is_original: bool, engine: OffloadEngine, graphs: Graphs) -> None:
    held: list[Any] = []
    launch = graphs.pool.launch

    def keeping(kernel: Callable[..., Any], out: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        launch(kernel, out, *inputs)
        held.append(out if is_original else out[1:])
        return out

    graphs.pool.launch = keeping  # type: ignore[method-assign]
    assert captured(graphs, engine).copied_out_bytes == 0
    check_replays(graphs)


def test_what_a_backward_leaves_behind_keeps_its_slot(engine: OffloadEngine, graphs: Graphs) -> None:
    """As where gradients of weights are delayed: the saved input is read by another graph, later."""
    stash: list[torch.Tensor] = []
    for layer in graphs.layers:
        layer.stash = stash
    with capturing(graphs, engine) as layers:
        graphs.capture()
        with graphs.graph() as late:
            sums = [graphs.pool.launch(torch.neg, graphs.pool.empty(WIDTH), saved) for saved in stash]
        stash.clear()
    assert layers.copied_out_bytes > 0
    inputs = [torch.rand(WIDTH)]
    for layer in graphs.layers:
        inputs.append(inputs[-1] * layer.factor * torch.sin(inputs[-1] * layer.factor))
    for _ in range(2):
        graphs.chunks["0"].forward(inputs[0])
        graphs.chunks["0"].backward(torch.ones(WIDTH))
        late.replay()
        for layer, value, found in zip(reversed(graphs.layers), reversed(inputs[:-1]), sums, strict=True):
            assert torch.equal(found, -(value * layer.factor))


class Two(Layer):
    """A layer whose backward reads first what it has saved last."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        call = super().__call__
        return call(call(x))


def test_what_a_backward_reads_in_another_order_comes_back_in_one_copy(engine: OffloadEngine, graphs: Graphs) -> None:
    without = Graphs("F0 B0")
    for each in (graphs, without):
        each.layers[:] = [Two(each.pool, WIDTH, factor) for factor in FACTORS]
    layers = captured(graphs, engine)
    assert [len(step.copy_outs) for step in layers.steps].count(4) == NUM_LAYERS - 1
    copied = [copy_in.copies for step in layers.steps for copy_in in step.copy_ins]
    assert [[region.nbytes for region, _ in copies] for copies in copied] == [[2 * LAYER_BYTES]] * (NUM_LAYERS - 1)
    without.capture()
    assert are_equal(graphs.run(3), without.run(3))


class OneBackwardOfTwo:
    """Four layers, of which one graph is the backward of the first two; the others save twice as much as these."""

    def __init__(self, graphs: Graphs) -> None:
        layers = [*graphs.layers[:2], *(Two(graphs.pool, WIDTH, factor) for factor in FACTORS[2:4])]
        self._graphs: list[tuple[Any, list[torch.Tensor]]] = []  # with what they write
        self._inputs = [graphs.pool.empty(WIDTH).fill_(1.0).requires_grad_() for _ in layers]
        grads = [graphs.pool.empty(WIDTH).fill_(1.0) for _ in layers]
        outputs = []
        for layer, x in zip(layers, self._inputs, strict=True):
            with graphs.graph() as graph:
                outputs.append(layer(x))
            self._graphs.append((graph, [alias(outputs[-1].detach())]))
        for read in (slice(3, 4), slice(2, 3), slice(2)):
            with graphs.graph() as graph:
                found = torch.autograd.grad(outputs[read], self._inputs[read], grads[read])
            self._graphs.append((graph, [alias(each) for each in found]))

    def run(self, seed: int) -> list[torch.Tensor]:
        generator, found = torch.Generator().manual_seed(seed), list[torch.Tensor]()
        for x in self._inputs:
            x.detach().copy_(torch.rand(WIDTH, generator=generator))
        for graph, results in self._graphs:
            graph.replay()
            found += [result.clone() for result in results]
        return found


def test_a_backward_of_two_forwards_finds_room_for_both_in_a_slot(engine: OffloadEngine, graphs: Graphs) -> None:
    without = OneBackwardOfTwo(Graphs(""))
    with capturing(graphs, engine, graphs_beside=0) as layers:
        several = OneBackwardOfTwo(graphs)
    assert layers.copied_out_bytes == 4 * LAYER_BYTES and layers.slot_bytes == 2 * LAYER_BYTES
    for seed in range(3):
        assert all(map(torch.equal, several.run(seed), without.run(seed)))


def test_what_a_backward_computes_again_leaves_the_slots_there(engine: OffloadEngine, graphs: Graphs) -> None:
    class Again(Layer):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = _Again.apply(super().__call__(x), self)
            return out

    class _Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, layer: Layer) -> torch.Tensor:
            ctx.layer = layer
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            with torch.enable_grad():  # it saves before the backward has read anything
                Layer.__call__(ctx.layer, torch.ones(WIDTH, requires_grad=True))
            return grads[0], None

    graphs.layers[:] = [Again(graphs.pool, WIDTH, factor) for factor in FACTORS]
    assert captured(graphs, engine, graphs_beside=0).copied_out_bytes > 0
    check_replays(graphs)


@pytest.mark.parametrize(("least", "is_moved"), [(4 * WIDTH, True), (4 * WIDTH + 1, False)])
def test_the_threshold_is_that_of_the_engine(least: int, is_moved: bool, graphs: Graphs) -> None:
    with engine_with(min_tensor_bytes=least) as engine:
        assert (captured(graphs, engine).copied_out_bytes > 0) == is_moved


def test_groups_say_what_may_leave(engine: OffloadEngine, graphs: Graphs) -> None:
    class Grouped(Layer):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            recording = present(engine.graphs.recording)
            assert recording.are_innermost()
            if self.factor < 1:
                return super().__call__(x)
            group = recording.group(min_bytes=1 << 20 if self.factor == 1.3 else 0)
            group.push()
            out = super().__call__(x)
            group.pop()
            return out

    graphs.layers[:] = [Grouped(graphs.pool, WIDTH, factor) for factor in FACTORS]
    layers = captured(graphs, engine, saves_all=False, graphs_beside=0)
    # 1.1 alone: what 1.3 saves is below its own bound, and the backward of 1.2 comes at once.
    assert layers.copied_out_bytes == LAYER_BYTES and engine.graphs.recording is None
    check_replays(graphs)


def test_a_capture_with_an_open_group_or_without_an_end(engine: OffloadEngine, graphs: Graphs) -> None:
    with engine.graphs.capture_layers(owner=graphs.owner):
        with graphs.graph():
            group = present(engine.graphs.recording).group()
            group.push()
        assert not has_hooks()
        group.pop()
    with pytest.raises(OffloadError, match="was interrupted"), engine.graphs.capture_layers(owner=graphs.owner):
        graphs.owner.CUDAGraph().capture_begin()
        assert has_hooks()
        graphs.owner.CUDAGraph().capture_begin()
    assert not has_hooks()


def test_without_host_memory_all_stays_or_an_error_ends_it(graphs: Graphs, caplog: pytest.LogCaptureFixture) -> None:
    with engine_with(host_limit_bytes=1) as full:
        layers = captured(graphs, full)
        assert layers.copied_out_bytes == layers.host_bytes == layers.slot_bytes == 0
        check_replays(graphs)
    (warning,) = caplog.messages
    assert warning.startswith(f"what {NUM_LAYERS - 1} captured forwards save stays on the device")
    with engine_with(host_limit_bytes=1, host_policy="error") as engine:
        with pytest.raises(OffloadError, match="a captured layer needs .* bytes of host memory.*host_policy='keep'"):
            captured(Graphs("F0 B0"), engine)
        assert not has_hooks()


@pytest.mark.parametrize("how", ["released", "broken off", "interrupted late", "reset", "freed"])
def test_the_memory_of_slots_is_freed_and_graphs_without_it_are_not_replayed(
    how: str, engine: OffloadEngine, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their routines have addresses that are free by then."""
    monkeypatch.setattr(captured_layers, "_SMALLEST_SLAB", 0)  # slabs without a free byte, as those of large layers
    buffers, allocate, complete = [], engine.device.allocate, CapturedLayers.complete

    def noting(*args: Any) -> torch.Tensor:
        buffer = allocate(*args)
        buffers.append(StorageWeakRef(buffer.untyped_storage()))
        return buffer

    def interrupted(layers: CapturedLayers) -> None:
        complete(layers)
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.device, "allocate", noting)
    if how == "interrupted late":
        monkeypatch.setattr(CapturedLayers, "complete", interrupted)
    with contextlib.suppress(ZeroDivisionError, KeyboardInterrupt):
        with engine.graphs.capture_layers(owner=graphs.owner) as layers:
            graphs.capture()
            assert layers.slabs.nbytes > 0
            if how == "broken off":
                raise ZeroDivisionError
    if how == "released":
        with pytest.raises(OffloadError, match="captured layers still use"):
            engine.close()
        layers.release()
    elif how in ("reset", "freed"):
        engine.graphs.release_freed()
        assert len(engine.graphs.layers) == 1
        graphs.reset() if how == "reset" else graphs.chunks.clear()
        engine.graphs.release_freed()
    layers.release()
    assert buffers and all(buffer.expired() for buffer in buffers)
    assert layers.slot_bytes == 0 and (layers.slabs.nbytes == 0 or how != "broken off")
    assert engine.graphs.layers == () and engine.graphs.recording is None
    if how in ("released", "broken off", "interrupted late"):
        with pytest.raises(OffloadError, match="after the release of its memory"):
            graphs.run(0)
    monkeypatch.undo()
    again = Graphs("F0 B0")
    captured(again, engine)
    check_replays(again)


class Rewriting(Layer):
    """Its backward writes into what it has saved, and then reads that again."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return _Rewriting.apply(x, self.pool)


class _Rewriting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, pool: ToyPool) -> torch.Tensor:
        saved = pool.launch(torch.neg, pool.empty(WIDTH), x)
        ctx.save_for_backward(saved)
        return pool.launch(torch.exp, pool.empty(WIDTH), saved)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.saved_tensors[0].mul_(2)
        return ctx.saved_tensors[0], None


@pytest.mark.parametrize("has_left", [False, True])
def test_what_was_written_after_its_save_is_an_error(has_left: bool, engine: OffloadEngine, graphs: Graphs) -> None:
    x = torch.rand(WIDTH, requires_grad=True)
    with capturing(graphs, engine) as layers:
        chunk = GraphedChunk([Rewriting(graphs.pool, WIDTH, 1.0), *graphs.layers[: 4 * has_left]], graphs.owner)
        chunk.capture_forward()
        with graphs.graph(), pytest.raises(RuntimeError, match="modified by an inplace operation"):
            chunk._static[0][1].sum().backward()
        del chunk
        with graphs.graph():
            y = x * 2
            out = y.sin()
            y.mul_(2)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.sum().backward()
    assert (layers.copied_out_bytes > 0) == has_left


@pytest.mark.parametrize("num_actions", [1, 3])
def test_release_waits_for_copies_of_a_pass_that_was_broken_off(num_actions: int, engine: OffloadEngine) -> None:
    graphs = Graphs("F0 F1 B1 B0")
    layers = captured(graphs, engine)
    graphs.run(0, graphs.order[:num_actions])
    device = engine.device
    assert isinstance(device, GraphDevice) and any(stream.queue for stream in device._streams)
    layers.release()
    assert not any(stream.queue for stream in device._streams)


def test_what_is_to_stay_stays_spread_over_the_forwards() -> None:
    """What leaves, less a slot, is the share of what all forwards have saved, rounded up; the last of them stays."""
    moved = {}
    for fraction in (1.0, 0.6, 0.3, 0.1, 0.0):
        graphs = Graphs("F0 B0")
        with engine_with(fraction=fraction) as engine:
            moved[fraction] = captured(graphs, engine, graphs_beside=0).copied_out_bytes // LAYER_BYTES
            check_replays(graphs)
            graphs.reset()
    assert moved == {1.0: NUM_LAYERS - 1, 0.6: 4, 0.3: 3, 0.1: 2, 0.0: 0}


@pytest.mark.parametrize(("order", "num_filled"), [*zip(ORDERS.values(), (1, 1, 2, 1), strict=True)], ids=ORDERS)
def test_bytes_that_are_to_stay_are_the_first_that_wait_for_their_backward(order: str, num_filled: int) -> None:
    """They fill up again where the microbatch that has them has had its backward."""
    moved = []
    for kept_bytes in (0, 2 * LAYER_BYTES):
        graphs = Graphs(order)
        with engine_with(kept_bytes=kept_bytes) as engine:
            moved.append(captured(graphs, engine, graphs_beside=0).copied_out_bytes)
            check_replays(graphs)
            graphs.reset()
    assert moved[0] - moved[1] == num_filled * 2 * LAYER_BYTES


def test_one_engine_captures_at_a_time_and_is_idle_then(engine: OffloadEngine, graphs: Graphs) -> None:
    def refused(message: str, by: OffloadEngine = engine, **options: Any) -> None:
        with pytest.raises((OffloadError, ValueError), match=message):
            with by.graphs.capture_layers(owner=graphs.owner, **options):
                pass

    base = graphs.owner.CUDAGraph
    with engine_with() as other:
        with capturing(graphs, engine) as layers:
            assert graphs.owner.CUDAGraph is not base and issubclass(graphs.owner.CUDAGraph, base)
            refused("inside a capture")
            refused("two engines at once", by=other)
            graphs.capture()
            with pytest.raises(OffloadError, match=r"replayed inside capture_layers\(\)"):
                graphs.run(0)
            with pytest.raises(OffloadError, match=r"released inside capture_layers\(\)"):
                layers.release()
        check_replays(graphs)
        assert graphs.owner.CUDAGraph is base
        captured(Graphs("F0 B0"), other)
    with engine.iteration():
        refused("inside a step")
    refused("graphs_beside must not be negative", graphs_beside=-1)
    layers.release()
    engine.close()
    refused(r"after close\(\)")


def test_a_storage_that_another_holds_unseen_is_found_when_it_is_dropped() -> None:
    tensor = torch.rand(8)
    found = present(reads.read_plain(tensor, torch.device("cpu"), 1))
    saved = CapturedStorage(0, found)
    handle = CapturedTensor(tensor, found, saved)
    slab = GraphDevice().new_slab(64)
    assert not saved.release(HostRegion(slab, 0, 32), 0) and (saved.region, saved.may_leave()) == (None, False)
    assert handle.tensor is not None and handle.tensor.data_ptr() == tensor.data_ptr()
    assert torch.equal(handle.tensor, tensor) and not handle.is_modified
    del tensor, found
    assert saved.release(HostRegion(slab, 0, 32), 0) and saved.region is not None and handle.tensor is None


def test_a_graph_that_is_freed_before_it_could_leave_needs_no_room(engine: OffloadEngine, graphs: Graphs) -> None:
    with capturing(graphs, engine, graphs_beside=0) as layers:
        chunk = GraphedChunk(graphs.layers[:1], graphs.owner)
        chunk.capture_forward()
        with graphs.graph():
            chunk._static.clear()  # the autograd graph goes with it
            graphs.layers[1](torch.ones(WIDTH, requires_grad=True))
    assert layers.copied_out_bytes == 0


def test_a_backward_outside_and_one_of_several_forwards(engine: OffloadEngine, graphs: Graphs) -> None:
    with capturing(graphs, engine, graphs_beside=0):
        chunk = GraphedChunk(graphs.layers[:4], graphs.owner)
        chunk.capture_forward()
        with pytest.raises(OffloadError, match="runs outside a capture: capture it, too"):
            chunk._static[0][1].sum().backward()
        with graphs.graph(), pytest.raises(OffloadError, match="reads what two others have saved"):
            torch.stack([out.sum() for _, out in chunk._static[1:]]).sum().backward()


# -- the order of uses of the same bytes ------------------------------------------------------------------------------

# The wait for a copy-in is not, where an earlier graph waits for one that was issued later; nor is the wait for a slot
# that is free long since.
ALWAYS_NEEDED = {"produced", "left"}


def uses_of_kernels(graphs: Graphs) -> Iterator[ByteUse]:
    for p in PASSES:
        for chunk in graphs.chunks.values():
            for graph in (*chunk._forwards, *chunk._backwards):
                for _, out, inputs in graph.kernels:
                    for tensor in (out, *inputs):
                        storage = tensor.untyped_storage()
                        begin, node = storage.data_ptr(), Node("replay", p, graph.number)
                        yield ByteUse("device", begin, begin + storage.nbytes(), node, tensor is out)


def test_each_wait_is_needed_for_that(engine: OffloadEngine, graphs: Graphs) -> None:
    layers = captured(graphs, engine)
    edges = edges_of(layers)
    waits = [edge for edge in edges if edge.what != "stream"]
    needed = [wait for wait in waits if unordered(layers, [edge for edge in edges if edge is not wait])]
    assert {wait for wait in waits if wait.what in ALWAYS_NEEDED} <= set(needed)
    assert {"free", "reads"} <= {wait.what for wait in needed}
