# SPDX-License-Identifier: Apache-2.0
"""benchmarks/run.py gpu, as far as it runs without a GPU."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch

pytest.importorskip("tqdm")

from benchmarks import gradients
from benchmarks.gpu import budget, contenders, copies, measure, model, report, settings
from tests.lookups import present


def test_gradients_of_all_microbatches_are_added_where_they_come_behind_the_backward() -> None:
    """As TransformerEngine's modules do it: `backward_dw` sets the gradient of a weight anew, and calls hooks."""
    module: Any = torch.nn.Linear(1, 1)
    plain: Any = torch.nn.Linear(1, 1)
    hooks: list[Callable[[], None]] = []
    module.weight.skip_backward_post_hook = True
    module.register_wgrad_accumulation_and_reduce_hooks = hooks.append
    delayed = model.DelayedGradients([module, plain])
    module.bias.grad = torch.ones(1)  # added up by autograd

    def backward_dw(value: float) -> None:
        module.weight.grad = torch.full_like(module.weight, value)
        hooks[0]()

    for value in (1.0, 2.0, 4.0):
        backward_dw(value)
    assert [float(present(delayed.of(p))) for p in (module.weight, module.bias)] == [7.0, 1.0]
    delayed.clear()
    backward_dw(8.0)
    assert float(present(delayed.of(module.weight))) == 8.0 and delayed.of(plain.weight) is None


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


# ---- copies ----


def test_a_copy_counts_when_its_twin_on_the_device_is_gone_or_empty() -> None:
    held = copies.HostCopies()
    sources = [torch.ones(8) for _ in range(3)]
    twins = [tensor.clone() for tensor in sources]
    for copy, source in zip(twins, sources, strict=True):
        held.add(copy, source)
    del source
    found = [held.only_bytes]
    sources.pop(0)
    found.append(held.only_bytes)
    sources[0].untyped_storage().resize_(0)
    found.append(held.only_bytes)
    held.remove(twins[0])
    held.remove(twins[0])
    assert [*found, held.only_bytes] == [0, 32, 64, 32]


def test_the_stretch_with_the_most_memory_counts() -> None:
    peaks = iter((5, 9, 9, 7))
    found = copies.HostAtPeak(lambda: next(peaks))
    for host_bytes in (1, 2, 3, 4):
        found.mark(host_bytes)
    assert (found.peak_allocated_bytes, found.host_bytes) == (9, 2)


MIB = 1 << 20


def test_budgets_lie_between_the_ends_and_one_is_what_full_recomputation_held() -> None:
    lowest = turn("budget", 0, 0, [1.0], budget={"lowest_bytes": 300})
    turns = [lowest, turn("none", 0, 0, [1.0], peak_reserved_bytes=900, outside_bytes=40)]

    def sizes(reserved_bytes: int) -> list[int | None]:
        held = turn("recompute", 0, 0, [1.0], peak_reserved_bytes=reserved_bytes, outside_bytes=40)
        return [entry.gpu_budget for entry in budget.entries_between([*turns, held], 3)]

    assert sizes(500) == [340, 640, 940, 540]
    assert sizes(300) == [340, 640, 940], "the lowest budget is as large"
    assert [entry.gpu_budget for entry in budget.entries_between(turns, 2)] == [340, 940]


# ---- statistics ----


def turn(contender: str, rank: int, number: int, step_ms: list[float], **more: Any) -> dict[str, Any]:
    sizes = {"peak_allocated_bytes": 1000, "peak_allocated_bytes_counted": 990, "peak_reserved_bytes": 1100}
    return {
        **{"kind": "turn", "contender": contender, "label": contender, "modules": [], "round": number, "rank": rank},
        **{"step_ms": step_ms, "host_ms": step_ms, "between_steps": {"is_bitwise_equal": True}},
        **dict.fromkeys(("pinned_bytes", "host_rss_bytes", "alloc_retries", "device_allocs"), 0),
        **copies.CopyCounter(None, lambda: 0).moved(),
        **{name: size * MIB for name, size in sizes.items()},
        **more,
    }


