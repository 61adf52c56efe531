"""tools/bench_gpu.py, as far as it runs without a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("tqdm")
ROOT = Path(__file__).parents[2]


@contextmanager
def tools_on_path() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield
    finally:
        sys.path.remove(str(ROOT / "tools"))


with tools_on_path():
    from bench_gpu import contenders, gradients, leftovers, measure, model, report, settings, throughput


# ---- the command line ----


def test_preset_gives_the_shape_and_flags_change_it() -> None:
    plain = settings.parse(["--setup", "b"])
    assert plain.shape == settings.SETUPS["b"].shape
    assert [entry.label for entry in plain.entries] == ["ours core_attn", "none", "incumbent core_attn"]
    changed = settings.parse(["--setup", "b", "--layers", "2", "--vpp", "0", "--experts", "4"])
    assert changed.shape == dataclasses.replace(plain.shape, layers=2, experts=4)


def test_every_preset_fits_its_gpus() -> None:
    for setup in settings.SETUPS.values():
        setup.shape.check(setup.num_gpus)
        settings.incumbent_modules(setup.modules)


def test_repeated_modules_make_a_contender_for_each_set_and_no_offload_once() -> None:
    found = settings.parse(["--setup", "b", "--modules", "core_attn", "--modules", "core_attn,router_fc1"])
    labels = [entry.label for entry in found.entries]
    assert labels == [
        "ours core_attn",
        "none",
        "incumbent core_attn",
        "ours core_attn,router_fc1",
        "incumbent core_attn,expert_fc1",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--contenders ours,theirs", "theirs"),
        ("--modules attn_proj", "only together with core_attn"),
        ("--modules mlp_fc1", "offloads none of mlp_fc1"),
        ("--rounds 0", "at least 1"),
        ("--budget-curve 2 --rounds 1", "--rounds of at least 2"),
        ("--budget-curve 2 --contenders ours", "name none among"),
        ("--budget-plot curve.png", "give that, too"),
        ("--engine horizon_bytes", "NAME=VALUE"),
        ("--contenders none --profile trace.json", "--profile-contender ours"),
        ("--contenders none,ours --profile trace.json --profile-contender none,incumbent", "incumbent is not among"),
        ("--setup e", "invalid choice"),
        ("--delay-wgrad", "part of --overlap-a2a"),
        ("--setup b --overlap-a2a", "ep of at least 2"),
        ("--setup fine-8 --vpp 0 --overlap-a2a", "virtual stages"),
        ("--setup fine-2 --overlap-a2a --contenders recompute,none", "excludes recompute"),
        ("--setup fine-2 --overlap-a2a --contenders ours,copies", "excludes copies"),
        ("--contenders copies,ours", "name ours in front of it"),
        ("--memory-history absent/history.pickle", "argument --memory-history: there is no folder absent"),
    ],
)
def test_nonsense_is_an_error_that_says_so(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.parse(arguments.split())
    assert message in capsys.readouterr().err


def test_rounds_begin_with_the_next_contender_where_that_is_asked_for() -> None:
    rounds = {
        rotate: ["".join(settings.in_turn("ABC", number, rotate)) for number in range(4)] for rotate in (False, True)
    }
    assert rounds == {False: ["ABC"] * 4, True: ["ABC", "BCA", "CAB", "ABC"]}
    assert [settings.parse(flags).rotate for flags in ([], ["--rotate"])] == [False, True]
    assert not settings.parse([]).single_thread


def test_modules_of_ours_alone_need_not_be_known_to_the_incumbent() -> None:
    found = settings.parse(["--modules", "mlp_fc1", "--contenders", "ours,none", "--engine", "horizon_bytes=1024"])
    assert [entry.modules for entry in found.entries] == [("mlp_fc1",), ()]
    assert found.engine == {"horizon_bytes": 1024}


@pytest.mark.parametrize(("rank", "host", "gpu"), [(0, "host 0", 0), (1, "host 0", 1), (5, "host 2", 1)])
def test_processes_that_share_gpus_are_of_several_hosts_to_nccl(
    rank: int, host: str, gpu: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_node(monkeypatch, rank, num_processes=8, num_gpus=2)
    assert settings.parse(["--share-gpus"]).share_gpus and model.num_gpus(8) == 2
    assert model._shared_gpu() == torch.device("cuda", gpu)
    assert os.environ["NCCL_HOSTID"] == host


def test_sharing_is_for_one_node_and_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    set_node(monkeypatch, 5, num_processes=8, num_gpus=8)
    assert model._own_gpu() == torch.device("cuda", 5) and model.num_gpus(4) == 4
    set_node(monkeypatch, 5, num_processes=8, num_gpus=2)
    with pytest.raises(SystemExit, match="process 5 has no GPU, there are 2: pass --share-gpus"):
        model._own_gpu()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    with pytest.raises(SystemExit, match="of one node"):
        model._shared_gpu()


def set_node(monkeypatch: pytest.MonkeyPatch, rank: int, num_processes: int, num_gpus: int) -> None:
    """Set the environment that torchrun gives a process, on a machine with so many GPUs."""
    for name, value in {"LOCAL_RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_WORLD_SIZE": num_processes}.items():
        monkeypatch.setenv(name, str(value))
    for name in ("NCCL_HOSTID", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)


def test_overlap_goes_into_the_configuration_as_megatron_names_it() -> None:
    flags = ["--setup", "fine-2", "--overlap-a2a", "--contenders", "ours,none"]
    assert settings.parse(flags).overlap == {
        "overlap_moe_expert_parallel_comm": True,
        "delay_wgrad_compute": False,
    }
    assert settings.parse([*flags, "--delay-wgrad"]).overlap["delay_wgrad_compute"]
    assert settings.parse(["--setup", "fine-2"]).overlap == {}


def test_with_the_overlap_the_schedule_asks_for_the_plan_of_a_chunk() -> None:
    class Chunk:
        def __call__(self, *args: Any, **kwargs: Any) -> str:
            return "output"

        def build_schedule_plan(self, *args: Any, **kwargs: Any) -> str:
            return "plan"

    training = model.Training.__new__(model.Training)
    training._tokens = training._positions = torch.zeros(1)
    assert training._forward(iter(()), Chunk())[0] == "output"
    assert training._forward(iter(()), Chunk(), return_schedule_plan=True)[0] == "plan"


class Delaying(torch.nn.Linear):
    """Sets the gradient of its weight behind the backward, as TransformerEngine's modules do."""

    def __init__(self) -> None:
        super().__init__(1, 1)
        self.weight.skip_backward_post_hook = True
        self.hooks: list[Any] = []

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Any) -> None:
        self.hooks.append(hook)

    def backward_dw(self, value: float) -> None:
        self.weight.grad = torch.full_like(self.weight, value)
        for hook in self.hooks:
            hook()


