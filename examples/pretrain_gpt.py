#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Pretrains a GPT on megatron-core's public API, with or without activation offload. Start it with torchrun:

    torchrun examples/pretrain_gpt.py --offload-activation

trains on the help topics of Python. On text of yours, in a pipeline:

    python examples/prepare_text.py book.txt --output-prefix out/book
    torchrun --nproc-per-node 2 examples/pretrain_gpt.py --data-path out/book --offload-activation \
        --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2

Runs on GPUs with NCCL where there are some, else on CPUs with gloo. Flags are named as in Megatron-LM.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence

from gpt_trainer.arguments import UsageError, parse_arguments

from megatron_patches import end_run


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("megatron_patches").setLevel(logging.INFO)  # the tables of the second step
    logging.getLogger("megatron.core.models.gpt.gpt_model").setLevel(logging.ERROR)  # announces its successor
    warnings.filterwarnings("ignore", module="megatron")  # what it warns of on import concerns fused kernels
    try:
        train(args)
    except UsageError as error:
        end_run("pretrain_gpt.py", str(error))
    return 0


def train(args: argparse.Namespace) -> None:
    """Set up this process, train, and tear everything down again.

    Raises:
        UsageError: before the first step, for what the user has to change.
    """
    # megatron-core takes seconds to import: not for --help
    from gpt_trainer.environment import environment, is_common, patching
    from gpt_trainer.training import Training

    from megatron_patches import apply_cpu_support

    with patching():
        cpu_support = apply_cpu_support()
    with cpu_support, environment(args) as device:
        training = Training(args, device)
        try:
            training.run()
        except Exception as error:
            (training.close if is_common(error) else training.abandon)()
            raise
        training.close()


if __name__ == "__main__":
    sys.exit(main())
