#!/usr/bin/env python3
"""Figures of the front-ends on one device, beside what else offloads activations in PyTorch: a benchmark, not a test.

    python3 tools/bench_frontends.py --seq 32768 --json bench.jsonl --rivals rivals
    python3 tools/bench_frontends.py --quick
    python3 tools/bench_frontends.py --longest
    python3 tools/bench_frontends.py --device cpu --tiny

The parts are in the folder `bench_frontends` beside this file; `bench_frontends/contenders.py` lists who takes part.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind what is installed, which may be compiled

from bench_frontends.main import main  # noqa: E402  # the folder, which Python finds before this file

if __name__ == "__main__":
    sys.exit(main())
