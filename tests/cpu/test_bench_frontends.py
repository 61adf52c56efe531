"""tools/bench_frontends.py, as far as it runs without a GPU."""

from __future__ import annotations

import dataclasses
import gc
import json
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload_engine import FixedBounds, GroupWindow
from tests.cpu.test_bench_gpu import tools_on_path

pytest.importorskip("rich")
pytest.importorskip("tqdm")
pytest.importorskip("psutil")
pytest.importorskip(
    "transformers", reason="the benchmark's model is one of transformers: pip install '.[integrations]'"
)
ROOT = Path(__file__).parents[2]

with tools_on_path():
    from bench_frontends import (
        contenders,
        gauges,
        link_bound,
        longest,
        longest_bench,
        report,
        rivals,
        settings,
        turns,
        watch,
    )
    from bench_frontends.workload import Attached, Workload
    from bench_gpu import leftovers

from offload_engine import ResidencyMeter, SavedTensorTracker  # noqa: E402  # after the tools, as they import it

TINY = dict(hidden=64, ffn=128, heads=4, kv_heads=2, vocab=256)
ON_CPU = [name for name in settings.CONTENDERS if name not in settings.NEED_GPU]


# ---- the command line ----


def test_defaults_are_the_model_of_qwen2_7b() -> None:
    shape = settings.parse([]).shape
    assert (shape.hidden, shape.ffn, shape.heads, shape.kv_heads) == (3584, 18944, 28, 4)
    assert (shape.seq, shape.layers) == (32768, 4)
    assert settings.parse(["--seq", "4096"]).shape.layers == 12
    assert settings.parse(["--quick", "--layers", "5"]).shape.layers == 5