def ours(rank: int, number: int, step_ms: list[float], moved: int = 400) -> dict[str, Any]:
    counted = 890 - 5 * number
    sizes = {"peak_allocated_bytes": 900, "peak_allocated_bytes_counted": counted, "peak_reserved_bytes": 1010}
    sizes |= {"copied_out_bytes": moved, "copied_in_bytes": moved, "host_bytes_max": 125, "host_bytes_at_peak": 100}
    rates = {"out_gbps": 50.0, "in_gbps": 54.0}
    return turn("ours", rank, number, step_ms, **{name: size * MIB for name, size in sizes.items()}, **rates)


LINK = {"kind": "link", "rank": 0, "out_gbps": 55.0, "in_gbps": 55.0, "both_out_gbps": 50.0, "both_in_gbps": 50.0}


def test_summaries_have_ratios_falls_and_throughput() -> None:
    parity = {"kind": "parity", "rank": 0, "is_bitwise_equal": False, "num_differing": 1, "max_relative": 0.5}
    records = [
        {"kind": "run", "shape": {"seq": 1000, "mbs": 2, "nmb": 4, "pp": 2}, "world_size": 4},
        LINK,
        *(turn("none", rank, number, [100.0, 101.0]) for number in (0, 1) for rank in (0, 1)),
        *(ours(0, 0, [100.0, 104.0]), ours(1, 0, [102.0, 101.0])),
        *(ours(0, 1, [101.0, 101.0]), ours(1, 1, [100.0, 100.0])),
        *(turn("recompute", rank, 0, [134.0], peak_reserved_bytes=505 * MIB) for rank in (0, 1)),
        *({**parity, "label": label, "is_reference": label == "none"} for label in ("none", "ours")),
    ]
    summaries = report.summarize(records)
    found = {(s["label"], s["rank"]): s for s in summaries}
    own = found["ours", 0]
    assert own["step_ms_median"] == 101.5, "of each step, the time on the slowest rank"
    assert own["round_ratios"] == pytest.approx([103 / 100.5, 101 / 100.5])
    falls = [own[f"fall_{what}"] for what in ("allocated_over_at_peak", "allocated_over_max", "reserved_over_max")]
    assert falls == [1.0, 0.8, 0.72] and own["link_out_ms"] == pytest.approx(400 * MIB / 55e6)
    assert own["is_bitwise_equal"] is False and found["none", 0]["is_bitwise_equal"] is None
    rates = {one["contender"]: one for one in report.throughput(summaries, records)}
    assert rates["none"]["tokens_per_s"] == pytest.approx(16_000 / 0.1005)
    assert rates["ours"]["over_recompute"] == pytest.approx(134.0 / 101.5)
    assert rates["ours"]["reserved_over_recompute"] == 2.0


@pytest.mark.parametrize("pp, bound_ms", [(1, 2 * 8000 * MIB / 55e6), (2, 8000 * MIB / 50e6)])
def test_where_the_bytes_do_not_fit_the_time_the_limit_is_the_link(pp: int, bound_ms: float) -> None:
    records: list[dict[str, Any]] = [{"kind": "run", "shape": {"pp": pp}}, LINK, turn("none", 0, 0, [100.0])]
    own = report.summarize([*records, ours(0, 0, [bound_ms * 1.04], moved=8000)])[1]
    assert own["is_link_bound"] and own["bound_ms"] == pytest.approx(bound_ms)


# ---- turns, on a tiny model without a GPU ----


class FakeEvent:
    def record(self, stream: Any) -> None: ...

    def elapsed_time(self, other: FakeEvent) -> float:
        return 0.5


