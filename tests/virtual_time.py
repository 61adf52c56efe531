"""A pipeline in virtual time: what a step would take if kernels and copies did, decided by the real engine.

Streams are clocks. A kernel moves that of compute on by so much, a copy that of its stream by its bytes over the
bandwidth, and an event is the time at which it completes. The host has a clock of its own and runs ahead, as it does.
Ranks wait for each other where the schedule says so. Nothing is copied, and bytes are a thousandth of what they stand
for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from offload_engine import (
    Action,
    ChunkKey,
    ChunkOffloadHandler,
    GroupTraits,
    IterationStats,
    OffloadConfig,
    OffloadEngine,
)
from offload_engine._devices.regions import new_buffer
from offload_engine.schedule import backward_at_once, interleaved, no_pipelining, one_forward_one_backward

MIB = 1 << 20
KIB = 1 << 10  # stands for a MiB
HOST_SHARE = 0.6  # of a kernel's time the host takes to launch it


class Event:
    """At what time it completes; no two are equal."""

    def __init__(self, at: float) -> None:
        self.at = at


class Slab:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def close(self) -> None: ...


class VirtualDevice:
    """Milliseconds since the step began, for each stream and the host.

    Args:
        out_gbps: bandwidth of copies out.
        in_gbps: and in, at the same time.
    """

    torch_device = torch.device("cpu")
    host_alignment = 64

    def __init__(self, out_gbps: float = 50.0, in_gbps: float = 48.0) -> None:
        self.clocks = {"compute": 0.0}
        self.host = 0.0
        self.stalled = 0.0
        """How long compute has waited for copies."""
        self._ms_of_mib = {"copy_out": 1.048576 / out_gbps, "copy_in": 1.048576 / in_gbps}

    def begin_step(self) -> None:
        self.clocks = dict.fromkeys(self.clocks, 0.0)
        self.host = self.stalled = 0.0

    def compute(self, milliseconds: float) -> None:
        """A kernel."""
        self.clocks["compute"] = max(self.clocks["compute"], self.host) + milliseconds
        self.host += HOST_SHARE * milliseconds

    def new_stream(self, name: str) -> str:
        self.clocks[name] = 0.0
        return name

    def current_stream(self) -> str:
        return "compute"

    def record_event(self, stream: str) -> Event:
        return Event(self.clocks[stream])

    def wait_event(self, stream: str, event: Event) -> None:
        late = event.at - self.clocks[stream]
        if late > 0.0:
            self.clocks[stream] = event.at
            self.stalled += late if stream == "compute" else 0.0

    def is_copy_thread(self) -> bool:
        return False

    def is_complete(self, event: Event) -> bool:
        return self.host >= event.at

    def synchronize(self, event: Event) -> None:
        self.host = max(self.host, event.at)

    def mark_time(self, stream: str) -> Event:
        return Event(self.clocks[stream])

    def milliseconds_between(self, first: Event, last: Event) -> float:
        return last.at - first.at

    def allocate(self, nbytes: int, stream: str, form: Any = None) -> torch.Tensor:
        return new_buffer(nbytes, form, self.torch_device)

    def copy_out(self, stream: str, copies: Sequence[tuple[torch.Tensor, Any]]) -> None:
        self._copy(stream, sum(region.nbytes for _, region in copies))

    def copy_in(self, stream: str, copies: Sequence[tuple[Any, torch.Tensor]]) -> None:
        self._copy(stream, sum(region.nbytes for region, _ in copies))

    def _copy(self, stream: str, nbytes: int) -> None:
        self.clocks[stream] = max(self.clocks[stream], self.host) + nbytes / KIB * self._ms_of_mib[stream]

    def free_host_bytes(self) -> int:
        return 1 << 40

    def new_slab(self, nbytes: int) -> Slab:
        return Slab(nbytes)

    def close(self) -> None: ...


class Module(NamedTuple):
    """One call of a submodule."""

    name: str
    milliseconds: float
    """Of its forward; the backward takes twice as long."""
    saved_mib: tuple[int, ...] = ()
    is_tail: bool = False
    """In the last layer of several, what takes longer than the copies issued before begins with it."""


# A dense layer of hidden size 4096 with a sequence of 8192 on an H200.
LAYER = (
    Module("qkv_linear", 1.3, (64,)),
    Module("core_attn", 2.15, (192, 64, 65)),
    Module("attn_proj", 0.6),
    Module("mlp_fc1", 2.9, (64, 64), is_tail=True),
    Module("mlp_act", 0.35, (448,)),
    Module("mlp_fc2", 1.65, (224,)),
)
HEAD_MS = 2.75


@dataclass(frozen=True)
class Job:
    """A model in a pipeline, and what leaves."""

    names: tuple[str, ...]
    pipeline: int = 2
    virtual: int = 2
    num_microbatches: int = 8
    layers: int = 8

    def __post_init__(self) -> None:
        if self.pipeline == 1 < self.virtual or self.layers % (self.pipeline * self.virtual):
            raise ValueError(f"{self} has virtual stages without a pipeline, or chunks of several sizes")


class Outcome(NamedTuple):
    """Of the second step."""

    milliseconds: float
    stalled: list[float]
    """Of each rank: how long its compute waited for copies."""
    stats: list[IterationStats]


def run(job: Job, **config: Any) -> Outcome:
    """Two steps; sizes in `config` are in MiB."""
    scaled = {name: value * KIB if name.endswith("bytes") else value for name, value in config.items()}
    ranks = [_Rank(job, rank, OffloadConfig.from_flags(min_tensor_bytes=1, **scaled)) for rank in range(job.pipeline)]
    for _ in range(2):
        stats = _step(ranks)
    outcome = Outcome(max(rank.now for rank in ranks), [rank.device.stalled for rank in ranks], stats)
    for rank in ranks:
        rank.engine.close()
    return outcome


def _step(ranks: Sequence[_Rank]) -> list[IterationStats]:
    done: dict[tuple[str, int, int], float] = {}
    waiting, num_done = [rank.step(done) for rank in ranks], -1
    while waiting:
        assert len(done) > num_done, "the ranks wait for each other"
        num_done = len(done)
        waiting = [actions for actions in waiting if next(actions, None) is not None]
    return [rank.engine.end_iteration() for rank in ranks]


class _Rank:
    def __init__(self, job: Job, rank: int, config: OffloadConfig) -> None:
        self._job = job
        self._rank = rank
        self.device = VirtualDevice()
        self.engine = OffloadEngine(config, self.device)  # type: ignore[arg-type]
        self.engine.pool._slab_bytes //= MIB // KIB
        self._actions = _actions(job, rank)
        self._at_once = backward_at_once(self._actions)
        self._last_stage = job.pipeline * job.virtual - 1
        self._chunks: dict[ChunkKey, tuple[ChunkOffloadHandler, list[Any]]] = {}

    @property
    def now(self) -> float:
        return self.device.clocks["compute"]

    def step(self, done: dict[tuple[str, int, int], float]) -> Iterator[bool]:
        """All actions; yields while another rank has to go on first. `done`: of all ranks, when each was over."""
        self.device.begin_step()
        self.engine.pool.take_all_back()  # of the step before, whose clocks have been set back
        self.engine.begin_iteration(self._actions)
        for action in self._actions:
            stage, microbatch = action.chunk.stage * self._job.pipeline + self._rank, action.chunk.microbatch
            before = (action.kind, stage - 1 if action.kind == "F" else stage + 1, microbatch)
            if 0 <= before[1] <= self._last_stage:
                while before not in done:
                    yield True
                self.device.clocks["compute"] = max(self.now, done[before])
            (self._forward if action.kind == "F" else self._backward)(action.chunk, stage == self._last_stage)
            done[action.kind, stage, microbatch] = self.now

    def _forward(self, key: ChunkKey, has_head: bool) -> None:
        is_at_once = key in self._at_once
        chunk = self.engine.start_chunk(key, has_head=has_head and is_at_once)
        calls: list[Any] = []
        num_layers = self._job.layers // (self._last_stage + 1)
        for layer in range(num_layers):
            is_last = layer == num_layers - 1
            for module in LAYER:
                if module.is_tail and is_last and num_layers > 1:
                    chunk.begin_tail()
                calls.append((module, *self._call(chunk, module, layer, is_at_once and is_last)))
        if has_head:
            chunk.begin_head()
            self.device.compute(HEAD_MS)
        chunk.end_forward()
        self._chunks[key] = chunk, calls

    def _call(self, chunk: ChunkOffloadHandler, module: Module, layer: int, is_kept: bool) -> tuple[Any, list[Any]]:
        if module.name not in self._job.names:
            self.device.compute(module.milliseconds)
            return None, []
        group = chunk.open_group(module.name, GroupTraits(keep=is_kept, layer=layer))
        handles = [chunk.tensor_push(torch.empty(mib * KIB, dtype=torch.uint8)) for mib in module.saved_mib]
        self.device.compute(module.milliseconds)
        chunk.close_group()
        return group, handles

    def _backward(self, key: ChunkKey, has_head: bool) -> None:
        chunk, calls = self._chunks.pop(key)
        chunk.begin_backward()
        if has_head:
            self.device.compute(2 * HEAD_MS)
            chunk.end_loss()
        while calls:
            module, group, handles = calls.pop()
            if group is not None:
                chunk.on_group_commit_backward(group)
            tensors = [chunk.tensor_pop(handle) for handle in handles]
            self.device.compute(2 * module.milliseconds)
            del tensors, handles


def _actions(job: Job, rank: int) -> list[Action]:
    if job.pipeline == 1:
        return no_pipelining(job.num_microbatches)
    if job.virtual == 1:
        return one_forward_one_backward(job.pipeline, rank, job.num_microbatches)
    return interleaved(job.pipeline, rank, job.virtual, job.num_microbatches)
