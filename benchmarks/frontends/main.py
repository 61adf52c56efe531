"""Wires the parts of the benchmark together."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.leftovers import notice
from benchmarks.gpu.provenance import provenance

from .settings import CHECKPOINTED, OURS, WITH_HORIZON, Settings, parse

if TYPE_CHECKING:
    from .longest import Limits

_PACKAGES = ("torch", "transformers", "transformer-engine", "trl", "torchtune", "verl")
_LINK_BYTES = 64 << 20
# Of a run and the one that it goes on with.
_SAME = (
    *("shape", "documents", "longest_unit", "has_head", "engine", "group_bytes"),
    *("device", "device_name", "host_bytes", "device_bytes", "core", "versions"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    settings = parse(arguments)
    _set_environment(settings)
    import torch  # only now: what it reads from the environment is set, and mistakes are told at once

    if settings.device == "cuda" and not torch.cuda.is_available():
        print(
            "benchmarks/run.py frontends needs a GPU; --device cpu --tiny tries the program without one",
            file=sys.stderr,
        )
        return 2
    earlier = _read(settings.resume) if settings.resume else []
    if settings.resume and (other := _difference(earlier, describe_run(settings))):
        print(f"--resume {settings.resume} is of another run: {other}", file=sys.stderr)
        return 2
    return Run(settings, earlier).execute()


def _set_environment(settings: Settings) -> None:
    # The others pin through torch's allocator, by default with cudaHostAlloc at 2 GB/s: a turn of theirs would be over
    # before its first timed step. Registered by threads it takes a few seconds. Steps are not affected.
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        options = "pinned_use_cuda_host_register:True,pinned_num_register_threads:8"
        if settings.longest:  # else fragmentation decides: tensors of a few GiB leave holes of that size
            options += ",expandable_segments:True"
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", options)


class Run:
    """One run: all contenders on one model in one process, each figure written as soon as it is there.

    Args:
        settings: of the command line.
        earlier: records of a run that this one goes on with.
    """

    def __init__(self, settings: Settings, earlier: list[dict[str, Any]]) -> None:
        from tqdm import tqdm

        self._settings = settings
        self._begin = time.perf_counter()
        self._records: list[dict[str, Any]] = []
        self._spent: dict[str, float] = {}
        self._failed: set[str] = set()
        self._earlier = earlier
        steps = settings.rounds * len(settings.contenders) * (settings.warmup + settings.iters)
        self._bar = tqdm(total=None if settings.longest else steps, unit="step", desc="imports")
        self._host_bytes = self._host_limit()
        self._set_up()

    def execute(self) -> int:
        """Run the benchmark; return the exit status."""
        self._write([describe_run(self._settings)])
        if self._settings.longest:
            self._search_longest()
        elif self._settings.recording:
            self._measure_recording()
        else:
            self._measure()
        self._bar.close()
        self._write([{"kind": "end", "seconds": time.perf_counter() - self._begin}])
        self._print()
        return 1 if self._failed & OURS else 0

    def _set_up(self) -> None:
        import torch

        from .contenders import Ours, make_contenders
        from .gauges import make_gauge
        from .turns import Bench, Counts
        from .workload import Workload

        settings = self._settings
        if settings.device_bytes:
            torch.cuda.set_per_process_memory_fraction(
                min(1.0, settings.device_bytes / torch.cuda.get_device_properties(0).total_memory)
            )
        engine = {"host_limit_bytes": self._engine_host_bytes(), **settings.engine}
        if settings.is_tiny:
            engine.setdefault("min_tensor_bytes", 0)
        self._ours = Ours(engine, settings.group_bytes, horizon=self._horizon)
        names = () if settings.recording else settings.contenders
        self._attach, missing = make_contenders(names, settings.device, self._ours, settings.rivals)
        self._write([{"kind": "missing", "label": name, "reason": reason} for name, reason in missing.items()])
        self._bar.set_description("model")
        self._workload = Workload(settings.shape, settings.device, settings.has_head, settings.documents)
        self._gauge = make_gauge(settings.device)
        counts = Counts(settings.warmup, settings.iters)
        self._bench = Bench(self._workload, self._gauge, counts, self._host_bytes, self._show)
        gc.collect()
        gc.freeze()  # the model is there to stay: no full collection should walk it in the middle of a step

    @property
    def _horizon(self) -> int | None:
        """Return the horizon for inputs of checkpoints: the least on the device trains the longest sequence."""
        return 1 if self._settings.longest else None

    def _host_limit(self) -> int:
        from .watch import host_memory_limit

        return self._settings.host_bytes or int(0.8 * host_memory_limit())

    # ---- step time and memory ----

    def _measure(self) -> None:
        from .workload import Attached

        for _ in range(2):  # kernels are chosen on the first step
            self._workload.step(Attached())
        saved = self._measure_saved()
        link = self._measure_link()
        for number in range(self._settings.rounds):
            for name in self._attach:
                if name not in self._failed:
                    self._turn(name, number)
        self._write(_summaries(self._records))
        if self._settings.plot:
            from .report import plot_trade

            plot_trade(self._records, self._settings.plot)
        self._write(self._bounds(saved, link))
        if self._settings.memory_plot and self._bench.timelines:
            from benchmarks.gpu.report import plot_memory

            plot_memory(self._bench.timelines, self._settings.memory_plot)

    def _turn(self, name: str, number: int) -> None:
        spent = self._spent.get(name, 0.0)
        left = self._settings.contender_seconds - spent
        if number and left < spent / number:  # the rounds that it has are whole
            return
        is_last = number == self._settings.rounds - 1
        with_timeline = self._settings.memory_plot is not None and is_last
        record = self._bench.turn(name, self._attach[name], number, left, with_timeline)
        self._spent[name] = spent + record["seconds"]
        if record["failure"]:
            self._failed.add(name)
        for what in filter(None, (record["failure"], notice(record))):
            self._bar.write(f"{name}: {what}", file=sys.stderr)
        self._write([record])

    def _measure_saved(self) -> dict[str, int]:
        """Measure the bytes that a forward saves, each storage once, without weights: plain, and with checkpointing."""
        from offload_engine import ResidencyMeter, SavedTensorTracker

        from .workload import Attached

        found = {}
        for name in ("none", "ckpt"):
            if name in self._attach:
                meter = ResidencyMeter()
                tracker = SavedTensorTracker(meter, [*self._workload.model.parameters()])
                with self._bench.clean(), self._attach[name](self._workload):
                    self._workload.step(Attached(around_forward=lambda tracker=tracker: tracker))
                found[name] = meter.peak_bytes
        return found

    def _measure_link(self) -> dict[str, float]:
        """Measure GB/s of plain pinned copies each way; without a GPU there is no link."""
        if self._settings.device == "cpu":
            return {}
        from benchmarks.gpu.link import measure_link

        self._bar.set_description("link")
        record = measure_link([_LINK_BYTES], _OneProcess())[0]
        self._write([record])
        return {"out": record["out_gbps"], "in": record["in_gbps"]}

    def _bounds(self, saved: dict[str, int], link: dict[str, float]) -> list[dict[str, Any]]:
        from .link_bound import link_bound

        summaries = {r["label"]: r for r in self._records if r["kind"] == "summary"}
        found = []
        for name, nbytes in saved.items():
            own = summaries.get(name)
            if link and own and own["step_ms_median"]:
                forward, step = own["forward_ms"], own["step_ms_median"]
                kept = nbytes // self._settings.shape.layers  # the last layer's
                bound = link_bound(nbytes, kept, forward, step - forward, link["out"], link["in"])
                found.append({"kind": "bound", "label": name, "saved_bytes": nbytes, **asdict(bound)})
        return found

    # ---- the cost of recordings ----

    def _measure_recording(self) -> None:
        from .recording import LENGTHS, TINY_LENGTHS, measure

        settings = self._settings
        lengths = (settings.seq,) if settings.seq else TINY_LENGTHS if settings.is_tiny else LENGTHS
        for record in measure(self._workload, self._ours, lengths, settings.rounds, self._show):
            self._write([record])

    # ---- the longest sequence ----

    def _search_longest(self) -> None:
        from .contenders import no_offload
        from .longest import known_trials
        from .longest_bench import LongestBench

        settings = self._settings
        bench = LongestBench(
            self._bench,
            self._gauge,
            settings.longest_unit,
            limits=self._limits if self._device_bytes() else None,
            upper=self._upper,
            flops=self._flops,
            on_record=lambda record: self._write([record]),
        )
        bench.warm_up(no_offload)
        # What matters most comes first: those at the end have what time is left.
        names = sorted(self._attach, key=lambda name: (name != "none", name not in CHECKPOINTED, name not in OURS))
        left = settings.total_seconds - (time.perf_counter() - self._begin)
        attaches = {name: self._attach[name] for name in names}
        known = known_trials(self._earlier)
        for record in bench.run(attaches, left, settings.contender_seconds, known):
            if not record["trained"] and record["num_trials"]:
                self._failed.add(record["label"])
            horizon = {"horizon": self._horizon} if record["label"] in WITH_HORIZON else {}
            self._write([{**record, **horizon}])
        if settings.plot:
            from .report import plot_longest

            plot_longest(self._records, settings.plot)

    def _flops(self, seq: int) -> float:
        from .link_bound import layer_flops

        length = self._settings.documents or seq
        return seq // length * layer_flops(self._settings.shape, length)

    def _limits(self, name: str) -> Limits:
        from .longest import Limits

        is_ours = name in OURS
        return Limits(
            device_bytes=self._device_bytes() or 0,
            host_bytes=self._engine_host_bytes() if is_ours else self._host_bytes,
            upper=self._upper(name),
            stays_on_device=is_ours,
        )

    def _engine_host_bytes(self) -> int:
        """Return the host bytes for an engine: less than those of a contender, because the process takes some too."""
        return int(self._settings.engine.get("host_limit_bytes", 0.9 * self._host_bytes))

    def _device_bytes(self) -> int | None:
        """Return the bytes that torch's allocator may take; None without a GPU."""
        if self._settings.device == "cpu":
            return None
        import torch

        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved()
        return min(free, self._settings.device_bytes or free)

    def _upper(self, name: str) -> int:
        from .link_bound import longest_possible

        device = self._device_bytes()
        by_flag = self._settings.longest_upper or (8 * self._settings.longest_unit if device is None else None)
        if device is None or by_flag:
            return by_flag or 1
        return longest_possible(self._settings.shape, device, self._host_bytes, name in CHECKPOINTED)

    # ---- records ----

    def _show(self, what: str) -> None:
        self._bar.set_description(what, refresh=False)
        self._bar.update(what != "extra")

    def _write(self, records: list[dict[str, Any]]) -> None:
        self._records += records
        if self._settings.json and records:
            with self._settings.json.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)

    def _print(self) -> None:
        from rich.console import Console

        from .report import tables

        found = tables(self._title(), self._records)
        Console(width=max(160, Console().width)).print(*(rows.for_terminal() for rows in found))
        if self._settings.markdown:
            print("\n".join(rows.as_markdown() for rows in found))

    def _title(self) -> str:
        shape = self._settings.shape
        length = "" if self._settings.longest or self._settings.recording else f", {shape.seq:,} tokens"
        if self._settings.documents:
            length += f", attention within documents of {self._settings.documents:,}"
        return f"{shape.layers} layers of hidden {shape.hidden}{length}, {_device_name(self._settings)}"


def describe_run(settings: Settings) -> dict[str, Any]:
    """Make the first record of a run."""
    plain = {k: v for k, v in vars(settings).items() if isinstance(v, (int, float, str, tuple, dict))}
    return {
        "kind": "run",
        **provenance(_PACKAGES),
        **plain,
        "shape": asdict(settings.shape),
        "device_name": _device_name(settings),
    }


def _device_name(settings: Settings) -> str:
    import torch

    return torch.cuda.get_device_name() if settings.device == "cuda" else "CPU"


def _read(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]  # a run that was killed leaves half a line


def _difference(earlier: list[dict[str, Any]], description: dict[str, Any]) -> str | None:
    """Find in what earlier runs were another experiment than the one described; None: they were not."""
    runs = [record for record in earlier if record["kind"] == "run"]
    for record in runs:
        for name in _SAME:
            then, now = record.get(name), description.get(name)
            if then != now:
                return f"{name} was {then}, and is {now}"
    return None if runs else "it does not say of which"


def _summaries(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from .report import summarize

    return summarize(records)


class _OneProcess:
    """Stands where the other benchmark has its ranks."""

    rank = 0

    def barrier(self) -> None: ...
