# SPDX-License-Identifier: Apache-2.0
"""A share of what each chunk saves leaves, in the order of its forward; a name may have a threshold of its own."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from offload_engine import (
    ChunkKey,
    GroupTraits,
    OffloadConfig,
    OffloadEngine,
    Planned,
    ResidentBudget,
    group_commit,
)
from offload_engine.schedule import no_pipelining, one_forward_one_backward

KIB = 1 << 10
SIZES = [4, 2, 1, 1]  # KiB that the groups of a chunk save


class Scaled(torch.autograd.Function):
    """Saves one tensor of a given size."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(saved)
        return x * 2

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (saved,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * saved[0], None


def step(engine: OffloadEngine, num_waiting: int = 1, sizes: Sequence[int] = SIZES) -> list[int]:
    """Run a step; return the sizes, in KiB, of the groups that leave in its first chunk."""
    actions = one_forward_one_backward(num_waiting, 0, 4) if num_waiting > 1 else no_pipelining(4)
    left: list[int] = []
    outputs: dict[ChunkKey, torch.Tensor] = {}
    with engine.iteration(actions):
        for action in actions:
            if action.kind == "B":
                outputs.pop(action.chunk).backward()
                continue
            chunk, x = engine.start_chunk(action.chunk), torch.ones(1, requires_grad=True)
            for number, kib in enumerate(sizes):
                with chunk.saved_tensors_hooks():
                    group = chunk.open_group(f"group{number}", GroupTraits(layer=number))
                    x = Scaled.apply(x, torch.full((kib * KIB // 4,), 2.0))
                x = group_commit(x, chunk)
                if action.chunk.microbatch == 0 and group.leaving_bytes + group.on_host_bytes:
                    left.append(kib)
            chunk.end_forward()
            outputs[action.chunk] = x
    return left


def engine_with(**settings: object) -> OffloadEngine:
    return OffloadEngine(OffloadConfig(min_tensor_bytes=1, directory="none").replace(**settings))


@pytest.mark.parametrize(
    ("fraction", "leaving"), [(1.0, SIZES), (0.9, [4, 2, 1]), (0.75, [4, 2]), (0.74, [4]), (0.5, [4]), (0.0, [])]
)
def test_a_fraction_leaves_from_the_second_step_on(fraction: float, leaving: list[int]) -> None:
    engine = engine_with(fraction=fraction)
    assert [step(engine) for _ in range(3)] == [SIZES, leaving, leaving]
    assert engine.stats.num_storages_left == 0
    engine.close()


def test_a_fraction_is_of_what_the_step_before_has_saved_unless_that_raised() -> None:
    engine = engine_with(fraction=0.5)
    step(engine)
    with pytest.raises(ZeroDivisionError), engine.iteration(no_pipelining(1)):
        chunk = engine.start_chunk()
        with chunk.saved_tensors_hooks():
            chunk.open_group("group0")
            x = Scaled.apply(torch.ones(1, requires_grad=True), torch.ones(1))
        group_commit(x, chunk)
        raise ZeroDivisionError
    assert step(engine) == [4]
    assert step(engine, sizes=[1, 1, 1, 1]) == [1, 1, 1, 1]
    assert step(engine, sizes=[1, 1, 1, 1]) == [1, 1]
    engine.close()


@pytest.mark.parametrize(
    ("kib", "num_waiting", "leaving"), [(2, 1, [4, 2]), (2, 2, [4, 2, 1]), (4, 2, [4, 2]), (99, 1, [])]
)
def test_bytes_that_stay_are_shared_by_the_chunks_that_wait(kib: int, num_waiting: int, leaving: list[int]) -> None:
    engine = engine_with(kept_bytes=kib * KIB)
    assert [step(engine, num_waiting) for _ in range(2)] == [SIZES, leaving]
    engine.close()


def test_a_group_may_have_a_threshold_of_its_own() -> None:
    engine = engine_with()
    with engine.iteration(no_pipelining(1)):
        chunk, x = engine.start_chunk(), torch.ones(1, requires_grad=True)
        for least in (0, 2 * KIB, 3 * KIB):
            with chunk.saved_tensors_hooks():
                chunk.open_group("group", GroupTraits(min_bytes=least))
                x = Scaled.apply(x, torch.full((512,), 2.0))
            x = group_commit(x, chunk)
        assert [group.nbytes for group in chunk.groups] == [2 * KIB, 2 * KIB, 0]
        x.backward()
    engine.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fraction": 1.5}, "fraction must be from 0 to 1, got 1.5"),
        ({"fraction": "half"}, "fraction must be a number"),
        ({"fraction": 0.5, "policy": ResidentBudget(1)}, "fraction=0.5 and policy=.* both decide what stays"),
        ({"kept_bytes": 7, "policy": Planned()}, "kept_bytes=7 and policy=.* both decide what stays"),
        ({"fraction": 0.5, "gpu_budget": 1}, "fraction=0.5 and gpu_budget=1 both decide"),
    ],
)
def test_bad_shares_are_rejected(settings: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        OffloadConfig(**settings)  # type: ignore[arg-type]
