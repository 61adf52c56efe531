# SPDX-License-Identifier: Apache-2.0
"""Captured layers: what they save is copied between the replays of their graphs, in order, and nothing else is."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload_engine import OffloadConfig, OffloadEngine, OffloadError, captured_layers, group_commit
from offload_engine._captured.saves import CapturedStorage, CapturedTensor
from offload_engine._compat import reads
from offload_engine._devices.base import HostRegion
from offload_engine.captured_layers import CapturedLayers
from tests.graph_device import GraphDevice
from tests.toy_graphs import GraphedChunk, Layer, ToyPool

WIDTH, NUM_LAYERS = 64, 6
LAYER_BYTES = 2 * 4 * WIDTH  # that a layer saves
FACTORS = [0.7, 1.3, 0.9, 1.1, 0.8, 1.2]
ORDERS = {
    "one microbatch": "F0 B0",
    "all forwards first": "F0 F1 F2 B2 B1 B0",
    "1F1B": "F0 F1 B0 F2 B1 F3 B2 B3",
}


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    device = GraphDevice()
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1), device)
    yield engine
    for layers in engine.graphs.layers:
        layers.release()
    engine.close()
    assert not device.hazards


class Graphs:
    """Chunks that are captured, and replayed in the same order."""

    def __init__(self, order: str, num_layers: int = NUM_LAYERS) -> None:
        self.pool = ToyPool()
        self.owner: Any = SimpleNamespace(CUDAGraph=self.pool.graph_class())
        self.order = order.split()
        self.layers = [Layer(self.pool, WIDTH, factor) for factor in FACTORS[:num_layers]]
        self.chunks: dict[str, GraphedChunk] = {}

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
    with engine.graphs.capture_layers(min_bytes=1, owner=graphs.owner, **options) as layers:
        graphs.capture()
    return layers


def expected(order: str, seeds: Sequence[int], num_layers: int = NUM_LAYERS) -> list[dict[str, torch.Tensor]]:
    graphs = Graphs(order, num_layers)
    graphs.capture()
    return [graphs.run(seed) for seed in seeds]


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("beside", [0, 1, 2])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_replays_are_those_without_offload(order: str, beside: int, engine: OffloadEngine) -> None:
    wanted = expected(order, range(3))
    graphs = Graphs(order)
    layers = captured(graphs, engine, graphs_beside=beside)
    assert layers.copied_out_bytes > 0 and layers.host_bytes > 0
    for seed, result in enumerate(wanted):
        assert are_equal(graphs.run(seed), result), seed


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


def test_host_memory_of_finished_microbatches_is_used_again(engine: OffloadEngine) -> None:
    few, many = Graphs("F0 B0"), Graphs(" ".join(f"F{n} B{n}" for n in range(8)))
    copied = captured(few, engine).copied_out_bytes
    layers = captured(many, engine)
    regions = {(id(r.slab), r.offset) for step in layers.steps for _, r in step.copy_outs}
    assert layers.copied_out_bytes == 8 * copied and len(regions) * 4 * WIDTH <= 2 * copied


@pytest.mark.parametrize("beside", [0, 1])
def test_what_comes_back_at_once_stays(beside: int, engine: OffloadEngine) -> None:
    layers = captured(Graphs("F0 B0", num_layers=3), engine, graphs_beside=beside)
    assert layers.copied_out_bytes == 2 * LAYER_BYTES and not layers.steps[2].copy_outs


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
    graphs.run(0)
    with pytest.raises(OffloadError, match="CUDA graph 18 is replayed where graph 12 was captured"):
        graphs.run(0, ["F0", "F1", "B0"])


@pytest.mark.parametrize("is_original", [True, False])
def test_what_others_hold_stays(is_original: bool, engine: OffloadEngine) -> None:
    graphs = Graphs("F0 B0")
    held: list[Any] = []
    launch = graphs.pool.launch

    def keeping(*args: Any) -> torch.Tensor:
        out = launch(*args)
        held.append(out if is_original else out[1:])
        return out

    graphs.pool.launch = keeping  # type: ignore[method-assign]
    layers = captured(graphs, engine)
    assert layers.copied_out_bytes == 0
    assert are_equal(graphs.run(3), expected("F0 B0", [3])[0])


def test_what_a_backward_leaves_behind_keeps_its_slot(engine: OffloadEngine) -> None:
    """As where gradients of weights are delayed: the saved input is read by another graph, later."""
    graphs = Graphs("F0 B0")
    stash: list[torch.Tensor] = []
    for layer in graphs.layers:
        layer.stash = stash
    sums: list[torch.Tensor] = []
    with engine.graphs.capture_layers(min_bytes=1, owner=graphs.owner) as layers:
        graphs.capture()
        late = graphs.owner.CUDAGraph()
        late.capture_begin()
        for saved in stash:
            sums.append(graphs.pool.launch(torch.neg, graphs.pool.empty(WIDTH), saved))
        late.capture_end()
        stash.clear()
    assert layers.copied_out_bytes > 0
    value = torch.rand(WIDTH)
    inputs = [value]
    for layer in graphs.layers:
        inputs.append(inputs[-1] * layer.factor * torch.sin(inputs[-1] * layer.factor))
    for _ in range(2):
        graphs.chunks["0"].forward(value)
        graphs.chunks["0"].backward(torch.ones(WIDTH))
        late.replay()
        for layer, x, found in zip(reversed(graphs.layers), reversed(inputs[:-1]), sums, strict=True):
            assert torch.equal(found, -(x * layer.factor))


@pytest.mark.parametrize(("least", "is_moved"), [(4 * WIDTH, True), (4 * WIDTH + 1, False)])
def test_the_threshold_is_that_of_the_engine(least: int, is_moved: bool) -> None:
    engine, graphs = OffloadEngine(OffloadConfig(min_tensor_bytes=least), GraphDevice()), Graphs("F0 B0")
    with engine.graphs.capture_layers(owner=graphs.owner) as layers:
        graphs.capture()
    assert (layers.copied_out_bytes > 0) == is_moved
    layers.release()
    engine.close()


def test_groups_say_what_may_leave(engine: OffloadEngine) -> None:
    graphs = Graphs("F0 B0")
    call = Layer.__call__

    class Grouped(Layer):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            recording = engine.graphs.recording
            assert recording is not None and recording.are_innermost()
            if self.factor < 1:
                return call(self, x)
            group = recording.group(min_bytes=1 << 20 if self.factor == 1.3 else 0)
            group.push()
            try:
                return call(self, x)
            finally:
                group.pop()

    graphs.layers[:] = [Grouped(graphs.pool, WIDTH, factor) for factor in FACTORS]
    layers = captured(graphs, engine, saves_all=False, graphs_beside=0)
    # 1.1 alone: what 1.3 saves is below its own bound, and the backward of 1.2 comes at once.
    assert layers.copied_out_bytes == LAYER_BYTES
    assert engine.graphs.recording is None
    assert are_equal(graphs.run(2), expected("F0 B0", [2])[0])


def test_a_group_that_is_open_at_the_end_of_a_capture_is_closed(engine: OffloadEngine) -> None:
    graphs = Graphs("F0 B0", num_layers=1)
    with engine.graphs.capture_layers(owner=graphs.owner):
        graph = graphs.owner.CUDAGraph()
        graph.capture_begin()
        recording = engine.graphs.recording
        assert recording is not None
        group = recording.group()
        group.push()
        graph.capture_end()
        group.pop()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_tensor_that_was_written_after_its_save_is_an_error(engine: OffloadEngine) -> None:
    graphs = Graphs("F0 B0", num_layers=1)
    x = torch.rand(WIDTH, requires_grad=True)
    with engine.graphs.capture_layers(min_bytes=1, owner=graphs.owner):
        graph = graphs.owner.CUDAGraph()
        graph.capture_begin()
        y = x * 2
        out = y.sin()
        y.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        graph.capture_end()


def test_without_room_on_the_host_all_stays(engine: OffloadEngine) -> None:
    full = OffloadEngine(OffloadConfig(min_tensor_bytes=1, host_limit_bytes=1), GraphDevice())
    graphs = Graphs("F0 B0")
    layers = captured(graphs, full)
    assert layers.copied_out_bytes == layers.host_bytes == layers.slot_bytes == 0
    assert are_equal(graphs.run(4), expected("F0 B0", [4])[0])
    layers.release()
    full.close()


def test_the_limit_counts_what_captured_layers_have() -> None:
    limit = 1 << 27
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1, host_limit_bytes=limit), GraphDevice())
    layers = captured(Graphs("F0 B0"), engine)
    assert 0 < layers.host_bytes and engine.pool.room_bytes == limit - layers.host_bytes
    layers.release()
    assert engine.pool.slab_bytes_total > 0
    engine.pool.trim()
    assert engine.pool.room_bytes == limit
    engine.close()


def test_released_graphs_are_not_replayed(engine: OffloadEngine) -> None:
    graphs = Graphs("F0 B0")
    layers = captured(graphs, engine)
    with pytest.raises(OffloadError, match="captured layers still use"):
        engine.close()
    layers.release()
    layers.release()
    assert engine.graphs.layers == () and layers.slot_bytes == 0
    with pytest.raises(OffloadError, match="after the release of its memory"):
        graphs.run(0)


@pytest.mark.parametrize("last", [0, 1])
def test_release_waits_for_copies_of_a_pass_that_was_broken_off(last: int, engine: OffloadEngine) -> None:
    graphs = Graphs("F0 F1 B1 B0")
    layers = captured(graphs, engine)
    graphs.run(0, graphs.order[: 2 + last])
    device = engine.device
    assert isinstance(device, GraphDevice)
    assert any(stream.queue for stream in device._streams)
    layers.release()
    assert not any(stream.queue for stream in device._streams)


def test_what_steps_before_have_pinned_makes_room(engine: OffloadEngine) -> None:
    with engine.iteration():
        chunk = engine.start_chunk()
        group_commit(torch.ones(8, requires_grad=True) * 2, chunk)
        lease = engine.pool.lend(1 << 20)
        assert lease is not None
        engine.pool.give_back(lease)
    assert engine.pool.slab_bytes_total > 0
    captured(Graphs("F0 B0"), engine)
    assert engine.pool.slab_bytes_total == 0


def test_captures_that_were_broken_off_cannot_be_replayed(engine: OffloadEngine) -> None:
    graphs = Graphs("F0 B0")
    with pytest.raises(ValueError, match="of the test"):
        with engine.graphs.capture_layers(min_bytes=1, owner=graphs.owner):
            graphs.capture()
            raise ValueError("of the test")
    assert engine.graphs.layers == () and engine.graphs.recording is None
    with pytest.raises(OffloadError, match="after the release of its memory"):
        graphs.run(0)
    again = Graphs("F0 B0")
    captured(again, engine)
    assert are_equal(again.run(1), expected("F0 B0", [1])[0])


def test_layers_whose_graphs_are_reset_are_released(engine: OffloadEngine) -> None:
    graphs = Graphs("F0 B0")
    captured(graphs, engine)
    engine.graphs.release_dropped()
    assert len(engine.graphs.layers) == 1
    graphs.reset()
    engine.graphs.release_dropped()
    assert engine.graphs.layers == ()


def test_layers_whose_graphs_are_freed_are_released(engine: OffloadEngine) -> None:
    graphs = Graphs("F0 B0")
    captured(graphs, engine)
    graphs.chunks.clear()
    engine.graphs.release_dropped()
    assert engine.graphs.layers == ()


def test_captures_do_not_nest_and_need_an_idle_engine(engine: OffloadEngine) -> None:
    with engine.graphs.capture_layers():
        with pytest.raises(OffloadError, match="inside a capture"), engine.graphs.capture_layers():
            pass
    with engine.iteration(), pytest.raises(OffloadError, match="inside a step"), engine.graphs.capture_layers():
        pass
    engine.close()
    with pytest.raises(OffloadError, match=r"after close\(\)"), engine.graphs.capture_layers():
        pass


def test_other_graphs_are_not_told_of(engine: OffloadEngine) -> None:
    base = torch.cuda.CUDAGraph
    with engine.graphs.capture_layers():
        assert torch.cuda.CUDAGraph is not base and issubclass(torch.cuda.CUDAGraph, base)
    assert torch.cuda.CUDAGraph is base


def test_a_storage_that_another_holds_unseen_is_found_when_it_is_dropped() -> None:
    tensor = torch.rand(8)
    found = reads.read_plain(tensor, torch.device("cpu"), 1)
    assert found is not None
    saved = CapturedStorage(0, found)
    handle = CapturedTensor(tensor, found, saved)
    slab = GraphDevice().new_slab(64)
    assert not saved.leave(HostRegion(slab, 0, 32)) and saved.region is None and not saved.may_leave()
    assert handle.tensor is not None and handle.tensor.data_ptr() == tensor.data_ptr()
    assert torch.equal(handle.tensor, tensor) and not handle.is_modified
    del tensor, found
    assert saved.leave(HostRegion(slab, 0, 32)) and saved.region is not None and handle.tensor is None


def test_inside_the_context_nothing_is_replayed_or_released(engine: OffloadEngine) -> None:
    graphs = Graphs("F0 B0")
    with engine.graphs.capture_layers(min_bytes=1, owner=graphs.owner) as layers:
        graphs.capture()
        with pytest.raises(OffloadError, match=r"replayed inside capture_layers\(\)"):
            graphs.run(0)
        with pytest.raises(OffloadError, match=r"released inside capture_layers\(\)"):
            layers.release()
    assert are_equal(graphs.run(1), expected("F0 B0", [1])[0])


@pytest.mark.parametrize("is_broken_off", [False, True])
def test_the_memory_of_slots_is_freed(is_broken_off: bool, engine: OffloadEngine) -> None:
    graphs, buffers = Graphs("F0 B0"), []
    allocate = engine.device.allocate

    def noting(*args: Any) -> torch.Tensor:
        buffer = allocate(*args)
        buffers.append(StorageWeakRef(buffer.untyped_storage()))
        return buffer

    engine.device.allocate = noting  # type: ignore[method-assign]
    gc.disable()
    try:
        with pytest.raises(ValueError, match="of the test") if is_broken_off else nullcontext():
            with engine.graphs.capture_layers(min_bytes=1, owner=graphs.owner) as layers:
                graphs.capture()
                if is_broken_off:
                    raise ValueError("of the test")
        layers.release()
        assert buffers and all(buffer.expired() for buffer in buffers) and layers.slot_bytes == 0
    finally:
        gc.enable()


def test_slots_that_became_too_small_before_any_use_are_freed(engine: OffloadEngine) -> None:
    graphs = Graphs("F0 B0", num_layers=5)

    class Wider(Layer):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            out = _Widened.apply(x, self)
            return out  # type: ignore[no-any-return]

    graphs.layers[:] = [Wider(graphs.pool, WIDTH, float(number)) for number in (1, 2, 4, 8, 1)]
    layers = captured(graphs, engine, graphs_beside=0)
    assert layers.copied_out_bytes == 15 * 4 * WIDTH and layers.slot_bytes == 8 * 4 * WIDTH


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Layer) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(layer.pool.empty(layer.width * int(layer.factor)))
        return layer.pool.launch(torch.neg, layer.pool.empty(layer.width), x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        assert ctx.saved_tensors
        return ctx.layer.pool.launch(torch.neg, ctx.layer.pool.empty(ctx.layer.width), grads[0]), None


def test_captures_behind_the_context_are_plain(engine: OffloadEngine) -> None:
    graphs = Graphs("F0 B0")
    with engine.graphs.capture_layers(min_bytes=1, owner=graphs.owner) as layers:
        late = graphs.owner.CUDAGraph()
        graphs.capture()
    late.capture_begin()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    late.capture_end()
    late.replay()
    late.reset()
    assert not layers.are_dropped and are_equal(graphs.run(1), expected("F0 B0", [1])[0])
    first = graphs.chunks["0"]._forwards[0]
    first.reset()
    first.capture_begin()  # again, by other code
    first.capture_end()
    first.replay()


def test_a_graph_that_was_never_captured_counts_for_none(engine: OffloadEngine) -> None:
    graphs = Graphs("F0 B0")
    with engine.graphs.capture_layers(min_bytes=1, owner=graphs.owner) as layers:
        empty = graphs.owner.CUDAGraph()
        graphs.capture()
    empty.reset()
    chunk = graphs.chunks["0"]
    for graph in (*chunk._forwards, *chunk._backwards[1:]):
        graph.reset()
    assert not layers.are_dropped
    chunk._backwards[0].reset()
    assert layers.are_dropped


def test_a_capture_without_an_end_leaves_no_hooks(engine: OffloadEngine) -> None:
    graphs = Graphs("F0 B0")
    with pytest.raises(ValueError, match="of the test"), engine.graphs.capture_layers(owner=graphs.owner):
        graphs.owner.CUDAGraph().capture_begin()
        raise ValueError("of the test")
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_a_capture_behind_one_that_was_broken_off_is_refused(engine: OffloadEngine) -> None:
    graphs = Graphs("F0 B0")
    with pytest.raises(OffloadError, match="was broken off"), engine.graphs.capture_layers(owner=graphs.owner):
        graphs.owner.CUDAGraph().capture_begin()
        graphs.owner.CUDAGraph().capture_begin()


def test_two_engines_capture_one_after_the_other(engine: OffloadEngine) -> None:
    graphs, other = Graphs("F0 B0"), OffloadEngine(OffloadConfig(min_tensor_bytes=1), GraphDevice())
    with engine.graphs.capture_layers(owner=graphs.owner):
        with pytest.raises(OffloadError, match="two engines at once"), other.graphs.capture_layers(owner=graphs.owner):
            pass
    with other.graphs.capture_layers(owner=graphs.owner):
        pass
    for layers in other.graphs.layers:
        layers.release()
    other.close()
    with (
        pytest.raises(ValueError, match="graphs_beside must not be negative"),
        engine.graphs.capture_layers(graphs_beside=-1),
    ):
        pass


def test_what_was_pinned_for_captures_that_were_broken_off_is_returned(
    engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_layers, "_SMALLEST_SLAB", 0)  # slabs without a free byte, as those of large layers
    graphs = Graphs("F0 B0")
    with pytest.raises(ValueError, match="of the test"):
        with engine.graphs.capture_layers(min_bytes=1, owner=graphs.owner) as layers:
            graphs.capture()
            assert layers.slabs.nbytes > 0
            raise ValueError("of the test")
    assert layers.slabs.nbytes == 0


def test_a_graph_that_is_freed_before_it_could_leave_needs_no_room(engine: OffloadEngine) -> None:
    graphs = Graphs("F0 B0", num_layers=3)
    with engine.graphs.capture_layers(min_bytes=1, owner=graphs.owner, graphs_beside=0) as layers:
        chunk = graphs.chunks["0"] = GraphedChunk(graphs.layers[:1], graphs.owner)
        chunk.capture_forward()
        graph = graphs.owner.CUDAGraph()
        graph.capture_begin()
        chunk._static.clear()  # the autograd graph goes with it
        graphs.layers[1](torch.ones(WIDTH, requires_grad=True))
        graph.capture_end()
    assert layers.copied_out_bytes == 0


def test_a_backward_outside_of_a_capture_is_an_error(engine: OffloadEngine) -> None:
    graphs = Graphs("F0 B0", num_layers=2)
    with engine.graphs.capture_layers(min_bytes=1, owner=graphs.owner, graphs_beside=0):
        chunk = GraphedChunk(graphs.layers, graphs.owner)
        chunk.capture_forward()
        with pytest.raises(OffloadError, match="runs eagerly: capture it, too"):
            chunk._static[0][1].sum().backward()


def test_one_backward_that_reads_what_several_forwards_saved_is_refused(engine: OffloadEngine) -> None:
    graphs = Graphs("F0 B0", num_layers=4)
    with engine.graphs.capture_layers(min_bytes=1, owner=graphs.owner, graphs_beside=0):
        chunk = GraphedChunk(graphs.layers, graphs.owner)
        chunk.capture_forward()
        graph = graphs.owner.CUDAGraph()
        graph.capture_begin()
        with pytest.raises(OffloadError, match="reads more than"):
            sum(out.sum() for _, out in chunk._static).backward()  # type: ignore[union-attr]
        graph.capture_end()


def test_a_share_of_free_memory_counts_what_captured_layers_have() -> None:
    device = GraphDevice()
    free = 1000 << 20
    device.free_host_bytes = lambda: free - device.host_bytes  # type: ignore[method-assign]
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1), device)
    layers = captured(Graphs("F0 B0"), engine)
    assert layers.host_bytes > 0
    assert engine.pool.room_bytes + layers.host_bytes == pytest.approx(0.8 * free, abs=1024)
    layers.release()
    engine.close()
