# SPDX-License-Identifier: Apache-2.0
"""Wires the parts of the benchmark together."""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.flags import set_defaults
from benchmarks.records import Records, provenance
from benchmarks.tables import Record, show

from .settings import ENVIRONMENT, parse

_PACKAGES = ("torch", "megatron-core", "transformer-engine")
# Those that the record of a run has, beside its shape.
_SETTINGS = ("setup", "rounds", "rotate", "iters", "warmup", "model")


def main(arguments: Sequence[str] | None = None) -> int:
    settings = parse(arguments)
    set_defaults(ENVIRONMENT)
    import torch  # only now: what it and TransformerEngine read from the environment is set

    if not torch.cuda.is_available():
        print("this benchmark needs a GPU; benchmarks/run.py cpu is for machines without", file=sys.stderr)
        return 2
    from .model import start_ranks

    ranks = start_ranks(settings.shape)
    status = Run(settings, ranks).execute()
    torch.distributed.destroy_process_group()  # not after an exception: it would wait for ranks that wait for this one
    return status


class Run:
    """One run on this rank. Each has the records of all, which rank 0 writes as soon as they are there."""

    def __init__(self, settings: argparse.Namespace, ranks: Any) -> None:
        from tqdm import tqdm

        from offload_engine import OffloadConfig

        from .measure import Bench
        from .model import Training, build_chunks, make_config

        self._settings = settings
        self._ranks = ranks
        self._begin = time.perf_counter()
        self._records = Records(settings.json if ranks.rank == 0 else None)
        self._failed: set[str] = set()
        self._contenders: list[Any] = []
        for entry in settings.entries:  # mistakes, before the model is made
            OffloadConfig.from_flags(**dict(entry.engine))
        self._turn_steps = settings.warmup + 1 + settings.iters
        num_steps = settings.rounds * len(settings.entries) * self._turn_steps
        self._bar = tqdm(total=num_steps, desc="model", unit="step", disable=ranks.rank != 0)
        config = make_config(settings.shape, **settings.model)
        self._chunks = build_chunks(settings.shape, config)
        training = Training(settings.shape, self._chunks)
        self._bench = Bench(training, ranks, settings.warmup, settings.iters, self._show)

    def execute(self) -> int:
        """Run the benchmark; return the exit status."""
        self._publish([self._description()])
        self._bar.set_description("the machine")
        if not self._settings.no_micro:
            self._measure_machine()
        self._measure_contenders()
        self._publish(self._bench.parity())
        self._bar.close()
        if self._ranks.rank == 0:
            self._report()
        return 1 if self._failed else 0

    def _report(self) -> None:
        from . import budget, report

        settings, records = self._settings, self._records
        summaries = report.summarize(records)
        found = report.throughput(summaries, records[0])
        records.write([*summaries, *found, *budget.budgets(summaries, records)])
        records.write([{"kind": "end", "seconds": time.perf_counter() - self._begin}])
        if settings.trade_plot and found:
            report.plot_trade(found, settings.trade_plot)
        run = records[0]
        show(*report.tables(f"setup {settings.setup}, {run['world_size']} x {run['device']}", records))

    def _measure_machine(self) -> None:
        from . import machine

        activation = self._settings.shape.activation_bytes
        self._publish([machine.measure_link(size, self._ranks) for size in (activation, 2 * activation)])
        # The others wait: these need a quiet CPU.
        alone = []
        if self._ranks.rank == 0:
            alone = [machine.measure_pinning(), machine.measure_group_cost()]
        self._publish(alone)

    def _measure_contenders(self) -> None:
        self._add(self._settings.entries)
        self._bench.training.step()  # kernels are chosen and communicators made on the first step
        gc.collect()
        gc.freeze()  # the model is there to stay: no full collection should walk it in the middle of a step
        for number in range(self._settings.rounds):
            # The first one finds the GPU as the pause left it.
            first = number % len(self._contenders) if self._settings.rotate else 0
            for contender in self._contenders[first:] + self._contenders[:first]:
                if contender.entry.label not in self._failed:
                    self._turn(contender, number)
            if number == 0 and self._settings.budgets:
                self._add_budgets()

    def _add(self, entries: Sequence[Any]) -> None:
        from .contenders import make_contender

        self._contenders += [make_contender(entry, self._chunks) for entry in entries]

    def _add_budgets(self) -> None:
        """Add contenders for budgets, the same on all ranks: each has the records of all."""
        from .budget import entries_between

        entries = entries_between(self._records.of("turn"), self._settings.budgets)
        self._bar.total += len(entries) * (self._settings.rounds - 1) * self._turn_steps
        self._add(entries)

    def _turn(self, contender: Any, number: int) -> None:
        label = contender.entry.label
        try:
            record = self._bench.turn(contender, number)
        except Exception as error:
            if self._ranks.world_size > 1:  # the other ranks are waiting for this one
                raise
            self._failed.add(label)
            self._bar.write(f"{label} failed: {error!r}", file=sys.stderr)
            self._publish([{"kind": "failure", "label": label, "round": number, "error": repr(error)}])
            return
        self._publish([record])

    def _show(self, what: str) -> None:
        self._bar.set_description(what, refresh=False)
        self._bar.update()

    def _publish(self, own: list[Record]) -> None:
        """Gather the records of all ranks, which rank 0 writes. Collective."""
        self._records.write(record for records in self._ranks.gather(own) for record in records)

    def _description(self) -> Record:
        import torch

        return {
            "kind": "run",
            **provenance(_PACKAGES),
            "rank": self._ranks.rank,
            "shape": asdict(self._settings.shape),
            **{name: getattr(self._settings, name) for name in _SETTINGS},
            "world_size": self._ranks.world_size,
            "device": torch.cuda.get_device_name(),
        }