def test_gradients_of_all_microbatches_are_added_where_they_come_behind_the_backward() -> None:
    module, plain = Delaying(), torch.nn.Linear(1, 1)
    delayed = model.DelayedGradients([module, plain])
    module.bias.grad = torch.ones(1)  # added up by autograd
    for value in (1.0, 2.0, 4.0):
        module.backward_dw(value)
    assert [float(delayed.of(p)) for p in (module.weight, module.bias)] == [7.0, 1.0]
    delayed.clear()
    module.backward_dw(8.0)
    assert float(delayed.of(module.weight)) == 8.0 and delayed.of(plain.weight) is None


def test_each_of_several_traces_has_a_file_of_its_own() -> None:
    file, entry = Path("folder/trace.json.gz"), settings.Entry("ours", ("core_attn", "expert_fc1"))
    assert settings.file_of(file, entry, is_only=True) == file
    named = settings.file_of(file, entry, is_only=False)
    assert named == Path("folder/trace-ours-core_attn-expert_fc1.json.gz")


def test_recomputation_takes_part_once_and_offloads_nothing() -> None:
    found = settings.parse(["--modules", "core_attn", "--modules", "qkv_linear", "--contenders", "ours,recompute,none"])
    assert [e.label for e in found.entries] == ["ours core_attn", "recompute", "none", "ours qkv_linear"]


