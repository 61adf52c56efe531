# SPDX-License-Identifier: Apache-2.0
"""A recorded step of the real engine: its record is what the counters say, and costs no result; ranges in profiles."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from offload_engine import (
    ChunkKey,
    ChunkOffloadHandler,
    FixedBounds,
    GroupTraits,
    OffloadConfig,
    OffloadEngine,
    ResidentBudget,
    group_commit,
)
from offload_engine._devices.cpu import CpuDevice
from offload_engine._observe.chrome_trace import read_records
from offload_engine._observe.labels import Ranges
from offload_engine._observe.reasons import Reason
from offload_engine._observe.record import Awaited, StepRecord
from offload_engine.planning.moves import DROP, IN, OUT
from offload_engine.schedule import parse_actions
from tests.adversarial import AdversarialDevice

AT_ONCE = FixedBounds(max_inflight_bytes=0)
LATE = FixedBounds(max_inflight_bytes=1 << 30)
NUMEL = 1024


def train(engine: OffloadEngine, model: Any) -> float:
    """Run one step of a stack in which each linear layer is a group, and no norm is."""
    with engine.iteration(weights=model.parameters()):
        chunk = engine.start_chunk()
        x = torch.linspace(-1, 1, 64 * 256).view(64, 256)
        with chunk.hooks.around_groups():
            for layer in model:
                x = layer[0](x)
                chunk.open_group("fc")
                with chunk.saved_tensors_hooks():
                    x = layer[1](x).sin()
                x = group_commit(x, chunk)
            loss = x.square().mean()
        loss.backward()
    return loss.item()


def stack() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 256)) for _ in range(4))


@pytest.mark.parametrize("make_device", [lambda: CpuDevice("none"), AdversarialDevice])
def test_the_record_agrees_with_the_counters(make_device: Callable[[], Any], tmp_path: Path) -> None:
    model, engine = stack(), OffloadEngine(OffloadConfig(min_tensor_bytes=1024), device=make_device())
    plain = train(engine, model)
    engine.record(tmp_path / "step{step}.json.gz")
    assert train(engine, model) == plain
    record, stats = engine.last_record, engine.stats
    assert record is not None
    for op, nbytes in ((OUT, stats.copied_out_bytes), (IN, stats.copied_in_bytes)):
        assert sum(copy.nbytes for copy in record.copies if copy.op is op) == nbytes > 0
    moved_out = {move.group for move in record.moves if move.op is OUT}
    assert len(moved_out) == stats.num_offloaded_groups
    assert {move.group for move in record.moves if move.op is DROP} <= moved_out
    moved, recalled = (
        sum({s.storage: s.nbytes for s in record.saved if s.reason is reason}.values())
        for reason in (Reason.MOVED, Reason.RECALLED)
    )
    assert (moved, moved + recalled) == (stats.copied_in_bytes, stats.copied_out_bytes)
    assert any(wait.awaited is Awaited.COPY_IN for wait in record.waits)
    reasons = {saved.reason for saved in record.saved}
    assert {Reason.MOVED, Reason.WEIGHT, Reason.TOO_SMALL, Reason.NOT_ASKED} <= reasons
    assert {s.residency for s in record.stages} == {"packed", "copying out", "on host", "copying in", "used"}
    engine.record(tmp_path / "of a step that raises.json")
    with pytest.raises(ZeroDivisionError), engine.iteration():
        _ = 1 // 0
    assert train(engine, model) == plain and engine.last_record is record and "fc" in engine.report()
    engine.close()
    assert read_records(tmp_path / "step1.json.gz") == [record] and len(list(tmp_path.iterdir())) == 1


@contextmanager
def recorded(**settings: Any) -> Iterator[tuple[OffloadEngine, ChunkOffloadHandler]]:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0, **settings), AdversarialDevice())
    engine.record()
    with engine.iteration():
        yield engine, engine.start_chunk()
    assert engine.last_record is not None


def moves_of(engine: OffloadEngine) -> list[tuple[str, str]]:
    assert engine.last_record is not None
    return [(move.boundary, f"{move.op.value} {move.group} {move.nbytes}") for move in engine.last_record.moves]


def test_a_group_that_is_no_longer_kept_leaves_at_a_boundary_of_its_own() -> None:
    with recorded() as (engine, chunk):
        handles = in_group(chunk, torch.ones(64), keep=True)
        assert engine.stats.num_kept_groups == 1
        for _ in range(2):
            chunk.offload_kept_groups("attention")
            assert engine.stats.num_kept_groups == engine.stats.kept_bytes == 0
        del handles
    assert ("F0.0:0/unkeep", "OUT 0.0:0 256") in moves_of(engine)
    assert engine.last_record is not None and engine.last_record.saved[0].reason is not Reason.KEPT


def test_a_tensor_that_was_copied_in_is_saved_again() -> None:
    """As cached rotary embeddings, by each microbatch: the bytes on the device are no longer those that were saved."""
    shared, weight = torch.full((256,), 3.0), torch.ones(256, requires_grad=True)
    actions = parse_actions("F0.0 F0.1 B0.0 F0.2 B0.1 B0.2")
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0, policy=AT_ONCE), AdversarialDevice())
    losses: dict[ChunkKey, torch.Tensor] = {}
    engine.record()
    with engine.iteration(actions):
        for kind, key in actions:
            if kind == "B":
                losses.pop(key).backward()
                continue
            chunk = engine.start_chunk(key)
            with chunk.saved_tensors_hooks():
                chunk.open_group("group")
                y = weight * shared
            losses[key] = group_commit(y, chunk).sum()
            chunk.end_forward()
    assert weight.grad is not None and weight.grad.tolist() == [9.0] * 256


def test_a_release_is_recorded_with_its_own_bytes_alone() -> None:
    """The second group shares a storage that the first has taken to the host before. What was recalled has none."""
    shared, own = torch.zeros(64), torch.zeros(16)
    with recorded(policy=AT_ONCE) as (engine, chunk):
        handles = [in_group(chunk, shared), in_group(chunk, shared, own)]
        chunk.end_forward()
        del handles
    assert [move for _, move in moves_of(engine) if "DROP" in move] == ["DROP 0.0:0 256", "DROP 0.0:1 64"]
    with recorded() as (engine, chunk):
        handles = [in_group(chunk, own)]
        chunk.recall_groups()
        del handles
    assert moves_of(engine) == [("F0.0:0", "OUT 0.0:0 64"), ("B0.0:turn", "IN 0.0:0 64")]


Save = Callable[[OffloadEngine, ChunkOffloadHandler], Any]


def in_group(chunk: ChunkOffloadHandler, *tensors: torch.Tensor, keep: bool = False, writes: bool = False) -> list[Any]:
    """Save tensors in one group; return their handles."""
    chunk.open_group("attention", GroupTraits(keep=keep))
    handles = [chunk.hooks.pack(tensor) for tensor in tensors]
    if writes:
        tensors[0].add_(1)
    chunk.close_group()
    return handles


def moved(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> Any:
    return in_group(chunk, torch.ones(NUMEL))


def recalled(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> Any:
    handles = moved(engine, chunk)
    chunk.recall_groups()
    return handles


def held_by_more_than_declared(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> Any:
    tensor = torch.ones(NUMEL)
    held = in_group(chunk, tensor), tensor, tensor.detach()
    engine.held_elsewhere(tensor)
    return held


def modified_behind_its_commit(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> Any:
    handles = in_group(chunk, tensor := torch.ones(NUMEL))
    tensor.add_(1)
    return handles


def excluded(engine: OffloadEngine, chunk: ChunkOffloadHandler) -> Any:
    engine.exclude(tensor := torch.ones(NUMEL))
    return in_group(chunk, tensor)


def reject(tensor: torch.Tensor) -> bool:
    return False


CASES: list[tuple[Save, Reason, dict[str, Any]]] = [
    (moved, Reason.MOVED, {}),
    (recalled, Reason.RECALLED, {"policy": LATE}),
    (lambda engine, chunk: in_group(chunk, torch.ones(NUMEL), keep=True), Reason.KEPT, {}),
    (moved, Reason.FITS, {"policy": ResidentBudget(1 << 30)}),
    (moved, Reason.DRY_RUN, {"dry_run": True}),
    (moved, Reason.NO_ROOM, {"host_limit_bytes": 2 * NUMEL, "min_tensor_bytes": NUMEL}),
    (lambda engine, chunk: chunk.hooks.pack_ungrouped(torch.ones(NUMEL)), Reason.NOT_ASKED, {}),
    (held_by_more_than_declared, Reason.SHARED, {"policy": LATE}),
    (lambda engine, chunk: in_group(chunk, torch.ones(NUMEL), writes=True), Reason.MODIFIED, {}),
    (modified_behind_its_commit, Reason.MODIFIED, {"policy": LATE}),
    (excluded, Reason.EXCLUDED, {}),
    (moved, Reason.EXCLUDED, {"checker": reject}),
]


def record_of(save: Save, checker: Any = None, **settings: Any) -> StepRecord:
    """Record the second step of one group; in the first a policy learns sizes."""
    engine = OffloadEngine(OffloadConfig(**{"min_tensor_bytes": 1024, **settings}), AdversarialDevice())
    for step in range(2):
        if step:
            engine.record()
        with engine.iteration():
            chunk = engine.start_chunk(has_head=True, tensor_need_offloading_checker=checker)
            held = save(engine, chunk)
            chunk.begin_head()  # releases what is being copied out
            chunk.on_group_commit_backward()
            del held
    assert engine.last_record is not None
    return engine.last_record


@pytest.mark.parametrize(("save", "reason", "settings"), CASES)
def test_reason_of_a_storage_that_might_have_moved(save: Save, reason: Reason, settings: dict[str, Any]) -> None:
    (saved,) = record_of(save, **settings).saved
    assert (saved.reason, saved.shape, saved.dtype, saved.nbytes) == (reason, (NUMEL,), "float32", 4 * NUMEL)


class Subclass(torch.Tensor):
    pass


def marked() -> torch.Tensor:
    tensor = torch.zeros(512)
    tensor._TE_do_not_offload = True  # type: ignore[attr-defined]
    return tensor


def quantized() -> torch.Tensor:
    with warnings.catch_warnings(action="ignore"):  # deprecated, and still there to be met
        return torch.quantize_per_tensor(torch.zeros(2048), 0.1, 0, torch.quint8)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.zeros(3), Reason.TOO_SMALL),
        (lambda: nn.Parameter(torch.zeros(512)), Reason.WEIGHT),
        (lambda: nn.Parameter(torch.zeros(512)).view(8, 64).t(), Reason.WEIGHT),
        (marked, Reason.EXCLUDED),
        (lambda: torch.zeros(512, device="meta"), Reason.OTHER_DEVICE),
        (lambda: torch.zeros(512).as_subclass(Subclass), Reason.TYPE),
        (lambda: torch.zeros(512).to_sparse(), Reason.NOT_STRIDED),
        (quantized, Reason.FORM),
        (lambda: torch._efficientzerotensor(512), Reason.FORM),
    ],
)
def test_reason_of_a_tensor_that_may_not_move(make: Callable[[], torch.Tensor], reason: Reason) -> None:
    """A checker that rejects it as well changes no reason."""
    for checker in (None, reject):
        saved = record_of(lambda engine, chunk: in_group(chunk, make()), checker).saved[0]
        assert (saved.reason, saved.shape) == (reason, tuple(make().shape))


def test_hooks_on_modules_are_there_from_the_request_to_the_end_of_its_step_or_of_the_engine() -> None:
    hooks = nn.modules.module._global_forward_pre_hooks
    num_before, engine = len(hooks), OffloadEngine(device=CpuDevice("none"))
    for _ in range(2):
        engine.record()
        engine.record()
        assert len(hooks) == num_before + 1
        with engine.iteration():
            pass
        assert len(hooks) == num_before
    engine.record()
    engine.close()
    assert len(hooks) == num_before


def test_a_profile_shows_the_moves_and_the_wait_of_each_group(device: AdversarialDevice) -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0, policy=AT_ONCE), device)
    with torch.profiler.profile() as profile, engine.iteration():
        chunk = engine.start_chunk()
        handles = in_group(chunk, torch.ones(64))
        chunk.on_group_commit_backward(chunk.groups[0])
        chunk.hooks.unpack(handles.pop())
    labels = {f"Offload::{what} (c0 m0 attention)" for what in ("copy_out", "release", "copy_in", "wait")}
    assert labels <= {event.key for event in profile.key_averages()}


def test_nvtx_ranges_are_pushed_where_they_are_switched_on() -> None:
    nvtx, group = mock.Mock(), SimpleNamespace(chunk=ChunkKey(1, 3), name="core_attn")
    with mock.patch.object(torch.cuda, "nvtx", nvtx):
        with Ranges().around(OUT, group):
            pass
        assert not nvtx.mock_calls
        with pytest.raises(ValueError), Ranges(is_nvtx_on=True).around("wait", group):
            raise ValueError
    assert nvtx.mock_calls == [mock.call.range_push("Offload::wait (c1 m3 core_attn)"), mock.call.range_pop()]


def test_what_unpack_finds_on_the_host_is_a_miss_and_its_copy_in_is_recorded() -> None:
    """What is still leaving is recalled instead, which is recorded alike."""
    for settings, num_missed in (({"policy": AT_ONCE}, 1), (dict[str, Any](), 0)):
        with recorded(**settings) as (engine, chunk):
            chunk.hooks.unpack(in_group(chunk, torch.ones(64))[0])
        assert engine.stats.prefetch_misses == num_missed
        assert "IN 0.0:0 256" in [move for _, move in moves_of(engine)]
