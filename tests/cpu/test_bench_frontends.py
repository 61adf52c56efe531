"""benchmarks/run.py frontends, as far as it runs without a GPU."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.programs import BENCHMARK, run_program

pytest.importorskip("rich")
pytest.importorskip("tqdm")
pytest.importorskip("psutil")
pytest.importorskip(
    "transformers", reason="the benchmark's model is one of transformers: pip install '.[integrations]'"
)

from benchmarks.frontends import (
    contenders,
    gauges,
    link_bound,
    longest,
    report,
    settings,
    turns,
    watch,
)
from benchmarks.frontends.workload import Attached, Workload
from offload_engine import ResidencyMeter, SavedTensorTracker  # noqa: E402  # after the tools, as they import it

TINY = dict(hidden=64, ffn=128, heads=4, kv_heads=2, vocab=256)
ON_CPU = [name for name in settings.CONTENDERS if name not in settings.NEED_GPU]


# ---- the command line ----


FLAGS = ("--device", "cpu", "--tiny", "--contender-seconds", "100")  # a busy machine is no reason to stop one


def run_tool(directory: Path, *arguments: str) -> str:
    return run_program(BENCHMARK, "frontends", *FLAGS, *arguments, cwd=directory)[0].out


def test_all_that_run_without_a_gpu_agree_to_the_last_bit(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    plot = tmp_path / "plot.png"
    printed = run_tool(
        tmp_path, "--rounds", "2", "--iters-per-round", "1", "--json", str(file), "--markdown", "--plot", str(plot)
    )
    assert plot.read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    summaries = {record["label"]: record for record in records if record["kind"] == "summary"}
    assert set(summaries) == set(ON_CPU)
    for name, summary in summaries.items():
        assert summary["failure"] is None and summary["num_steps"] == 2, name
        assert summary["is_bitwise_equal"], name
        if name in settings.OURS:
            # What is needed before its copy-out is over stays: how much that is depends on the machine.
            assert summary["engine"]["copied_out_bytes"] >= summary["engine"]["copied_in_bytes"] > 0, name
    missing = {record["label"] for record in records if record["kind"] == "missing"}
    assert missing == settings.NEED_GPU
    assert all(f"| {name}: " in printed for name in ON_CPU)


def test_the_longest_sequence_of_two_contenders(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    plot = tmp_path / "plot.png"
    flags = ("--longest-upper", "128", "--json", str(file), "--plot", str(plot))
    run_tool(tmp_path, "--longest", "--contenders", "none,any_model", *flags)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    found = {record["label"]: record for record in records if record["kind"] == "longest"}
    assert list(found) == ["none", "any_model"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    for one in found.values():
        assert (one["trained"], one["failed"], one["is_final"]) == (128, None, True)


# ---- bounds ----


def test_a_contender_is_stopped_at_its_time_and_no_later() -> None:
    with pytest.raises(watch.OutOfTime, match="its 0 s were over"), watch.Watch(0.1, 1 << 60, lambda: 0):
        time.sleep(5)
    time.sleep(0.7)  # no signal is left that would come now


def test_a_contender_is_stopped_before_the_host_is_out_of_memory() -> None:
    held = iter([1 << 30] + [3 << 30] * 100)
    with (
        pytest.raises(watch.OutOfHostMemory, match="held 3 GiB of host memory, 2 are allowed"),
        watch.Watch(60, 2 << 30, lambda: next(held)),
    ):
        time.sleep(5)


# ---- turns ----


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(settings.Shape(layers=3, seq=32, **TINY), "cpu")


def make_bench(workload: Workload) -> turns.Bench:
    return turns.Bench(workload, gauges.make_gauge("cpu"), turns.Counts(1, 1), 1 << 60, lambda what: None)


def attach_of(name: str) -> contenders.Attach:
    ours = contenders.Ours({"min_tensor_bytes": 0, "directory": "none"}, group_bytes=4096)
    return contenders.make_contenders((name,), "cpu", ours, None)[0][name]


def test_one_that_fails_in_a_forward_leaves_nothing_to_the_next(workload: Workload) -> None:
    @contextmanager
    def leaves_hooks(workload: Workload) -> Iterator[Attached]:
        def enter() -> Any:
            torch._C._autograd._push_saved_tensors_default_hooks(lambda t: t + 1, lambda t: t)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

        yield Attached(around_forward=enter)

    bench = make_bench(workload)
    first = bench.turn("none", attach_of("none"), 0, 60.0, with_timeline=False)
    failed = bench.turn("save", leaves_hooks, 0, 60.0, with_timeline=False)
    second = bench.turn("ckpt", attach_of("ckpt"), 0, 60.0, with_timeline=False)
    assert first["parity"]["is_reference"]
    assert failed["failure"] == "out of memory" and not failed["step_ms"]
    assert second["failure"] is None and second["parity"]["is_bitwise_equal"]
    assert all(grad is None for grad in workload.gradients().values())


def test_wrong_gradients_are_seen(workload: Workload) -> None:
    @contextmanager
    def wrong(workload: Workload) -> Iterator[Attached]:
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t * 2 if t.is_floating_point() else t)
        yield Attached(around_forward=lambda: hooks)

    bench = make_bench(workload)
    bench.turn("none", attach_of("none"), 0, 60.0, with_timeline=False)
    parity = bench.turn("save", wrong, 0, 60.0, with_timeline=False)["parity"]
    assert not parity["is_bitwise_equal"] and parity["num_differing"] > 0 and parity["has_equal_losses"]


# ---- the longest ----


def never_more_than(limit: int) -> Any:
    tried: list[int] = []

    def trial(seq: int) -> longest.Trial:
        tried.append(seq)
        return trial_of(seq, trains=seq <= limit)

    return trial, tried


def trial_of(seq: int, trains: bool = True, is_final: bool = True, **more: Any) -> longest.Trial:
    return longest.Trial(seq=seq, trains=trains, reason=None if trains else "out of memory", is_final=is_final, **more)


def run_search(trial: Any, first: int, unit: int, upper: int, known: Any = (), most: int = 1000) -> longest.Longest:
    search = longest.Search(first, unit, upper, known)
    while not search.is_final and most > 0:
        search.note(trial(search.next_seq))
        most -= 1
    return search.found()


@pytest.mark.parametrize("limit", [0, 4, 5, 63, 64, 100, 1000, 4095, 5000])
@pytest.mark.parametrize("first", [4, 60, 64, 2000, 4096, 10_000])
@pytest.mark.parametrize("known", [(), (4, 8)])
def test_the_longest_that_trains_is_found_from_any_guess(limit: int, first: int, known: tuple[int, ...]) -> None:
    trial, tried = never_more_than(limit)
    short = [trial_of(seq, trains=seq <= limit) for seq in known]
    found = run_search(trial, first, 4, 4096, short)
    assert found.trained == min(limit, 4096) // 4 * 4 and found.is_final
    assert found.failed == (found.trained + 4 if found.trained < 4096 else None)
    assert max(tried, default=0) <= 4096
    assert len(set(tried) | set(known)) == found.num_trials, "no length is tried twice"


def test_attention_within_documents_is_attention_to_each_of_them() -> None:
    shape = settings.Shape(layers=2, seq=64, **TINY)
    packed = Workload(shape, "cpu", documents=16)
    whole = Workload(shape, "cpu")
    whole.model.load_state_dict(packed.model.state_dict())
    positions = torch.arange(64)[None]
    found = packed.model(input_ids=packed.tokens, position_ids=positions).last_hidden_state
    for index in range(4):
        cut = slice(16 * index, 16 * index + 16)
        alone = whole.model(input_ids=packed.tokens[:, cut], position_ids=positions[:, cut]).last_hidden_state
        torch.testing.assert_close(found[:, cut], alone)


# ---- arithmetic ----


def test_saved_bytes_of_a_layer_are_those_that_autograd_saves() -> None:
    def saved_bytes(layers: int) -> int:
        workload = Workload(settings.Shape(layers=layers, seq=32, **TINY), "cpu")
        workload.model.to(torch.bfloat16)
        workload.set_length(32)
        meter = ResidencyMeter()
        tracker = SavedTensorTracker(meter, workload.model.parameters())
        workload.step(Attached(around_forward=lambda: tracker))
        return meter.peak_bytes

    shape = settings.Shape(layers=1, seq=32, **TINY)
    assert saved_bytes(3) - saved_bytes(2) == 32 * link_bound.saved_bytes_per_token(shape)


# ---- rivals ----


# ---- tables ----


def turn(label: str, step_ms: list[float], **more: Any) -> dict[str, Any]:
    parity = {"is_bitwise_equal": True, "num_differing": 0, "is_reference": label == "none"}
    memory = dict.fromkeys(("peak_allocated_bytes", "peak_reserved_bytes", "host_rss_bytes"), 1 << 30)
    record = dict(kind="turn", label=label, round=0, step_ms=step_ms, forward_ms=1.0, warm_up_s=[2.5], failure=None)
    return {**record, "parity": parity, "torch_pinned_bytes": 0, **memory, **more}


def test_tables_have_medians_ratios_and_failures() -> None:
    records = [
        turn("none", [10.0, 12.0]),
        turn("none", [11.0]),
        turn("any_model", [22.0], engine={"host_bytes": 3 << 20}),
        turn("trl", [], failure="stopped: its 15 s were over"),
    ]
    none, ours, stopped = report.summarize(records)
    assert none["step_ms_median"] == 11.0 and none["is_bitwise_equal"] is None
    assert ours["ratio"] == 2.0 and ours["pinned_bytes"] == 3 << 20 and ours["is_bitwise_equal"]
    assert stopped["step_ms_median"] is None and stopped["num_steps"] == 0
    (table, *_) = [rows for rows in report.tables("a model", [none, {**ours, "engine": {}}, stopped])]
    assert table.rows[1][1:5] == ("22.0 (22.0 to 22.0)", "2.0000", "1,024", "1,024")
    assert "its 15 s were over; 0 timed steps, slowest warm-up step 2.5 s" in table.rows[2][0]
    assert table.as_markdown().count("\n| ") == 5
