# SPDX-License-Identifier: Apache-2.0
"""A recorded step of the real engine: its record is what the counters say, on any device, and costs no result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload_engine import (
    ChunkKey,
    ChunkOffloadHandler,
    FixedBounds,
    GroupTraits,
    OffloadConfig,
    OffloadEngine,
    group_commit,
    group_start,
)
from offload_engine._devices.cpu import CpuDevice
from offload_engine._observe.chrome_trace import read_records
from offload_engine._observe.reasons import Reason
from offload_engine._observe.record import Awaited
from offload_engine._saved.storage import TensorGroup
from offload_engine.planning.moves import DROP, IN, OUT
from offload_engine.schedule import parse_actions
from tests.adversarial import AdversarialDevice


def train(engine: OffloadEngine, model: Any) -> float:
    """Run one step of a stack in which each linear layer is a group, and no norm is."""
    with engine.iteration(weights=model.parameters()):
        chunk = engine.start_chunk()
        x = torch.linspace(-1, 1, 64 * 256).view(64, 256)
        with chunk.hooks.around_groups():
            for layer in model:
                x = layer[0](x)
                x = group_start(x, chunk, name="fc")
                with chunk.saved_tensors_hooks():
                    x = layer[1](x).sin()
                x = group_commit(x, chunk)
            loss = x.square().mean()
        loss.backward()
    return loss.item()


def stack() -> torch.nn.ModuleList:
    torch.manual_seed(0)
    return torch.nn.ModuleList(
        torch.nn.Sequential(torch.nn.LayerNorm(256), torch.nn.Linear(256, 256)) for _ in range(4)
    )


@pytest.mark.parametrize("make_device", [lambda: CpuDevice("none"), AdversarialDevice])
def test_the_record_agrees_with_the_counters(make_device: Callable[[], Any], tmp_path: Path) -> None:
    model, engine = stack(), OffloadEngine(OffloadConfig(min_tensor_bytes=1024), device=make_device())
    plain = train(engine, model)
    assert "record a step" not in engine.report() and "groups offloaded" in engine.report()
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
    assert "fc" in engine.report() and train(engine, model) == plain
    engine.close()
    assert read_records(tmp_path / "step1.json.gz") == [record]


def test_a_step_that_raises_leaves_the_record_before(tmp_path: Path) -> None:
    engine, model = OffloadEngine(OffloadConfig(min_tensor_bytes=1024), device=CpuDevice("none")), stack()
    engine.record()
    train(engine, model)
    engine.record(tmp_path / "step.json")
    with pytest.raises(ZeroDivisionError), engine.iteration():
        _ = 1 // 0
    train(engine, model)
    assert engine.last_record is not None and engine.last_record.step == 0
    engine.close()
    assert not list(tmp_path.iterdir()) and "Saved tensors" in engine.report()


def save(chunk: ChunkOffloadHandler, numel: int = 64, **traits: bool) -> tuple[TensorGroup | None, Any]:
    chunk.open_group("attention", GroupTraits(**traits))
    handle = chunk.tensor_push(torch.ones(numel))
    return chunk.close_group(), handle


def moves_of(engine: OffloadEngine) -> list[tuple[str, str]]:
    assert engine.last_record is not None
    return [(move.boundary, f"{move.op.value} {move.group} {move.nbytes}") for move in engine.last_record.moves]


def test_what_is_recalled_is_a_move_and_is_not_released() -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), AdversarialDevice())
    engine.record()
    with engine.iteration():
        chunk = engine.start_chunk()
        group, handle = save(chunk)
        chunk.recall_groups()
        chunk.on_group_commit_backward(group)
        chunk.tensor_pop(handle)
        del handle
    assert moves_of(engine) == [("F0.0:0", "OUT 0.0:0 256"), ("B0.0:turn", "IN 0.0:0 256")]


def test_what_no_policy_brought_back_is_a_move_too() -> None:
    config = OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(horizon_bytes=0, max_inflight_bytes=0))
    engine = OffloadEngine(config, AdversarialDevice())
    engine.record()
    with engine.iteration():
        chunk = engine.start_chunk()
        save(chunk)
        group, handle = save(chunk)
        chunk.on_group_commit_backward(group)
        chunk.tensor_pop(handle)
        _, handle = save(chunk, numel=32)
        chunk.tensor_pop(handle)  # its backward has not begun
        del handle
    moves = [f"{op} 0.0:2 128" for op in ("OUT", "DROP", "IN")]
    assert [move for move in moves_of(engine) if " 0.0:2 " in move[1]] == [("F0.0:2", move) for move in moves]


def test_a_group_that_is_no_longer_kept_leaves_at_a_boundary_of_its_own() -> None:
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=0), AdversarialDevice())
    engine.record()
    with engine.iteration():
        chunk = engine.start_chunk()
        _, handle = save(chunk, keep=True)
        assert engine.stats.num_kept_groups == 1
        for _ in range(2):
            chunk.offload_kept_groups("attention")
            assert engine.stats.num_kept_groups == engine.stats.kept_bytes == 0
        del handle
    assert ("F0.0:0/unkeep", "OUT 0.0:0 256") in moves_of(engine)
    assert engine.last_record is not None and engine.last_record.saved[0].reason is not Reason.KEPT


def test_a_tensor_that_was_copied_in_is_saved_again() -> None:
    """As cached rotary embeddings, by each microbatch: the bytes on the device are no longer those that were saved."""
    shared = torch.full((256,), 3.0)
    actions = parse_actions("F0.0 F0.1 B0.0 F0.2 B0.1 B0.2")
    released_at_once = FixedBounds(max_inflight_bytes=0)
    engine = OffloadEngine(OffloadConfig(min_tensor_bytes=1, directory="none", policy=released_at_once))
    losses: dict[ChunkKey, torch.Tensor] = {}
    weight = torch.ones(256, requires_grad=True)
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
    engine.close()


def test_a_release_is_recorded_with_its_own_bytes_alone() -> None:
    """The second group shares a storage that the first has taken to the host before."""
    config = OffloadConfig(min_tensor_bytes=0, policy=FixedBounds(max_inflight_bytes=0))
    engine = OffloadEngine(config, device=AdversarialDevice())
    engine.record()
    shared, own = torch.zeros(64), torch.zeros(16)
    with engine.iteration():
        chunk = engine.start_chunk()
        handles = []
        for tensors in ([shared], [shared, own]):
            chunk.open_group("fc")
            handles += [chunk.tensor_push(tensor) for tensor in tensors]
            chunk.close_group()
        chunk.end_forward()
        del handles
    record = engine.last_record
    assert record is not None
    assert [move.nbytes for move in record.moves if move.op is DROP] == [256, 64]
