# SPDX-License-Identifier: Apache-2.0
"""Wires the parts of the benchmark together."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from .leftovers import notice
from .provenance import provenance
from .settings import Settings, file_of, in_turn, parse

if TYPE_CHECKING:
    from .contenders import Copies

_PACKAGES = ("torch", "megatron-core", "transformer-engine")
# Those that the record of a run has, beside its shape.
_SETTINGS = ("setup", "rounds", "rotate", "iters", "warmup", "engine", "overlap", "deterministic", "single_thread")


def main(arguments: Sequence[str] | None = None) -> int:
    settings = parse(arguments)
    _set_environment(settings)
    import torch  # only now: what it and TransformerEngine read from the environment is set

    if not torch.cuda.is_available():
        print("this benchmark needs a GPU; benchmarks/run.py cpu is for machines without", file=sys.stderr)
        return 2
    from .model import start_ranks

    ranks = start_ranks(settings.shape, settings.deterministic, settings.share_gpus)
    status = Run(settings, ranks).execute()
    torch.distributed.destroy_process_group()  # not after an exception: it would wait for ranks that wait for this one
    return status


def _set_environment(settings: Settings) -> None:
    # Every preset is for one host, which need not have a network that gloo could find.
    defaults = {"NVTE_CPU_OFFLOAD_V1": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if settings.deterministic:
        defaults |= {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


class Run:
    """One run on this rank. Rank 0 writes the records of all, each as soon as it is there."""

    def __init__(self, settings: Settings, ranks: Any) -> None:
        from tqdm import tqdm

        from .measure import Bench, Counts, CudaGauge, MemoryTimeline
        from .model import Training, build_chunks, make_config

        self._settings = settings
        self._ranks = ranks
        self._begin = time.perf_counter()
        self._records: list[dict[str, Any]] = []
        self._own_turns: list[dict[str, Any]] = []
        self._timelines: list[MemoryTimeline] = []
        self._failed: set[str] = set()
        self._copies: list[Copies] = []
        self._check_engine()
        counts = Counts(settings.warmup, settings.iters)
        self._bar = tqdm(
            total=settings.rounds * len(settings.entries) * counts.total,
            desc="model",
            unit="step",
            disable=ranks.rank != 0,
        )
        self._chunks = build_chunks(
            settings.shape, make_config(settings.shape, settings.deterministic, **settings.overlap)
        )
        training = Training(settings.shape, self._chunks)
        self._gauge = CudaGauge()
        self._bench = Bench(training, ranks, self._gauge, counts, self._show)

    def execute(self) -> int:
        """Run the benchmark; return the exit status."""
        import torch
        from rich.console import Console

        from .budget import budgets, plot_budgets
        from .report import plot_memory, summarize, tables
        from .throughput import plot_trade, throughput, tokens_of_step

        self._publish([self._description()])
        self._bar.set_description("the machine")
        if self._settings.micro:
            self._measure_machine()
        with torch.autograd.set_multithreading_enabled(not self._settings.single_thread):
            self._measure_contenders()
        self._publish(self._bench.parity())
        self._bar.close()
        if self._ranks.rank == 0:
            summaries = summarize(self._records)
            found = throughput(summaries, self._records)
            self._write([*summaries, *found, *budgets(summaries, self._records)])
            self._write([{"kind": "end", "seconds": time.perf_counter() - self._begin}])
            if self._settings.memory_plot and self._timelines:
                plot_memory(self._timelines, self._settings.memory_plot)
            if self._settings.trade_plot and found:
                plot_trade(found, self._settings.trade_plot)
            if self._settings.budget_plot:
                plot_budgets(self._records, tokens_of_step(self._records[0]), self._settings.budget_plot)
            if summaries:
                Console(width=max(150, Console().width)).print(tables(self._title(), summaries, self._records))
        return 1 if self._failed else 0

    def _check_engine(self) -> None:
        from offload_engine import OffloadConfig

        for entry in self._settings.entries:
            OffloadConfig.from_flags(**self._settings.engine | dict(entry.engine))

    def _measure_machine(self) -> None:
        from . import host, link

        activation = self._settings.shape.activation_bytes
        self._publish(link.measure_link([activation, 2 * activation], self._ranks))
        self._publish([link.measure_reads(self._ranks)])
        # The others wait: these take the host's memory bandwidth and a quiet CPU.
        alone = []
        if self._ranks.rank == 0:
            alone = [link.measure_pinning(), link.measure_group_cost(), host.measure_host(self._ranks)]
        self._publish(alone)

    def _measure_contenders(self) -> None:
        from .contenders import Copies, make_contender

        contenders = [make_contender(e, self._chunks, self._settings.engine) for e in self._settings.entries]
        self._copies = [contender for contender in contenders if isinstance(contender, Copies)]
        self._bench.step()  # kernels are chosen and communicators made on the first step
        gc.collect()
        gc.freeze()  # the model is there to stay: no full collection should walk it in the middle of a step
        for number in range(self._settings.rounds):
            for contender in in_turn(contenders, number, self._settings.rotate):
                if contender.entry.label not in self._failed:
                    self._turn(contender, number)
            if number == 0 and self._settings.budgets:
                contenders += self._budgets()

    def _budgets(self) -> list[Any]:
        """Return contenders for budgets, the same on all ranks. Collective."""
        from .budget import entries_between
        from .contenders import make_contender

        turns = [turn for turns in self._ranks.gather(self._own_turns) for turn in turns]
        entries = entries_between(turns, self._settings.budgets)
        self._bar.total += len(entries) * (self._settings.rounds - 1) * self._bench.counts.total
        return [make_contender(entry, self._chunks, self._settings.engine) for entry in entries]

    def _turn(self, contender: Any, number: int) -> None:
        is_last = number == self._settings.rounds - 1
        extras = (lambda: self._extras(contender)) if is_last else None
        try:
            record = self._bench.turn(contender, number, extras)
        except Exception as error:
            if self._ranks.world_size > 1:  # the other ranks are waiting for this one
                raise
            self._failed.add(contender.entry.label)
            label = contender.entry.label
            self._bar.write(f"{label} failed: {error!r}", file=sys.stderr)
            self._publish([{"kind": "failure", "label": label, "round": number, "error": repr(error)}])
            return
        if what := notice(record):
            self._bar.write(f"{contender.entry.label}, rank {self._ranks.rank}: {what}", file=sys.stderr)
        for copies in self._copies:
            copies.follow(record, self._settings.shape.nmb)
        self._own_turns.append(record)
        self._publish([record])

    def _extras(self, contender: Any) -> None:
        from .measure import profile_step, record_history, record_memory

        label = contender.entry.label
        if self._settings.memory_plot:
            self._timelines.append(record_memory(label, self._gauge, self._bench.step))
        profiled = [e for e in self._settings.entries if e.kind in self._settings.profile_contenders]
        if self._settings.profile and contender.entry in profiled:
            file = file_of(self._settings.profile, contender.entry, is_only=len(profiled) == 1)
            profile_step(self._bench.step, file if self._ranks.rank == 0 else None)
        if self._settings.memory_history:  # last: it empties the caches
            file = file_of(self._settings.memory_history, contender.entry, is_only=len(self._settings.entries) == 1)
            record_history(self._gauge, self._bench.step, file if self._ranks.rank == 0 else None)

    def _show(self, what: str) -> None:
        self._bar.set_description(what, refresh=False)
        self._bar.update(what != "extra")

    def _publish(self, own: list[dict[str, Any]]) -> None:
        """Gather the records of all ranks on rank 0. Collective."""
        self._write([record for records in self._ranks.gather(own) for record in records])

    def _write(self, records: list[dict[str, Any]]) -> None:
        self._records += records
        if self._ranks.rank == 0 and self._settings.json:
            with self._settings.json.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in records)

    def _title(self) -> str:
        import torch

        from .model import num_gpus

        gpus = f"{num_gpus(self._ranks.world_size)} x {torch.cuda.get_device_name()}"
        is_shared = num_gpus(self._ranks.world_size) < self._ranks.world_size
        shared = f", shared by {self._ranks.world_size} processes: times say nothing" if is_shared else ""
        return f"setup {self._settings.setup}, {gpus}{shared}"

    def _description(self) -> dict[str, Any]:
        import torch

        from .model import num_gpus

        return {
            "kind": "run",
            **provenance(_PACKAGES),
            "rank": self._ranks.rank,
            "shape": asdict(self._settings.shape),
            **{name: getattr(self._settings, name) for name in _SETTINGS},
            "world_size": self._ranks.world_size,
            "num_gpus": num_gpus(self._ranks.world_size),
            "device": torch.cuda.get_device_name(),
        }