class FakeGauge:
    threads: ClassVar[set[bool]] = set()  # whether a backward had threads of its own while something was measured

    def wait(self, **options: bool) -> None: ...

    start = release = wait

    def read(self) -> dict[str, int]:
        self.threads.add(torch._C._is_multithreading_enabled())
        names = "torch_pinned peak_allocated peak_reserved host_rss".split()
        sizes = {f"{name}_bytes": 0 for name in names}
        return {**sizes, "outside_bytes": 2 << 20, "alloc_retries": 0, "device_allocs": 0}

    def take_peak(self) -> int:
        return 1

    def current(self) -> tuple[int, int]:
        return 1, 2

    def held(self) -> tuple[int, int]:
        return 0, 0


TINY = settings.Shape(layers=4, hidden=32, heads=2, seq=16, mbs=2, nmb=3, vocab=64, ffn=128)


def switch_flags(kind: str) -> list[Any]:
    """Run in a process with megatron-core's parallel state: the incumbent's flags, built with it and switched to it."""
    from tests.dist import tiny

    names = ["qkv_linear", "core_attn"]
    built = tiny.make_chunks(tiny.make_config(kind, fine_grained_activation_offloading=True, offload_modules=names))
    switched = tiny.make_chunks(tiny.make_config(kind))
    off = _flags(switched)
    places = contenders.switch_incumbent(switched, names)
    on = _flags(switched)
    contenders.switch_incumbent(switched, [])
    return [_flags(built), on, off, _flags(switched), dict(places)]


def _flags(chunks: list[torch.nn.Module]) -> dict[str, Any]:
    flags = {
        f"{name}.{attribute}": value
        for chunk in chunks
        for name, module in chunk.named_modules()
        for attribute, value in vars(module).items()
        if attribute.startswith("offload_") and isinstance(value, bool)
    }
    config: Any = chunks[0].config
    return {**flags, "config": (config.fine_grained_activation_offloading, config.offload_modules)}


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_switching_the_incumbent_gives_the_flags_of_a_model_built_with_it(kind: str) -> None:
    pytest.importorskip("megatron.core")
    from tests.dist.launch import run_ranks

    ((built, on, off, off_again, places),) = run_ranks(switch_flags, kind)
    assert on == built and off_again == off != on
    assert places == {"qkv_linear": 4, "core_attn": 4}


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
    flags += "--single-thread --budget-curve 2 --engine min_tensor_bytes=0 --engine directory=none "
    flags += f"--json {directory}/out.jsonl "
    flags += " ".join(f"--{name}-plot {directory}/{name}.png" for name in ("memory", "trade", "budget"))
    shape = " ".join(f"--{name} {value}" for name, value in dataclasses.asdict(TINY).items())
    parsed = settings.parse(f"{flags} {shape} --pp 2".split())
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        run = main.Run(parsed, model.Ranks(dist.get_rank(), dist.get_world_size(), None))
        hooks = num_hooks(run._chunks)
        found = [str(run.execute()), str(FakeGauge.threads)]
    step = mock.patch.object(run._bench._training, "step", side_effect=ZeroDivisionError)
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
    assert found == ["0", "{False}"] and other == [*found, ""]
    assert "ours core_attn" in shown
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    counts = collections.Counter(record["kind"] for record in records)
    assert counts == {"run": 2, "turn": 16, "parity": 16, "summary": 10, "throughput": 5, "budget": 3, "end": 1}
    own, none = [record for record in records if record["kind"] == "turn" and record["rank"] == 0][:2]
    engine = own["engine"]
    assert own["is_confirmed"] and own["copied_out_bytes"] == engine["copied_out_bytes"]
    assert own["copied_out_bytes"] >= own["copied_in_bytes"] > 0  # a slow copy-out is recalled
    assert engine["peak_host_bytes"] == own["host_bytes_max"] > own["host_bytes_at_peak"] == 0  # at its first
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
    for name in ("memory.png", "trade.png", "budget.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