def test_quick_omits_slow_imports_unless_named() -> None:
    assert "te_v2" in settings.parse([]).contenders
    assert "te_v2" not in settings.parse(["--quick"]).contenders
    assert settings.parse(["--quick", "--contenders", "te_v2,none"]).contenders == ("te_v2", "none")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--contenders ours,none", "ours"),
        ("--heads 5", "do not divide"),
        ("--layers 0", "at least 1"),
        ("--rounds 0", "at least 1"),
        ("--host-gib 0", "--host-gib must be positive"),
        ("--engine horizon_bytes", "NAME=VALUE"),
        ("--rivals no/such/folder", "not a folder"),
        ("--total-seconds 9", "of --longest: add --longest"),
        ("--resume trials.jsonl", "of --longest: add --longest"),
        ("--longest --resume nowhere.jsonl", "nowhere.jsonl is not a file"),
        ("--recording --longest", "give one of them"),
        ("--documents 3000", "do not divide a sequence of 32,768"),
    ],
)
def test_nonsense_is_an_error_that_says_so(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.parse(arguments.split())
    assert message in capsys.readouterr().err


FLAGS = ("--device", "cpu", "--tiny", "--contender-seconds", "100")  # a busy machine is no reason to stop one


def run_tool(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "tools" / "bench_frontends.py"), *FLAGS, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_all_that_run_without_a_gpu_agree_to_the_last_bit(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    plot = tmp_path / "plot.png"
    printed = run_tool(
        "--rounds", "2", "--iters-per-round", "1", "--json", str(file), "--markdown", "--plot", str(plot)
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


def test_what_recordings_cost(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    printed = run_tool("--recording", "--rounds", "2", "--json", str(file))
    found = [record for line in file.read_text().splitlines() if (record := json.loads(line))["kind"] == "recording"]
    assert [(one["seq"], one["part"]) for one in found] == [(n, p) for n in (64, 128) for p in settings.RECORDED_PARTS]
    assert {one["part"]: len(one["step_ms"]) for one in found} == {
        **dict.fromkeys(("none", "each"), 10),
        **dict.fromkeys(("one", "behind_one", "file", "behind_file"), 2),
    }
    assert all(title in printed for title in settings.RECORDED_PARTS.values())


def test_the_longest_sequence_of_two_contenders(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    plot = tmp_path / "plot.png"
    flags = ("--longest-upper", "128", "--json", str(file), "--plot", str(plot))
    run_tool("--longest", "--contenders", "none,any_model", *flags)
    records = [json.loads(line) for line in file.read_text().splitlines()]
    found = {record["label"]: record for record in records if record["kind"] == "longest"}
    assert list(found) == ["none", "any_model"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    for one in found.values():
        assert (one["trained"], one["failed"], one["is_final"]) == (128, None, True)


def test_a_search_goes_on_from_its_records(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    flags = ("--longest", "--longest-upper", "128", "--contenders", "none", "--json", str(file))
    run_tool(*flags)
    before = [json.loads(line) for line in file.read_text().splitlines()]
    run_tool(*flags, "--resume", str(file))
    after = [json.loads(line) for line in file.read_text().splitlines()][len(before) :]
    assert {record["label"] for record in before if record["kind"] == "trial"} == {"warm-up", "none"}
    assert {record["label"] for record in after if record["kind"] == "trial"} == {"warm-up"}
    found, again = (next(r for r in records if r["kind"] == "longest") for records in (before, after))
    assert {**found, "seconds": 0.0} == {**again, "seconds": 0.0, **{k: found[k] for k in found.keys() - again.keys()}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (json.dumps({"kind": "run", "shape": {"layers": 2}}) + "\n", "shape was {'layers': 2}, and is "),
        ('{"kind": "tri', "it does not say of which"),
    ],
)
def test_a_search_of_another_model_is_not_gone_on_with(content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    file.write_text(content)
    with pytest.raises(AssertionError, match=f"is of another run: {message}"):
        run_tool("--longest", "--longest-upper", "64", "--contenders", "none", "--resume", str(file))


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


def test_leftovers_of_others_are_counted_apart() -> None:
    left, taken = 3 << 30, 2 << 30
    with (
        pytest.raises(watch.CrowdedOut, match="it held 2 GiB of host memory, 1 are allowed, as others left 3"),
        watch.Watch(60, 4 << 30, lambda: taken, crowded_bytes=left),
    ):
        time.sleep(5)


@dataclasses.dataclass
class FakeHost:
    """What psutil and torch's pinned allocator would say."""

    resident: int = 2 << 30
    pinned: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeHost:
        monkeypatch.setattr(gauges, "resident_set", lambda: self.resident)
        monkeypatch.setattr(gauges, "pinned_bytes", lambda is_cuda: self.pinned)
        return self

    def pin(self, nbytes: int, is_resident: bool = True) -> None:
        self.pinned += nbytes
        self.resident += nbytes * is_resident


@pytest.mark.parametrize("is_resident", [True, False])
def test_pinned_memory_counts_once_whether_or_not_it_is_resident(
    monkeypatch: pytest.MonkeyPatch, is_resident: bool
) -> None:
    host = FakeHost().install(monkeypatch)
    use = gauges.HostUse(is_cuda=True)
    host.pin(100 << 30, is_resident)
    assert use.taken() == 100 << 30


def test_memory_that_is_not_pinned_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeHost().install(monkeypatch)
    host.pin(100 << 30)
    use = gauges.HostUse(is_cuda=True)
    assert use.taken() == 0
    host.pin(30 << 30)
    host.resident += 10 << 30
    assert use.taken() == 40 << 30


def test_a_contender_may_not_take_the_memory_that_others_left(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = FakeHost().install(monkeypatch)
    bench = turns.Bench(workload, gauges.make_gauge("cpu"), turns.Counts(1, 1), 101 << 30, lambda what: None)
    host.pin(90 << 30)  # left behind
    with pytest.raises(watch.CrowdedOut, match="it held 12 GiB of host memory, 11 are allowed, as others left 90"):
        with bench.watch(60.0):
            host.pin(12 << 30)
            time.sleep(5)
    with bench.watch(60.0):  # begins anew
        time.sleep(0.7)


def test_the_reason_is_that_of_the_length_that_failed() -> None:
    def trial(seq: int, reason: str | None, is_final: bool = True) -> Any:
        return longest.Trial(seq=seq, trains=reason is None, reason=reason, is_final=is_final)

    search = longest.Search(8, 1, 100)
    search.note(trial(8, "out of memory"))
    search.note(trial(search.next_seq, "its time was over", is_final=False))
    assert search.found().reason == "its time was over"
    search.note(trial(search.next_seq, None))
    assert search.is_final and search.found().reason == "out of memory"
    search = longest.Search(4, 1, 4)
    search.note(trial(4, "its time was over", is_final=False))
    search.note(trial(4, None))
    assert search.is_final and search.found().reason is None


def test_host_memory_limit_is_that_of_the_machine_at_most() -> None:
    import psutil

    assert 0 < watch.host_memory_limit() <= psutil.virtual_memory().total


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


def test_one_that_is_too_slow_says_how_far_it_came(workload: Workload) -> None:
    @contextmanager
    def slow(workload: Workload) -> Iterator[Attached]:
        def pack(tensor: torch.Tensor) -> torch.Tensor:
            time.sleep(0.05)
            return tensor

        yield Attached(around_forward=lambda: torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t))

    record = make_bench(workload).turn("trl", slow, 0, 0.3, with_timeline=False)
    assert record["failure"] == "stopped: its 0 s were over"
    assert record["step_ms"] == [] and record["seconds"] < 5


class KeptByName(gauges.CpuGauge):
    """Counts what leaking contenders put here, as an allocator would."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def held(self) -> leftovers.Held:
        return leftovers.Held(sum(tensor.nbytes for tensor in self.kept), 0)


def test_leftovers_of_a_contender_are_in_its_record_and_later_ones(workload: Workload) -> None:
    gauge = KeptByName()

    @contextmanager
    def leaks(workload: Workload) -> Iterator[Attached]:
        gauge.kept.append(torch.empty(70 << 20, dtype=torch.uint8))
        yield Attached()

    bench = turns.Bench(workload, gauge, turns.Counts(1, 1), 1 << 60, lambda what: None)
    attaches = [("none", attach_of("none")), ("te_v2", leaks), ("ckpt", attach_of("ckpt")), ("none", attach_of("none"))]
    records = [bench.turn(name, attach, 0, 60.0, with_timeline=False) for name, attach in attaches]
    assert [record["left_device_bytes"] for record in records] == [0, 70 << 20, 0, 0]
    assert [record["found_device_bytes"] for record in records] == [0, 0, 70 << 20, 70 << 20]
    (rows, *_) = report.tables("a model", report.summarize(records))
    found = "(its peaks include 70 MiB device that earlier contenders left)"
    assert [found in row[0] for row in rows.rows] == [True, False, True]  # one of the turns of none came after it
    assert rows.rows[1][0].endswith("(left 70 MiB device behind)")


def test_memory_freed_with_the_contender_is_no_leftover(workload: Workload) -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    class Gauge(KeptByName):
        def held(self) -> leftovers.Held:
            return leftovers.Held(sum(tensor.nbytes for tensor in alive), 0)

    @contextmanager
    def holds(workload: Workload) -> Iterator[Attached]:
        kept = torch.empty(70 << 20, dtype=torch.uint8)
        alive.add(kept)
        yield Attached(stats=lambda: None if kept.numel() else kept)

    bench = turns.Bench(workload, Gauge(), turns.Counts(1, 1), 1 << 60, lambda what: None)
    assert bench.turn("trl", holds, 0, 60.0, with_timeline=False)["left_device_bytes"] == 0


class KeepsWhatItSaves:
    """As offload handlers do: its hooks are in the graph, and in it are tensors of that graph."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> int:
        self.kept.append(tensor)
        return len(self.kept) - 1

    def unpack(self, index: int) -> torch.Tensor:
        return self.kept[index]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_graph_in_a_cycle_with_its_contender_goes_with_it(workload: Workload, where: str) -> None:
    saved: list[weakref.ref[torch.Tensor]] = []

    @contextmanager
    def cyclic(workload: Workload) -> Iterator[Attached]:
        handler = KeepsWhatItSaves()

        def pack(tensor: torch.Tensor) -> int:
            saved.append(weakref.ref(tensor))
            if where == "forward" and len(saved) > 50:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return handler.pack(tensor)

        def unpack(index: int) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory")

        yield Attached(around_forward=lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack))

    bench = make_bench(workload)
    parameters = [*workload.model.parameters()]
    own = {tensor.data_ptr() for tensor in (*parameters, *workload.model.buffers(), workload.tokens)}
    own |= {tensor.data_ptr() for tensor in workload._weights}
    failed = bench.turn("te_v1", cyclic, 0, 60.0, with_timeline=False)
    assert failed["failure"] == "out of memory"
    gc.collect()
    left = [tensor for ref in saved if (tensor := ref()) is not None]
    assert len(saved) > 50 and all(t.numel() == 0 or t.untyped_storage().data_ptr() in own for t in left)
    assert all(parameter.is_leaf and parameter.requires_grad and parameter.numel() for parameter in parameters)
    assert bench.turn("none", attach_of("none"), 0, 60.0, with_timeline=False)["failure"] is None


@pytest.mark.parametrize("name", ON_CPU)
def test_a_contender_takes_itself_off_again(workload: Workload, name: str) -> None:
    def state() -> list[Any]:
        modules = [(name, type(module)) for name, module in workload.model.named_modules()]
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in workload.model.modules()]
        return [modules, hooks, [vars(layer).get("forward") for layer in workload.layers]]

    before = state()
    with attach_of(name)(workload) as attached:
        workload.step(attached)
    assert state() == before
    assert not any(getattr(layer, "gradient_checkpointing", False) for layer in workload.layers)


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("name", ON_CPU)
def test_after_running_out_of_memory_the_next_turn_is_as_ever(workload: Workload, name: str, where: str) -> None:
    def run_out(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    bench = make_bench(workload)
    bench.turn("none", attach_of("none"), 0, 60.0, with_timeline=False)
    module = workload.layers[1].mlp
    register = module.register_forward_hook if where == "forward" else module.register_full_backward_pre_hook
    hook = register(run_out)
    failed = bench.turn(name, attach_of(name), 0, 60.0, with_timeline=False)
    hook.remove()
    again = bench.turn(name, attach_of(name), 1, 60.0, with_timeline=False)
    assert failed["failure"] == "out of memory"
    assert again["failure"] is None and again["parity"]["is_bitwise_equal"]


# ---- the longest ----


def test_the_longest_is_on_the_command_line() -> None:
    plain = settings.parse(["--longest"])
    assert (plain.shape.layers, plain.longest_unit, plain.total_seconds, plain.documents) == (4, 8192, 330.0, None)
    assert settings.parse(["--longest", "--documents", "4096"]).documents == 4096


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


def test_a_guess_that_is_right_costs_two_trials_and_one_that_is_nearly_right_not_many_more() -> None:
    short = [trial_of(4096), trial_of(8192)]
    for guess, most in ((100, 2), (101, 2), (99, 4), (103, 4)):
        trial, tried = never_more_than(100 * 4096)
        found = run_search(trial, guess * 4096, 4096, 1000 * 4096, short)
        assert found.trained == 100 * 4096 and len(tried) <= most, guess


def test_a_search_that_is_broken_off_says_so() -> None:
    trial, tried = never_more_than(1000)
    found = run_search(trial, 64, 4, 4096, most=2)
    assert len(tried) == 2 and not found.is_final and found.trained <= 1000


def test_a_trial_that_was_stopped_says_nothing_of_its_length() -> None:
    search = longest.Search(40, 4, 4096)
    search.note(trial_of(40))
    before = search.next_seq
    search.note(trial_of(before, trains=False, is_final=False))
    found = search.found()
    assert search.next_seq == before and (found.trained, found.failed, found.is_final) == (40, None, False)
    assert found.reason == "out of memory"


def short_trials(device: tuple[int, int], host: tuple[int, int] = (0, 0)) -> list[longest.Trial]:
    """Of 8 and 16 tokens; what is pinned and reserved: so much, and so much for each token."""
    return [
        trial_of(seq, peak_allocated_bytes=device[0] + device[1] * seq, host_bytes=host[0] + host[1] * seq)
        for seq in (8, 16)
    ]


@pytest.mark.parametrize(
    ("device", "host", "stays", "expected"),
    [
        ((100, 3), (0, 0), False, 300),  # nothing goes to the host
        ((100, 3), (0, 10), False, 50),  # the host ends it
        ((100, 3), (0, 10), True, 107),  # beyond 50 tokens 13 bytes of each stay: (1000 - 100 + 500) / 13
        ((100, 3), (0, 1), True, 300),  # the host is large enough
        ((100, 0), (0, 0), False, 5000),  # nothing grows
    ],
)
def test_the_length_is_predicted_by_the_memory_of_device_and_host(
    device: tuple[int, int], host: tuple[int, int], stays: bool, expected: int
) -> None:
    limits = longest.Limits(device_bytes=1000, host_bytes=500, upper=5000, stays_on_device=stays)
    assert longest.predict(*short_trials(device, host), limits) == expected


def test_seconds_are_predicted_by_two_short_trials_and_by_arithmetic() -> None:
    def seconds(seq: int) -> float:
        return 0.5 * seq + 0.25 * seq * seq

    one, other = (trial_of(seq, seconds=2.0 * seq) for seq in (8, 16))
    assert longest.predict_seconds(one, other, 100, float) == pytest.approx(200.0)
    assert longest.predict_seconds(one, other, 100, seconds) == pytest.approx(32.0 * seconds(100) / seconds(16))
    slow_start = trial_of(8, seconds=100.0)
    assert longest.predict_seconds(slow_start, other, 100, float) == pytest.approx(200.0)


@dataclasses.dataclass
class FakeMachine:
    """A device, a host and a clock, and a contender that takes so much of each for a token."""

    device_bytes: int = 100_000
    host_bytes: int = 50_000
    device_per_token: float = 30.0
    host_per_token: float = 0.0
    stays_on_device: bool = False
    seconds_per_token: float = 0.001
    fragments: float = 1.0  # what a long sequence takes over what short ones let expect
    hangs_from: int = 1 << 60
    now: float = 0.0
    peak: float = 0.0
    pinned: float = 0.0
    tried: list[int] = dataclasses.field(default_factory=list)

    def step(self, attached: Attached) -> None:
        seq = self.tried[-1]
        if seq >= self.hangs_from:
            self.now += self.left
            raise watch.OutOfTime("its 1 s were over")
        host = self.host_per_token * seq
        excess = max(0.0, host - self.host_bytes)
        self.pinned = min(host, self.host_bytes)
        self.peak = 10_000 + seq * self.device_per_token * (self.fragments if seq > 512 else 1.0)
        self.now += seq * self.seconds_per_token
        if excess and not self.stays_on_device:
            raise watch.OutOfHostMemory("it held too much")
        if self.peak + excess > self.device_bytes:
            raise torch.OutOfMemoryError("CUDA out of memory")

    @contextmanager
    def watch(self, seconds: float) -> Iterator[None]:
        self.left = seconds
        yield

    @contextmanager
    def clean(self) -> Iterator[dict[str, int]]:
        yield {}

    def bench(self) -> Any:
        workload = SimpleNamespace(
            set_length=self.tried.append, make_gradients=lambda: None, step=self.step, wait=lambda: None
        )
        return SimpleNamespace(clean=self.clean, workload=workload, watch=self.watch, on_step=lambda what: None)

    def gauge(self) -> Any:
        return SimpleNamespace(
            start=lambda: None,
            read=lambda: {
                "peak_allocated_bytes": int(self.peak),
                "peak_reserved_bytes": 2 * int(self.peak),
                "peak_pinned_bytes": int(self.pinned),
            },
        )

    def search_bench(self, **options: Any) -> Any:
        limits = longest.Limits(
            device_bytes=self.device_bytes,
            host_bytes=self.host_bytes,
            upper=100_000,
            stays_on_device=self.stays_on_device,
        )
        return longest_bench.LongestBench(
            self.bench(),
            self.gauge(),
            64,
            limits=lambda name: limits,
            upper=lambda name: 100_000,
            flops=float,
            clock=lambda: self.now,
            **options,
        )

    def search(self, seconds: float, contender_seconds: float = 1e9) -> dict[str, Any]:
        return self.search_bench().run({"save": no_contender}, seconds, contender_seconds)[0]


@contextmanager
def no_contender(workload: Any) -> Iterator[Attached]:
    yield Attached()


@pytest.mark.parametrize(
    ("machine", "expected", "reason"),
    [
        (FakeMachine(), 2944, "out of memory"),  # (100,000 - 10,000) / 30 = 3,000
        (FakeMachine(host_per_token=100.0), 448, "stopped: it held too much"),  # 50,000 / 100 = 500
        (FakeMachine(host_per_token=100.0, stays_on_device=True), 1024, "out of memory"),  # 140,000 / 130 = 1,076
        (FakeMachine(fragments=1.05), 2816, "out of memory"),  # 2,857
        (FakeMachine(device_per_token=2000.0), 0, "out of memory"),
    ],
)
def test_the_longest_on_a_machine(machine: FakeMachine, expected: int, reason: str) -> None:
    found = machine.search(1000.0)
    assert (found["trained"], found["is_final"]) == (expected, True)
    assert found["reason"] == reason
    assert machine.tried[:2] == [64, 128][: len(machine.tried)] and len(machine.tried) <= 7
    json.dumps(found)


def test_table_has_seen_and_expected_lengths_if_time_is_short() -> None:
    machine = FakeMachine()
    found = machine.search(5.0)  # the two short ones take 0.2 s, one of 3,000 tokens 3 s
    assert (found["trained"], found["failed"], found["is_final"]) == (2944, None, False)
    assert found["guess"] == 3000 and found["reason"] == "there was no time left for it"
    row = report.tables("a model", [found])[0].rows[0]
    assert row[1:5] == ("at least 2,944", "", "there was no time left for it", "3,000")
    assert machine.now <= 5.0


def test_known_lengths_are_not_tried_again() -> None:
    machine = FakeMachine()
    records: list[dict[str, Any]] = []
    bench = machine.search_bench(on_record=records.append)
    bench.run({"save": no_contender}, 5.0, 1e9)
    known = longest.known_trials([{"kind": "run"}, *records, {**records[-1], "seq": 3008, "is_final": False}])
    assert [one.seq for one in known["save"]] == machine.tried == [64, 128, 2944]
    (found,) = bench.run({"save": no_contender}, 1000.0, 1e9, known)
    assert machine.tried[3:] == [3008]
    assert (found["trained"], found["failed"], found["is_final"], found["num_trials"]) == (2944, 3008, True, 4)


def test_without_any_time_nothing_is_tried() -> None:
    machine = FakeMachine()
    found = machine.search(0.0)
    assert machine.tried == [] and (found["trained"], found["guess"], found["is_final"]) == (0, None, False)
    assert report.tables("a model", [found])[0].rows[0][1] == "not known"


def test_a_trial_that_hangs_is_stopped_and_tried_once_more_at_the_end() -> None:
    machine = FakeMachine(hangs_from=1000)
    found = machine.search(30.0)
    assert machine.tried == [64, 128, 2944 + 56, 2944 + 56][:2] + [2944, 2944] and machine.now <= 31.0
    assert (found["trained"], found["is_final"], found["reason"]) == (128, False, "stopped: its 1 s were over")


def two_contenders(machine: FakeMachine, slow_by: float) -> Any:
    """Make two contenders, of which the first takes so many times as long on the fake machine's clock."""

    def attach_with(factor: float) -> contenders.Attach:
        @contextmanager
        def attach(workload: Any) -> Iterator[Attached]:
            machine.seconds_per_token = 0.001 * factor
            yield Attached()

        return attach

    return {"save": attach_with(slow_by), "trl": attach_with(1.0)}


def test_interrupted_search_resumes_in_the_time_left() -> None:
    machine = FakeMachine()
    slow, quick = machine.search_bench().run(two_contenders(machine, 10.0), 1000.0, contender_seconds=20.0)
    assert slow["seconds"] > 40.0 and slow["is_final"] and slow["trained"] == 2944
    assert quick["is_final"]
    assert machine.tried.index(2944, machine.tried.index(2944) + 1) < len(machine.tried) - 1, "the quick one in between"


def test_contender_with_too_long_a_trial_leaves_time_to_the_others() -> None:
    machine = FakeMachine()
    slow, quick = machine.search_bench().run(two_contenders(machine, 100.0), 200.0, contender_seconds=1e9)
    assert (slow["trained"], slow["guess"], slow["is_final"]) == (128, 3000, False)
    assert quick["trained"] == 2944 and quick["is_final"] and machine.now <= 200.0


def test_each_trial_is_recorded_at_once() -> None:
    machine, records = FakeMachine(), list[dict[str, Any]]()
    machine.search_bench(on_record=records.append).run({"save": no_contender}, 100.0, 100.0)
    assert [record["seq"] for record in records] == machine.tried
    assert [record["trains"] for record in records] == [True, True, True, False]
    json.dumps(records)


def test_the_longest_are_sorted_with_settings_and_what_was_left_behind(tmp_path: Path) -> None:
    machine = FakeMachine()
    found = machine.search(1000.0)
    found |= {"left_device_bytes": 70 << 20}
    short = {**found, "label": "wrapper", "trained": 64, "is_final": False, "horizon": 1, "left_device_bytes": 0}
    rows = report.tables("a model", [short, found])[0].rows
    assert [row[1] for row in rows] == ["2,944, proven", "at least 64"]
    assert rows[0][0].endswith("(left 70 MiB device behind)") and rows[1][0].endswith(", horizon_groups=1")
    report.plot_longest([short, found], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_checkpointed_inputs_have_the_least_horizon_unless_there_is_another() -> None:
    plain = contenders.Ours({})
    assert plain.checkpoint_config == plain.config
    lowest = contenders.Ours({}, horizon=1)
    assert lowest.checkpoint_config.policy == GroupWindow(1) and lowest.config.policy is None
    assert contenders.Ours({"horizon_bytes": 5}, horizon=1).checkpoint_config.policy == FixedBounds(horizon_bytes=5)


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


def test_attention_within_documents_saves_what_attention_to_all_saves() -> None:
    shape = settings.Shape(layers=2, seq=64, **TINY)
    saved = []
    for documents in (None, 16):
        workload = Workload(shape, "cpu", documents=documents)
        meter = ResidencyMeter()
        tracker = SavedTensorTracker(meter, workload.model.parameters())
        workload.step(Attached(around_forward=lambda tracker=tracker: tracker))
        saved.append(meter.peak_bytes)
    assert saved[0] == saved[1]


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


def test_of_a_step_that_the_link_does_not_bound_the_least_time_is_its_computation() -> None:
    bound = link_bound.link_bound(11_000_000, 1_000_000, forward_ms=5.0, backward_ms=10.0, out_gbps=50.0, in_gbps=25.0)
    assert (bound.moved_bytes, bound.out_ms, bound.in_ms) == (10_000_000, 0.2, 0.4)
    assert bound.step_ms == bound.compute_ms == 15.0 and not bound.is_bound_by_link


def test_either_way_may_be_bound_by_the_link() -> None:
    bound = link_bound.link_bound(600_000_000, 0, forward_ms=5.0, backward_ms=20.0, out_gbps=50.0, in_gbps=50.0)
    assert bound.step_ms == 12.0 + 20.0 and bound.is_bound_by_link


def test_nothing_is_tried_that_cannot_fit() -> None:
    shape = settings.Shape(layers=8, seq=1, **TINY)
    one_mlp = 4 * 128 * 2
    with_checkpointing = link_bound.longest_possible(shape, 1000 * one_mlp, 1 << 40, is_checkpointed=True)
    assert with_checkpointing == 1000
    everything = link_bound.saved_bytes_per_token(shape) * 8
    assert link_bound.longest_possible(shape, 10 * everything, 5 * everything, is_checkpointed=False) == 15


# ---- rivals ----

FILE_OF_A_RIVAL = """
import torch
from not_installed.helpers.device import get_device

class OffloadActivations(torch.autograd.graph.saved_tensors_hooks):
    device = get_device()
"""


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


@pytest.mark.parametrize("path", ["rival/models/offloading.py", "rival_offloading.py"])
def test_a_file_is_loaded_with_stand_ins_which_are_gone_afterwards(tmp_path: Path, path: str) -> None:
    write(tmp_path / path, FILE_OF_A_RIVAL)
    stand_ins = {"not_installed.helpers.device": {"get_device": lambda: "cuda:7"}}
    loaded = rivals.load_file("rival.models.offloading", tmp_path, stand_ins)
    assert loaded.OffloadActivations.device == "cuda:7"
    assert not [name for name in sys.modules if name.startswith("not_installed")]


def test_stand_in_never_hides_an_installed_package(tmp_path: Path) -> None:
    write(tmp_path / "rival.py", "import json\nvalue = json.dumps([])\n")
    assert rivals.load_file("rival", tmp_path, {"json": {"dumps": None}}).value == "[]"


def test_missing_package_is_reported_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(rivals.Missing, match="give its file no_such/rival.py with --rivals"):
        rivals.load_file("no_such.rival", None, {})
    with pytest.raises(rivals.Missing, match="has no no_such/rival.py"):
        rivals.load_file("no_such.rival", tmp_path, {})
    write(tmp_path / "no_such" / "rival.py", "import not_installed_either")
    with pytest.raises(rivals.Missing, match="does not load"):
        rivals.load_file("no_such.rival", tmp_path, {})


FILE_LIKE_VERL = """
from verl.utils.device import get_torch_device
from verl.utils.fsdp_utils import FSDPModule as FSDP2

def enable_activation_offloading(model, strategy, enable_ckpt):
    assert strategy == "fsdp2"
    for layer in model.layers:
        assert isinstance(layer, FSDP2)
        layer.forward = layer.forward
"""


def test_verl_takes_the_layers_for_what_fsdp_wraps(workload: Workload, tmp_path: Path) -> None:
    write(tmp_path / "verl" / "utils" / "activation_offload.py", FILE_LIKE_VERL)
    attach = rivals.load("verl", tmp_path)
    with attach(workload):
        assert all("forward" in vars(layer) for layer in workload.layers)
    assert not any("forward" in vars(layer) for layer in workload.layers)


def test_transformer_engine_forgets_a_layer_that_it_failed_to_enter(
    workload: Workload, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SimpleNamespace(OFFLOAD_SYNCHRONIZER=None)

    class Context:
        def __enter__(self) -> None:
            module.OFFLOAD_SYNCHRONIZER = self
            raise ValueError("must be contiguous")

        def __exit__(self, *error: Any) -> None: ...

    module.get_cpu_offload_context = lambda *args, **kwargs: (Context(), lambda hidden: hidden)
    monkeypatch.setattr(rivals, "_import", lambda name, hint: module)
    record = make_bench(workload).turn("te_v2", rivals.load("te_v2", None), 0, 60.0, with_timeline=False)
    assert record["failure"] == "ValueError: must be contiguous"
    assert module.OFFLOAD_SYNCHRONIZER is None


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
