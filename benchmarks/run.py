#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a benchmark of this folder: `python benchmarks/run.py NAME [OPTIONS]`; `--help` behind the name lists them.

cpu              host time of a group, on a machine without a GPU
gpu              beside no offload, megatron-core's own and recomputation, on GPUs; torchrun starts several ranks
frontends        `enable_activation_offloading` and the others beside PyTorch's and other packages' offload
budget_curve     budgets from the floor to no offload, beside settings made by hand
recipes          steps as recipes set them up: captured, sharded, recomputing; beside megatron-core's own offload
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

NAMES = ("cpu", "gpu", "frontends", "budget_curve", "recipes")


def main() -> int:
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name not in NAMES:
        print(__doc__, file=sys.stdout if name in ("-h", "--help") else sys.stderr)
        return 0 if name in ("-h", "--help") else 2
    is_folder = (Path(__file__).parent / name).is_dir()
    status: int = importlib.import_module(f"benchmarks.{name}.main" if is_folder else f"benchmarks.{name}").main(
        sys.argv[2:]
    )
    return status


if __name__ == "__main__":
    # The folder itself must not be searched; the checkout is, behind what is installed, which may be compiled.
    sys.path[0:1] = []
    sys.path.append(str(Path(__file__).resolve().parents[1]))
    sys.exit(main())
