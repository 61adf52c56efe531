# SPDX-License-Identifier: Apache-2.0
"""What holds of several programs in `tools` and `benchmarks`, and of the commands that documents name."""

from __future__ import annotations

import importlib
import re

import pytest

pytest.importorskip("tqdm")

from tests.dist.programs import ROOT


def test_the_benchmark_of_cpus_still_knows_the_engine() -> None:
    """Its cheapest part runs; what it says of the time is not looked at."""
    from benchmarks import cpu

    calls, through_autograd = cpu.bench_cost(repeats=1, num_groups=4)
    assert "handler calls of a group" in calls.what and float(calls.value) > 0 and through_autograd.unit == "us"


def commands() -> list[str]:
    """Return the commands of the result files, each of which is one benchmark."""
    texts = (file.read_text() for file in (ROOT / "docs" / "results").glob("*.json"))
    found = re.findall(r'"[^"]*benchmarks/run\.py ((?:gpu|frontends) [^"\\]*)"', "\n".join(texts))
    return [command.replace("RIVALS", ".").partition("  #")[0] for command in found]


def test_the_commands_of_result_files_are_understood() -> None:
    assert len(commands()) > 10
    for command in commands():
        name, *flags = command.split()
        importlib.import_module(f"benchmarks.{name}.settings").parse(flags)
