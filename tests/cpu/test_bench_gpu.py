# SPDX-License-Identifier: Apache-2.0
"""benchmarks/run.py gpu, as far as it runs without a GPU."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("tqdm")

from benchmarks import gradients
from benchmarks.gpu import budget, measure, model, settings


def test_fingerprints_notice_one_bit_and_the_order() -> None:
    grad = torch.randn(1000).bfloat16()
    flipped, swapped = grad.clone(), grad.clone()
    flipped.view(torch.int16)[500] ^= 1
    swapped[[0, 1]] = grad[[1, 0]]
    tensors = grad, grad.clone(), flipped, swapped
    own, same, *others = (gradients.fingerprint({"w": one, "b": None}, [torch.tensor(1.5)]) for one in tensors)
    assert gradients.compare(own, same) == gradients.Difference(2, 0, 0.0, True)
    for other in others:
        difference = gradients.compare(own, other)
        assert difference.num_differing == 1 and difference.max_relative > 0 and not difference.is_bitwise_equal


def test_budgets_lie_between_the_ends_and_one_is_what_full_recomputation_held() -> None:
    def turn(contender: str, reserved_bytes: int, **more: Any) -> dict[str, Any]:
        sizes = {"peak_reserved_bytes": reserved_bytes, "outside_bytes": 40}
        return {"kind": "turn", "contender": contender, "rank": 0, "round": 0, **sizes, **more}

    turns = [turn("budget", 0, budget={"lowest_bytes": 300}), turn("none", 900)]

    def sizes(reserved_bytes: int) -> list[int | None]:
        return [entry.gpu_budget for entry in budget.entries_between([*turns, turn("recompute", reserved_bytes)], 3)]

    assert sizes(500) == [340, 640, 940, 540]
    assert sizes(300) == [340, 640, 940], "the lowest budget is as large"
    assert [entry.gpu_budget for entry in budget.entries_between(turns, 2)] == [340, 940]


class FakeEvent:
    def record(self, stream: Any) -> None: ...

    def elapsed_time(self, other: FakeEvent) -> float:
        return 0.5


class FakeGauge:
    def wait(self, **options: bool) -> None: ...

    start = release = wait

    def read(self) -> dict[str, int]:
        names = "torch_pinned peak_allocated peak_reserved host_rss".split()
        sizes = {f"{name}_bytes": 0 for name in names}
        return {**sizes, "outside_bytes": 2 << 20, "alloc_retries": 0, "device_allocs": 0}


TINY = settings.Shape(layers=4, hidden=32, heads=2, seq=16, mbs=2, nmb=3, vocab=64, ffn=128)


def run_everything(directory: str) -> list[str]:
    """In one of two ranks of a pipeline: the whole program, with what only a GPU has replaced."""
    import torch.distributed as dist

    from benchmarks.gpu import main
    from tests.dist import tiny

    stand_ins: dict[Any, dict[str, Any]] = {
        torch.cuda: {"Event": lambda enable_timing: FakeEvent(), "get_device_name": lambda: "no GPU"},
        measure: {"CudaGauge": FakeGauge},
        model: {
            "make_config": lambda shape, deterministic: tiny.make_config(hidden_size=shape.hidden),
            "build_chunks": lambda shape, config: tiny.make_chunks(config),
            "Training": lambda shape, chunks, training=model.Training: training(shape, chunks, "cpu"),
        },
    }
    for module, names in stand_ins.items():
        vars(module).update(names)
    flags = "--contenders ours,none --modules core_attn --rounds 2 --rotate --iters 1 --warmup 1 --no-micro "
    flags += "--budget-curve 2 --engine min_tensor_bytes=0 --engine directory=none "
    flags += f"--json {directory}/out.jsonl "
    flags += f"--trade-plot {directory}/trade.png"
    shape = " ".join(f"--{name} {value}" for name, value in dataclasses.asdict(TINY).items())
    parsed = settings.parse(f"{flags} {shape} --pp 2".split())
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        run = main.Run(parsed, model.Ranks(dist.get_rank(), dist.get_world_size(), None))
        hooks = num_hooks(run._chunks)
        found = [str(run.execute())]
    step = mock.patch.object(run._bench.training, "step", side_effect=ZeroDivisionError)
    with step, pytest.raises(ZeroDivisionError):  # in a step of ours
        run._bench.turn(run._contenders[0], 2)
    assert num_hooks(run._chunks) == hooks
    return [*found, screen.getvalue()]


def num_hooks(chunks: list[torch.nn.Module]) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for chunk in chunks for m in chunk.modules())


@pytest.mark.dist
def test_the_whole_program_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    from tests.dist.launch import Pipeline, run_ranks

    (*found, shown), other = run_ranks(run_everything, str(tmp_path), pipeline=Pipeline(2))
    assert found == ["0"] and other == [*found, ""]
    assert "ours core_attn" in shown
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    counts = collections.Counter(record["kind"] for record in records)
    assert counts == {"run": 2, "turn": 16, "parity": 16, "summary": 10, "throughput": 5, "budget": 3, "end": 1}
    own, none = [record for record in records if record["kind"] == "turn" and record["rank"] == 0][:2]
    engine = own["engine"]
    assert own["is_confirmed"] and own["copied_out_bytes"] == engine["copied_out_bytes"]
    assert own["copied_out_bytes"] >= own["copied_in_bytes"] > 0  # a slow copy-out is recalled
    assert engine["peak_host_bytes"] == own["host_bytes_max"] > 0
    assert own["num_copies_out"] >= engine["num_offloaded_groups"] > 0 and own["pinned_bytes"] > 0
    assert own["out_gbps"] == pytest.approx(own["copied_out_bytes"] / (0.5 * engine["num_offloaded_groups"]) / 1e6)
    assert (none["copied_out_bytes"], none["is_confirmed"]) == (0, False)
    assert all(record["is_bitwise_equal"] for record in records if record["kind"] == "parity")
    of_first = [r["contender"] for r in records if r["kind"] == "turn" and r["rank"] == 0]
    assert of_first == ["ours", "none", "budget", "none", "budget", "budget", "budget", "ours"]
    everything, tight, loose = [record for record in records if record["kind"] == "budget"]
    assert everything["offloaded_bytes"] == loose["offloaded_bytes"] == 0 < tight["offloaded_bytes"]
    assert tight["predicted_bytes"] <= tight["budget_bytes"] < loose["budget_bytes"]
    assert [one["planning_steps"] for one in (everything, tight)] == [5, 5]
    assert tight["is_above"] and not loose["is_above"]  # its gauge says that 2 MiB are held, whatever moves
    assert (tmp_path / "trade.png").read_bytes().startswith(b"\x89PNG")
