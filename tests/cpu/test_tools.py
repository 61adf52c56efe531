# SPDX-License-Identifier: Apache-2.0
"""Programs in `tools`, `benchmarks` and `examples`, and commands whose reader leaves early."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from megatron_patches import __main__ as launcher
from megatron_patches import add_offload_arguments
from megatron_patches._arguments import split_flags
from megatron_patches._model.thresholds import thresholds_of
from offload_engine.output import write_out
from tests.dist.programs import ROOT
from tests.interrupts.jobs import DEVICES, JOBS
from tests.tool_scripts import load_tool

for package in ("psutil", "rich", "tqdm"):
    pytest.importorskip(package)


def test_the_benchmark_of_cpus_still_knows_the_engine() -> None:
    """Its cheapest part runs; what it says of the time is not looked at."""
    from benchmarks import cpu

    calls, through_autograd = cpu.bench_cost(repeats=1, num_groups=4)
    assert "handler calls of a group" in calls.what and float(calls.value) > 0 and through_autograd.unit == "us"


# ---- tools/soak.py runs thousands of steps ----


soak = load_tool("soak")


@pytest.mark.parametrize("name", JOBS)
def test_nothing_grows(name: str) -> None:
    before, after = soak.soak(JOBS[name](DEVICES["cpu"]()), 60, name)
    assert not soak.growth(before, after), (before, after)
    assert after.slab_kib > 0, "nothing moves"


# ---- tools/mutation_check.py ----


mutation_check, mutations = load_tool("mutation_check"), load_tool("mutations")


def test_every_documented_rule_has_a_wait_to_remove() -> None:
    rules = set(re.findall(r"^ (\d)\. ", (ROOT / "offload_engine/_saved/transfers.py").read_text(), re.MULTILINE))
    found = {rule for m in mutation_check.find_waits(ROOT) for rule in re.findall(r"Rule (\d)", m.code)}
    assert rules and rules <= found, f"rules {sorted(rules - found)} are named at no wait"


def test_every_wait_on_an_event_is_found() -> None:
    found = {(mutation.path, mutation.line) for mutation in mutation_check.find_waits(ROOT)}
    devices = ROOT / "offload_engine" / "_devices"  # implement the waits; they do not decide on any
    others = {ROOT / "offload_engine" / name for name in ("rehearsal/device.py", "_budget/link.py")}  # no saved tensor
    for path in (ROOT / "offload_engine").rglob("*.py"):
        if path.is_relative_to(devices) or path in others:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if re.search(r"(?<!def )\b(wait_event|synchronize|_?await_\w+|wait_for_last_copy)\(", line):
                is_found = (path.relative_to(ROOT), number) in found or "early wait" in line
                assert is_found, f"{path.name}:{number}: {line.strip()}"


def test_decisions_of_every_policy_are_changed() -> None:
    policies = {f"_policy/{path.name}" for path in (ROOT / "offload_engine/_policy").glob("*.py")}
    without_decisions = {"_policy/__init__.py", "_policy/policy.py", "_policy/choose.py"}
    assert policies - without_decisions <= set(mutations.FILES)
    assert len(set(mutations.FILES)) == len(mutations.FILES) > 20


# ---- examples/slurm.sh ----


COMMANDS = {
    "scontrol": '[ "$*" = "show hostnames gpu-[a-c]" ] && printf "%s\\n" gpu-a gpu-b gpu-c',
    # One task on each node, as --ntasks-per-node=1 asks for.
    "srun": 'while [[ $1 == --* ]]; do shift; done\nfor node in 0 1 2; do SLURM_PROCID=$node "$@"; done',
    "torchrun": f'{sys.executable} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"',
}


def test_every_node_starts_its_ranks(tmp_path: Path) -> None:
    for name, text in COMMANDS.items():
        (script := tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        script.chmod(0o755)
    slurm = {"SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "gpu-[a-c]", "SLURM_GPUS_ON_NODE": "4"}
    environment = {**os.environ, **slurm, "SLURM_SUBMIT_DIR": str(ROOT), "MEGATRON_LM": str(tmp_path)}
    environment["PATH"] = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", str(ROOT / "examples/slurm.sh"), "--train-iters", "7", "--offload-min-tensor-bytes", "1.5 MB"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    started = [get_args_parser().parse_args(json.loads(line)) for line in done.stdout.splitlines()]
    assert [args.node_rank for args in started] == [0, 1, 2]
    for args in started:
        assert (args.nnodes, args.nproc_per_node) == ("3", "4")
        assert (args.master_addr, args.master_port) == ("gpu-a", 29500)
        assert args.module and args.training_script == "megatron_patches"
        own, rest = split_flags(args.training_script_args)
        assert rest[0] == "pretrain_gpt.py" and rest[-4:-2] == ["--train-iters", "7"]
        offload, _ = add_offload_arguments(argparse.ArgumentParser()).parse_known_args([*own, *rest[1:]])
        assert offload.offload_gpu_budget == "90%" and thresholds_of(offload).of_all == 1_500_000
        assert offload.offload_host_limit_bytes is None, "the engine shares the node's memory by itself"


# ---- commands whose reader leaves early, as head does ----


@pytest.mark.parametrize(
    "command",
    [lambda: write_out("a line\n"), lambda: launcher.main(["--list-modules"])],
    ids=["a line", "more than the buffer takes"],
)
def test_a_command_without_a_reader_ends_without_an_error(
    command: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:  # its end flushes once more, as that of Python does
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as ended:
            command()
    assert ended.value.code == 128 + signal.SIGPIPE
