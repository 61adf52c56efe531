#!/usr/bin/env python3
"""Figures of the engine on GPUs, beside no offload and megatron-core's own offload: a benchmark, not a test.

    NVTE_CPU_OFFLOAD_V1=1 python3 tools/bench_gpu.py --setup a --json bench.jsonl
    NVTE_CPU_OFFLOAD_V1=1 torchrun --nproc-per-node 2 tools/bench_gpu.py --setup c-dense --memory-plot memory.png
    python3 tools/bench_gpu.py --setup b --modules core_attn --modules core_attn,expert_fc1

The parts are in the folder `bench_gpu` beside this file; `bench_gpu/contenders.py` says how one model in one process is
switched between the contenders.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind what is installed, which may be compiled

from bench_gpu.main import main  # noqa: E402  # the folder, which Python finds before this file

if __name__ == "__main__":
    sys.exit(main())
