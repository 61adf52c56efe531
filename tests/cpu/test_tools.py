# SPDX-License-Identifier: Apache-2.0
"""Programs in `tools`, `benchmarks` and `examples`, and commands whose reader leaves early."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from benchmarks.budgets import predicted_step_ms
from megatron_patches import __main__ as launcher
from megatron_patches import add_offload_arguments
from megatron_patches._arguments import split_flags
from megatron_patches._model.thresholds import thresholds_of
from offload_engine.output import write_out
from tests.dist.programs import ROOT
from tests.tool_scripts import load_tool

for package in ("psutil", "rich", "tqdm"):
    pytest.importorskip(package)


def test_the_benchmark_of_cpus_still_knows_the_engine(tmp_path: Path) -> None:
    """It runs; what it says of the time is not looked at."""
    from benchmarks import cpu

    assert cpu.main(["--repeats", "1", "--json", str(tmp_path / "cost.jsonl")]) == 0
    assert json.loads((tmp_path / "cost.jsonl").read_text())["kind"] == "group_cost"


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


def test_a_command_without_a_reader_ends_without_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it prints one line, or more than the buffer takes."""
    for command in (lambda: write_out("a line\n"), lambda: launcher.main(["--list-modules"])):
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as stdout:  # its end flushes once more, as that of Python does
            monkeypatch.setattr(sys, "stdout", stdout)
            with pytest.raises(SystemExit) as ended:
                command()
        assert ended.value.code == 128 + signal.SIGPIPE


# ---- commands of result files, and the quickstart's table ----


def test_the_commands_of_result_files_are_understood() -> None:
    """Each is one benchmark; those of earlier commits are left out."""
    texts = (file.read_text() for file in (ROOT / "docs" / "results").glob("*.json"))
    found = re.findall(r'"(?!at commit )[^"]*benchmarks/run\.py (gpu|frontends) ([^"\\]*)"', "\n".join(texts))
    assert len(found) > 10
    for name, flags in found:
        settings = importlib.import_module(f"benchmarks.{name}.settings")
        settings.parse(flags.replace("RIVALS", ".").partition("  #")[0].split())


def test_settings_by_hand_warm_up_as_long_as_the_budgets_beside_them() -> None:
    parse = importlib.import_module("benchmarks.gpu.settings").parse
    budgets = ["--contenders", "none", "--budget-curve", "1"]
    assert parse([]).warmup < parse(budgets).warmup
    assert parse([*budgets, "--warmup", "3"]).warmup == 3


def test_a_predicted_time_is_that_of_the_slowest_rank() -> None:
    """Stages of a pipeline predict their own; the rank that holds most need not be the slowest one."""

    def turns(*predicted: tuple[float | None, ...]) -> list[dict[str, Any]]:
        of_ranks = ((number, each) for number, times in enumerate(predicted) for each in times)
        return [
            {"round": number, "budget": {} if each is None else {"predicted_ms": each}} for number, each in of_ranks
        ]

    assert predicted_step_ms(turns((1355.0, 1319.0), (1314.0, 1360.0), (1350.0, 1300.0))) == 1355.0
    assert predicted_step_ms(turns((1355.0, None))) is None


def test_the_quickstart_says_what_a_budget_predicted_and_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart = load_tool("quickstart")

    def write(name: str, losses: list[float], mib: int, plan: dict[str, Any] | None = None) -> None:
        offload = {"peak_resident_saved_bytes": mib << 20, "plan": plan, "prefetch_misses": 0}
        offload |= {"copied_out_bytes": 0, "copied_in_bytes": 0}
        ranks = [{"offload": offload, "rss_peak_bytes": 1 << 30}] * 2
        steps = [{"loss": loss, "step_ms": 7.0, "ranks": ranks, "offload": offload} for loss in losses]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, steps)))

    plan = {"budget_bytes": 400 << 20, "predicted_peak_bytes": 390 << 20, "predicted_step_ms": 8.0}
    for losses, status in ([3.0, 2.0, 1.0], 0), ([3.0, 2.5], 1):
        write("plain", [3.0, 2.0], 600)
        write("offload", [3.0, 2.0], 200)
        write("budget", losses, 380, plan)
        assert quickstart.main([str(tmp_path)]) == status
        printed = capsys.readouterr().out
        rows = {
            row[1]: row[2:-1] for line in printed.splitlines() if len(row := re.split(r"\s*[│]\s*", line.strip())) > 1
        }
        assert rows["budget"][:3] == ["", "", "400/400"]
        assert rows["budget, predicted"][:3] == ["", "8", "390/390"]
        assert rows["budget, measured"][:3] == ["NO" if status else "yes", "7", "380/380"]