@pytest.mark.parametrize(
    ("changes", "world_size", "message"),
    [
        (dict(pp=2), 3, "3 processes"),
        (dict(pp=2, vpp=3), 2, "6 model chunks"),
        (dict(vpp=2), 1, "needs pp"),
        (dict(pp=2, vpp=2, nmb=5), 2, "multiple of pp"),
        (dict(experts=3, ep=2), 2, "3 experts"),
    ],
)
def test_shapes_that_do_not_fit(changes: dict[str, int], world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings.Shape(**changes).check(world_size)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would start the benchmark")
def test_without_a_gpu_the_script_says_what_to_do() -> None:
    command = [sys.executable, str(ROOT / "tools" / "bench_gpu.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "bench_cpu.py" in done.stderr


# ---- gradients ----


def test_fingerprints_notice_one_bit_and_the_order() -> None:
    grad = torch.randn(1000).bfloat16()
    flipped, swapped = grad.clone(), grad.clone()
    flipped.view(torch.int16)[500] ^= 1
    swapped[[0, 1]] = grad[[1, 0]]
    own = gradients.fingerprint({"w": grad, "b": None}, [torch.tensor(1.5)])
    assert gradients.compare(own, gradients.fingerprint({"w": grad.clone(), "b": None}, [torch.tensor(1.5)])) == (
        gradients.Difference(2, 0, 0.0, True)
    )
    for other in (flipped, swapped):
        difference = gradients.compare(own, gradients.fingerprint({"w": other, "b": None}, [torch.tensor(1.5)]))
        assert difference.num_differing == 1 and difference.max_relative > 0
        assert not difference.is_bitwise_equal


def test_a_digest_does_not_depend_on_how_it_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    grad = {"w": torch.randn(1001)}
    whole = gradients.fingerprint(grad, []).digests
    monkeypatch.setattr(gradients, "_PIECE", 17)
    assert gradients.fingerprint(grad, []).digests == whole


def test_losses_count_too() -> None:
    one, other = (gradients.fingerprint({}, [torch.tensor(loss)]) for loss in (1.0, 1.0 + 2**-23))
    assert not gradients.compare(one, other).is_bitwise_equal


# ---- statistics and tables ----

MIB = 1 << 20


def turn(contender: str, rank: int, number: int, step_ms: list[float], **more: Any) -> dict[str, Any]:
    modules = [] if contender == "none" else ["qkv_linear"]
    record = {
        "kind": "turn",
        "contender": contender,
        "label": " ".join([contender, *modules]),
        "modules": modules,
        "round": number,
        "rank": rank,
        "step_ms": step_ms,
        "host_ms": step_ms,
        "peak_allocated_bytes": 1000 * MIB,
        "peak_allocated_bytes_counted": 990 * MIB,
        "peak_reserved_bytes": 1100 * MIB,
        "pinned_bytes": 0,
        "host_rss_bytes": 50 * MIB,
        "alloc_retries": 0,
        "device_allocs": 0,
        "between_steps": {"is_bitwise_equal": True},
        **contenders.Moved().as_record(),
    }
    return {**record, **more}


def ours(rank: int, number: int, step_ms: list[float]) -> dict[str, Any]:
    return turn(
        "ours",
        rank,
        number,
        step_ms,
        peak_allocated_bytes=900 * MIB,
        peak_allocated_bytes_counted=(890 - 5 * number) * MIB,
        peak_reserved_bytes=1010 * MIB,
        pinned_bytes=105 * MIB,
        copied_out_bytes=400 * MIB,
        copied_in_bytes=400 * MIB,
        host_bytes_max=125 * MIB,
        host_bytes_at_peak=100 * MIB,
        is_confirmed=True,
        out_gbps=50.0,
        in_gbps=54.0,
    )


def parity(label: str, number: int, is_reference: bool, num_differing: int = 0) -> dict[str, Any]:
    difference = gradients.Difference(10, num_differing, 0.0, True)
    return {
        "kind": "parity",
        "label": label,
        "round": number,
        "rank": 0,
        "is_reference": is_reference,
        **difference.as_record(),
    }


def run_records() -> list[dict[str, Any]]:
    link = {"kind": "link", "rank": 0, "copy_bytes": 64 * MIB, "out_gbps": 55.0, "in_gbps": 55.0}
    return [
        {**link, "both_out_gbps": 50.0, "both_in_gbps": 50.0},
        {"kind": "host_read", "rank": 0, "cpu_idle_ms": 0.04, "cpu_busy_ms": 8.6},
        {"kind": "pinning", "slab_gbps": 7.0, "host_alloc_gbps": 1.6},
        {"kind": "group_cost", "us": 33.0},
        *(turn("none", rank, number, [100.0, 101.0]) for number in (0, 1) for rank in (0, 1)),
        ours(0, 0, [100.0, 104.0]),
        ours(1, 0, [102.0, 101.0]),
        ours(0, 1, [101.0, 101.0]),
        ours(1, 1, [100.0, 100.0]),
        turn("incumbent", 0, 0, [107.0, 107.0]),
        parity("none", 0, True),
        parity("none", 1, False),
        parity("ours qkv_linear", 0, False),
        parity("ours qkv_linear", 1, False),
    ]


def test_a_step_takes_as_long_as_on_the_slowest_rank() -> None:
    turns = [r for r in run_records() if r["kind"] == "turn" and r["contender"] == "ours"]
    assert report.slowest_of_ranks(turns) == [[102.0, 104.0], [101.0, 101.0]]


def test_summary_has_ratios_and_falls() -> None:
    found = {(s["label"], s["rank"]): s for s in report.summarize(run_records())}
    assert len(found) == 5
    own = found["ours qkv_linear", 0]
    assert own["step_ms_median"] == 101.5
    assert own["ratio"] == pytest.approx(101.5 / 100.5)
    assert own["round_ratios"] == pytest.approx([103 / 100.5, 101 / 100.5])
    assert own["fall_allocated_over_at_peak"] == 1.0 and own["fall_reserved_over_at_peak"] == 0.9
    assert own["fall_allocated_over_max"] == 0.8 and own["fall_reserved_over_max"] == 0.72
    assert own["link_out_ms"] == pytest.approx(400 * MIB / 55e6)
    assert own["link_both_ms"] == pytest.approx(400 * MIB / 50e6)
    assert own["is_bitwise_equal"] is True
    assert found["none", 0]["is_bitwise_equal"] is True
    assert found["none", 0]["fall_allocated_over_at_peak"] is found["none", 0]["fall_allocated_over_max"] is None


def test_targets_take_the_worst_rank_and_the_incumbent_as_limit() -> None:
    records = run_records()
    found = {t.what: t for t in report.targets(report.summarize(records), records)}
    met = {what.removeprefix("ours qkv_linear: "): target.is_met for what, target in found.items()}
    assert met == {
        "fall of reserved over bytes on host at the peak": False,
        "fall of reserved over the most bytes on host": False,
        "R, fall of allocated over bytes on host at the peak": True,
        "fall of allocated over the most bytes on host": False,
        "step time over no offload": False,
        "copy-out over a plain copy": False,
        "copy-in over a plain copy": True,
        "pinned over bytes on host": True,
        "step ms (limit: the incumbent's)": True,
        "allocated over the incumbent's": True,
        "losses and gradients bitwise equal": True,
        "host read under a full queue, ms": None,
        "pinning over cudaHostAlloc": True,
        "host time of a group of 3 tensors, us": False,
    }


@pytest.mark.parametrize("pp, bound_ms", [(1, 2 * 8000 * MIB / 55e6), (2, 8000 * MIB / 50e6)])
def test_where_the_bytes_do_not_fit_the_time_the_limit_is_the_link(pp: int, bound_ms: float) -> None:
    records = [{"kind": "run", "shape": {"pp": pp}}, *run_records()]
    for record in records:
        if record.get("contender") == "ours":
            record.update(copied_out_bytes=8000 * MIB, copied_in_bytes=8000 * MIB, step_ms=[bound_ms * 1.04] * 2)
    summaries = report.summarize(records)
    own = next(s for s in summaries if s["contender"] == "ours" and s["rank"] == 0)
    assert own["is_link_bound"] and own["bound_ms"] == pytest.approx(bound_ms)
    met = {t.what: t.is_met for t in report.targets(summaries, records)}
    assert met["ours qkv_linear: step time over the link-bound limit"] is True
    assert "ours qkv_linear: step time over no offload" not in met


def test_a_difference_is_shown_beside_the_spread_of_no_offload() -> None:
    records = [r for r in run_records() if r["kind"] != "parity"]
    records += [parity("none", 0, True), parity("none", 1, False, 3), parity("ours qkv_linear", 0, False, 4)]
    found = {s["label"]: s for s in report.summarize(records) if s["rank"] == 0}
    assert (found["none"]["num_differing"], found["ours qkv_linear"]["num_differing"]) == (3, 4)


def test_pictures_call_contenders_by_words_of_their_own() -> None:
    assert throughput.in_words("none") == "no offload"
    assert throughput.in_words("incumbent core_attn") == "megatron-core's own offload: core_attn"
    both = "ours core_attn,experts+moe_act @resident_bytes=1"
    assert throughput.in_words(both) == "this engine: core_attn, experts; recomputing moe_act; resident_bytes=1"


def test_throughput_is_compared_with_recomputation_and_its_memory() -> None:
    shape = {"seq": 1000, "mbs": 2, "nmb": 4, "pp": 2}
    records = [{"kind": "run", "shape": shape, "world_size": 4}, *run_records()]
    records += [turn("recompute", rank, 0, [134.0], modules=[], peak_reserved_bytes=505 * MIB) for rank in (0, 1)]
    summaries = report.summarize(records)
    found = {one["contender"]: one for one in throughput.throughput(summaries, records)}
    assert found["none"]["tokens_per_s"] == pytest.approx(16_000 / 0.1005)
    own = found["ours"]
    assert own["over_recompute"] == pytest.approx(134.0 / 101.5) and own["reserved_over_recompute"] == 2.0
    assert throughput.throughput_table(list(found.values())).row_count == 4
    assert throughput.throughput(summaries, run_records()) == [], "its shape is unknown"


def test_tables_show_every_contender_and_target() -> None:
    from rich.console import Console

    records = run_records()
    screen = io.StringIO()
    Console(file=screen, width=200).print(report.tables("setup a", report.summarize(records), records))
    shown = screen.getvalue()
    for word in ("ours qkv_linear", "incumbent", "none", "1.0100", "MISSED", "not measured", "8.600", "retries"):
        assert word in shown


def test_tables_of_a_run_with_one_contender_alone() -> None:
    from rich.console import Console

    records = [ours(0, 0, [1.0])]
    screen = io.StringIO()
    Console(file=screen, width=200).print(report.tables("x", report.summarize(records), records))
    shown = screen.getvalue()
    assert "ours qkv_linear" in shown and "nan" not in shown and "None" not in shown


def test_plot_is_an_image(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    report.plot_memory([measure.MemoryTimeline("ours", [0.0, 1.0], [1 << 30] * 2, [2 << 30] * 2)], tmp_path / "m.png")
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


# ---- turns, on a tiny model without a GPU ----


class FakeEvent:
    def record(self, stream: Any) -> None: ...

    def elapsed_time(self, other: FakeEvent) -> float:
        return 0.5


class FakeGauge:
    def wait(self) -> None: ...

    def start(self, *, keeps_cache: bool = False) -> None: ...

    def read(self) -> dict[str, int]:
        return {name: 0 for name in ("torch_pinned_bytes", "peak_allocated_bytes", "peak_reserved_bytes")}

    def take_peak(self) -> int:
        return 1

    def release(self) -> None: ...

    def current(self) -> tuple[int, int]:
        return 1, 2

    def held(self) -> leftovers.Held:
        return leftovers.Held(0, 0)


class Alone:
    rank, world_size = 0, 1

    def barrier(self) -> None: ...


TINY = settings.Shape(layers=4, hidden=32, heads=2, seq=16, mbs=2, nmb=3, vocab=64, ffn=128)
OURS = settings.Entry("ours", ("qkv_linear", "core_attn"))


def take_turns() -> dict[str, Any]:
    """Run in a process with megatron-core's parallel state: ours and none, and once ours with a step that raises."""
    from tests.dist import tiny

    chunks = tiny.make_chunks(tiny.make_config())
    training = model.Training(TINY, chunks, "cpu")
    steps: list[str] = []
    bench = measure.Bench(training, Alone(), FakeGauge(), measure.Counts(1, 2), steps.append, FakeEvent)
    none = contenders.NoOffload(settings.Entry("none"))
    own = contenders.Ours(OURS, chunks, {"min_tensor_bytes": 0, "directory": "none"})
    hooks = _num_hooks(chunks)
    turns = [bench.turn(contender, number) for number in (0, 1) for contender in (own, none)]
    training.step, whole = _raise, training.step
    with pytest.raises(ZeroDivisionError):
        bench.turn(own, 2)
    training.step = whole
    timeline = measure.record_memory("none", FakeGauge(), bench.step)
    assert timeline.allocated_bytes[-1] == 1
    assert _num_hooks(chunks) == hooks
    return {"turns": turns, "parity": bench.parity(), "steps": len(steps)}


def recompute_turns(kind: str) -> dict[str, Any]:
    """Run in a process with megatron-core's parallel state: none, recomputation, none; how often each ran a layer."""
    from tests.dist import tiny

    chunks = tiny.make_chunks(tiny.make_config(kind))
    training = model.Training(TINY, chunks, "cpu")
    bench = measure.Bench(training, Alone(), FakeGauge(), measure.Counts(1, 1), lambda what: None, FakeEvent)
    entry = settings.Entry("recompute")
    none, recompute = contenders.NoOffload(settings.Entry("none")), contenders.make_contender(entry, chunks, {})
    ran: list[int] = []
    layer = chunks[0].decoder.layers[1]
    hook = layer.register_forward_pre_hook(lambda module, args: ran.append(1))
    counts = []
    for number, contender in enumerate((none, recompute, none)):
        ran.clear()
        bench.turn(contender, number)
        counts.append(len(ran))
    hook.remove()
    return {"counts": counts, "parity": bench.parity(), "left": chunks[0].config.recompute_granularity}


class CountedCopies:
    """In place of `PlainCopies`, which needs a GPU."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.counter = nbytes, None

    def copy_out(self) -> None:
        self._count("copy_out")

    def copy_in(self) -> None:
        self._count("copy_in")

    def _count(self, way: str) -> None:
        if self.counter is not None:
            with getattr(self.counter, way)(self.nbytes, None):
                pass


def copies_turns() -> dict[str, Any]:
    """Run in a process with megatron-core's parallel state: copies before ours, ours three times, copies."""
    from tests.dist import tiny

    contenders.PlainCopies = CountedCopies
    chunks = tiny.make_chunks(tiny.make_config())
    training = model.Training(TINY, chunks, "cpu")
    bench = measure.Bench(training, Alone(), FakeGauge(), measure.Counts(1, 1), lambda what: None, FakeEvent)
    dry = settings.Entry("ours", OURS.modules, engine=(("dry_run", True),))
    entries = [settings.Entry("ours", OURS.modules), settings.Entry("ours", ("core_attn",)), dry]
    defaults = {"min_tensor_bytes": 0, "directory": "none"}
    plain = contenders.make_contender(settings.Entry("copies", OURS.modules), chunks, {})
    hooks = _num_hooks(chunks)
    with pytest.raises(RuntimeError, match="copies qkv_linear,core_attn: ours has moved nothing so far"):
        bench.turn(plain, 0)
    turns = []
    for entry in entries:
        turns.append(bench.turn(contenders.make_contender(entry, chunks, defaults), 0))
        plain.follow(turns[-1], TINY.nmb)
    turns.append(bench.turn(plain, 0))
    assert _num_hooks(chunks) == hooks
    return {"turns": turns, "parity": bench.parity()}


@pytest.mark.dist
def test_copies_are_as_large_as_those_of_ours_with_the_same_modules_and_no_settings() -> None:
    pytest.importorskip("megatron.core")
    from tests.dist.launch import run_ranks

    (found,) = run_ranks(copies_turns)
    own, _, dry, plain = found["turns"]
    assert dry["copied_out_bytes"] == 0
    num_calls = TINY.layers * TINY.nmb
    assert plain["copied_out_bytes"] == plain["copied_in_bytes"] == own["copied_out_bytes"] // num_calls * num_calls > 0
    assert plain["num_copies_out"] == num_calls and plain["host_bytes_max"] == 0
    assert [p["is_bitwise_equal"] for p in found["parity"]] == [True] * 4


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_recomputation_is_switched_on_and_off_on_the_same_model(kind: str) -> None:
    pytest.importorskip("megatron.core")
    from tests.dist.launch import run_ranks

    (found,) = run_ranks(recompute_turns, kind)
    once = 3 * TINY.nmb  # warm-up, the counted step, the timed one
    assert found["counts"] == [once, 2 * once, once]
    assert [p["is_bitwise_equal"] for p in found["parity"]] == [True] * 3
    assert found["left"] is None


def _raise() -> Any:
    raise ZeroDivisionError


def _num_hooks(chunks: list[torch.nn.Module]) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for chunk in chunks for m in chunk.modules())


@pytest.mark.dist
def test_turns_on_one_model_switch_ours_on_and_off() -> None:
    pytest.importorskip("megatron.core")
    from tests.dist.launch import run_ranks

    (found,) = run_ranks(take_turns)
    json.dumps(found)
    own, none = found["turns"][0], found["turns"][1]
    assert own["is_confirmed"] and own["copied_out_bytes"] == own["copied_in_bytes"] > 0
    assert own["engine"]["copied_out_bytes"] == own["copied_out_bytes"]
    assert own["engine"]["peak_host_bytes"] == own["host_bytes_max"] > own["host_bytes_at_peak"] == 0  # at its first
    num_calls = own["engine"]["num_offloaded_groups"]
    assert own["num_copies_out"] >= num_calls > 0
    assert own["out_gbps"] == pytest.approx(own["copied_out_bytes"] / (0.5 * num_calls) / 1e6)
    assert own["pinned_bytes"] > 0
    assert (none["copied_out_bytes"], none["is_confirmed"]) == (0, False)
    assert len(own["step_ms"]) == 2 and len(own["losses"]) == TINY.nmb
    assert [p["is_bitwise_equal"] for p in found["parity"]] == [True] * 4
    assert [p["label"] for p in found["parity"] if p["is_reference"]] == ["none"]
    assert found["steps"] == 4 * (1 + 1 + 2) + 1 + 1


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
    config = chunks[0].config
    return {**flags, "config": (config.fine_grained_activation_offloading, config.offload_modules)}


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_switching_the_incumbent_gives_the_flags_of_a_model_built_with_it(kind: str) -> None:
    pytest.importorskip("megatron.core")
    from tests.dist.launch import run_ranks

    ((built, on, off, off_again, places),) = run_ranks(switch_flags, kind)
    assert on == built
    assert off_again == off != on
    assert places == {"qkv_linear": 4, "core_attn": 4}


class FakeExperts(torch.nn.Module):
    """The attributes that grouped experts copy from the configuration when they are constructed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = torch.nn.Linear(1, 1)
        self.linear_fc1.save_original_input = False
        self.offload_expert_fc1 = self.offload_moe_act = self.offload_fused_group_mlp = False


def test_experts_save_their_original_input_while_fc1_is_offloaded() -> None:
    experts = FakeExperts()
    assert contenders.switch_incumbent([experts], ["expert_fc1"]) == {"expert_fc1": 1}
    assert experts.offload_expert_fc1 and experts.linear_fc1.save_original_input and not experts.offload_moe_act
    assert not contenders.switch_incumbent([experts], [])
    assert not experts.offload_expert_fc1 and not experts.linear_fc1.save_original_input


def run_everything(directory: str) -> list[str]:
    """In one of two ranks of a pipeline: the whole program, with what only a GPU has replaced."""
    import torch.distributed as dist
    from bench_gpu import main

    from tests.dist import tiny

    torch.cuda.Event = lambda enable_timing: FakeEvent()
    torch.cuda.get_device_name = lambda: "no GPU"
    measure.CudaGauge = SmallGauge
    model.make_config = lambda shape, deterministic: tiny.make_config(hidden_size=shape.hidden)
    model.build_chunks = lambda shape, config: tiny.make_chunks(config)
    model.Training = lambda shape, chunks, training=model.Training: training(shape, chunks, "cpu")
    flags = "--contenders ours,none --modules core_attn --rounds 2 --rotate --iters 1 --warmup 1 --no-micro".split()
    flags += ["--single-thread", "--budget-curve", "2"]
    files = ["--json", f"{directory}/out.jsonl", "--memory-plot", f"{directory}/memory.png"]
    files += ["--trade-plot", f"{directory}/trade.png", "--budget-plot", f"{directory}/budgets.png"]
    engine = ["--engine", "min_tensor_bytes=0", "--engine", "directory=none"]
    shape = [f for name, value in dataclasses.asdict(TINY).items() for f in (f"--{name}", str(value))]
    parsed = settings.parse([*flags, *files, *engine, *shape, "--pp", "2"])
    ranks = model.Ranks(dist.get_rank(), dist.get_world_size(), None)
    screen = io.StringIO()
    with contextlib.redirect_stdout(screen):
        status = main.Run(parsed, ranks).execute()
    return [str(status), screen.getvalue(), str(SmallGauge.threads)]


class SmallGauge(FakeGauge):
    threads: ClassVar[set[bool]] = set()  # whether a backward had threads of its own while something was measured

    def read(self) -> dict[str, int]:
        self.threads.add(torch._C._is_multithreading_enabled())
        return {**super().read(), "outside_bytes": 2 << 20, "host_rss_bytes": 1, "alloc_retries": 0, "device_allocs": 0}


@pytest.mark.dist
def test_the_whole_program_on_two_ranks(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    from tests.dist.launch import Pipeline, run_ranks

    (status, shown, threads), other = run_ranks(run_everything, str(tmp_path), pipeline=Pipeline(2))
    assert (status, threads) == ("0", "{False}")
    assert other == ["0", "", threads]
    assert "ours core_attn" in shown and "targets" in shown
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    kinds = [record["kind"] for record in records]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "run": 2,
        "turn": 16,
        "parity": 16,
        "summary": 10,
        "throughput": 5,
        "budget": 3,
        "end": 1,
    }
    assert all(record["is_bitwise_equal"] for record in records if record["kind"] == "parity")
    of_first = [r["contender"] for r in records if r["kind"] == "turn" and r["rank"] == 0]
    assert of_first == ["ours", "none", "budget", "none", "budget", "budget", "budget", "ours"]
    everything, tight, loose = [record for record in records if record["kind"] == "budget"]
    assert everything["offloaded_bytes"] == loose["offloaded_bytes"] == 0 < tight["offloaded_bytes"]
    assert tight["predicted_bytes"] <= tight["budget_bytes"] < loose["budget_bytes"]
    assert [one["planning_steps"] for one in (everything, tight)] == [5, 5]
    assert tight["is_above"] and not loose["is_above"]  # its gauge says that 2 MiB are held, whatever moves
    for name in ("memory.png", "trade.png", "budgets.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
