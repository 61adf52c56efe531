# SPDX-License-Identifier: Apache-2.0
"""`examples/slurm.sh` with stand-ins for Slurm's commands: what torchrun is told on each node, and the script by it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from megatron_patches import add_offload_arguments
from megatron_patches._arguments import split_flags
from megatron_patches._model.thresholds import thresholds_of

ROOT = Path(__file__).parents[2]
NODES = ("gpu-a", "gpu-b", "gpu-c")
COMMANDS = {
    "scontrol": f'[ "$*" = "show hostnames gpu-[a-c]" ] && printf "%s\\n" {" ".join(NODES)}',
    # One task on each node, as --ntasks-per-node=1 asks for.
    "srun": 'while [[ $1 == --* ]]; do shift; done\nfor node in 0 1 2; do SLURM_PROCID=$node "$@"; done',
    "torchrun": f'{sys.executable} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"',
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name, text in COMMANDS.items():
        script = tmp_path / name
        script.write_text(f"#!/usr/bin/env bash\n{text}\n")
        script.chmod(0o755)
    slurm = {"SLURM_NNODES": "3", "SLURM_JOB_NODELIST": "gpu-[a-c]", "SLURM_GPUS_ON_NODE": "4"}
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **slurm, "PATH": path, "SLURM_SUBMIT_DIR": str(ROOT), "MEGATRON_LM": str(tmp_path)}


def test_every_node_starts_its_ranks(environment: dict[str, str]) -> None:
    command = [
        "bash",
        str(ROOT / "examples" / "slurm.sh"),
        "--train-iters",
        "7",
        "--offload-min-tensor-bytes",
        "1.5 MB",
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    started = [get_args_parser().parse_args(json.loads(line)) for line in done.stdout.splitlines()]
    assert [args.node_rank for args in started] == [0, 1, 2]
    for args in started:
        assert (args.nnodes, args.nproc_per_node) == ("3", "4")
        assert (args.master_addr, args.master_port) == (NODES[0], 29500)
        assert args.module and args.training_script == "megatron_patches"
        own, script = split_flags(args.training_script_args)
        assert script[0] == "pretrain_gpt.py" and script[-4:-2] == ["--train-iters", "7"]
        offload, _ = add_offload_arguments(argparse.ArgumentParser()).parse_known_args([*own, *script[1:]])
        assert thresholds_of(offload) == thresholds_of(argparse.Namespace(offload_min_tensor_bytes="1500000"))
        assert offload.offload_gpu_budget == "90%" and offload.offload_cpu_affinity
        assert offload.offload_host_limit_bytes is None, "the engine shares the node's memory by itself"
