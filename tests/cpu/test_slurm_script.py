# SPDX-License-Identifier: Apache-2.0
"""`examples/slurm.sh` with stand-ins for Slurm's commands: what torchrun is told on each node, and the script by it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from torch.distributed.run import get_args_parser

from megatron_patches import add_offload_arguments
from megatron_patches._arguments import split_flags
from megatron_patches._model.thresholds import thresholds_of

ROOT = Path(__file__).parents[2]
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
        own, script = split_flags(args.training_script_args)
        assert script[0] == "pretrain_gpt.py" and script[-4:-2] == ["--train-iters", "7"]
        offload, _ = add_offload_arguments(argparse.ArgumentParser()).parse_known_args([*own, *script[1:]])
        assert offload.offload_gpu_budget == "90%" and thresholds_of(offload).of_all == 1_500_000
        assert offload.offload_host_limit_bytes is None, "the engine shares the node's memory by itself"
