#!/usr/bin/env python3
"""Pretrains a GPT on megatron-core's public API, with or without activation offload. Start it with torchrun:

    python examples/prepare_text.py --output-prefix data/topics
    torchrun --nproc_per_node 2 examples/pretrain_gpt.py --data-path data/topics \
        --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2

Runs on GPUs with NCCL where there are some, else on CPUs with gloo. Flags are named as in Megatron-LM.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
import warnings
from collections.abc import Sequence

import torch
from gpt_trainer.arguments import parse_arguments


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)  # announces its successor
    warnings.filterwarnings("ignore", module="megatron")  # what it warns of on import concerns fused kernels
    from gpt_trainer.environment import environment  # megatron-core takes seconds to import: not for --help

    from megatron_patches import apply_cpu_support

    with apply_cpu_support(), environment(args) as device:
        return run(args, device)


def run(args: argparse.Namespace, device: torch.device) -> int:
    """Trains in processes that are set up; returns the exit status."""
    from gpt_trainer.checkpoint import CheckpointError
    from gpt_trainer.data import DataError
    from gpt_trainer.model import ConfigError
    from gpt_trainer.training import Training

    try:
        with contextlib.closing(Training(args, device)) as training:
            training.run()
    except (CheckpointError, ConfigError, DataError) as error:
        if torch.distributed.get_rank() == 0:
            print(f"pretrain_gpt.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
