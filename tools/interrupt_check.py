#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Interrupts training steps at random times and places, and checks what is left behind each interrupt.

python tools/interrupt_check.py [--num N] [--first SEED] [--batch N] [-j JOBS]

Each trial is drawn from its seed: one front-end or the engine by hand, one device, and a KeyboardInterrupt by a real
timer, in front of a byte code of the engine, in a destructor or in close(). Behind it nothing may be left (storages,
host bytes, locks, threads, hooks), the next step has to be equal to the last bit, and close() has to work;
tests/interrupts has the checks. A trial that hangs ends its process. The exit status is 0 if all passed, else 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # the tests are not installed

from tests.interrupts.trials import EXPECTED, PLACES, Trial  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=5000, help="how many trials (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=100, help="trials of one process (default: %(default)s)")
    parser.add_argument(
        "-j", "--jobs", type=int, default=1, help="how many processes run at once (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    end = options.first + options.num
    batches = [(first, min(first + options.batch, end)) for first in range(options.first, end, options.batch)]
    trials: list[Trial] = []
    with tqdm(total=options.num, desc="interrupts", unit="trial") as bar, ThreadPoolExecutor(options.jobs) as threads:

        def run(batch: tuple[int, int]) -> None:
            for trial in run_batch(*batch):
                trials.append(trial)
                if trial.outcome not in EXPECTED:
                    bar.write(f"seed {trial.seed}: {trial.outcome[:100]}")
                bar.update()

        list(threads.map(run, batches))
    failed = sorted(trial for trial in trials if trial.outcome not in EXPECTED)
    _print(trials, failed)
    return 1 if failed else 0


def run_batch(first: int, end: int) -> Iterator[Trial]:
    """Run the trials of seeds `first` to `end - 1` in processes of their own; a hang ends one, and the next goes on."""
    while first < end:
        command = [sys.executable, "-m", "tests.interrupts", str(first), str(end)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, env=environment, **pipes) as process:
            assert process.stdout is not None and process.stderr is not None
            for line in process.stdout:
                first += 1
                yield Trial(*json.loads(line))
            tracebacks = process.stderr.read()
        if first < end:
            yield Trial(first, "", "", "", f"the process ended with {process.returncode}: {tracebacks[-2000:]}")
            first += 1


def _print(trials: list[Trial], failed: list[Trial]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 160)
    table = Table("interrupted", *EXPECTED, "failed")
    for place in dict.fromkeys(PLACES):
        outcomes = Counter(trial.outcome for trial in trials if trial.place == place)
        num_failed = sum(trial.place == place for trial in failed)
        numbers = *(outcomes[outcome] for outcome in EXPECTED), num_failed
        table.add_row(place, *map(str, numbers), style="bold red" if num_failed else None)
    console.print(table)
    for trial in failed:
        console.print(escape(f"seed {trial.seed}: {trial.front_end}, {trial.device}, {trial.place}: {trial.outcome}"))
    console.print(f"{len(trials) - len(failed)} of {len(trials)} trials passed")


if __name__ == "__main__":
    sys.exit(main())
