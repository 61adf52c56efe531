#!/usr/bin/env python3
"""Where the host waits for the GPU in a chrome trace, which of these waits a copy of activations caused, and which
pauses between kernels are longer than in another trace.

    torchrun --nproc-per-node 2 tools/bench_gpu.py --setup fine-2 --no-micro --rounds 1 \\
        --contenders none,ours,incumbent --profile trace.json.gz --profile-contender none,ours,incumbent
    python3 tools/trace_waits.py none=trace-none.json.gz ours=trace-ours-qkv_linear.json.gz --picture waits.png

The parts are in the folder `trace_waits` beside this file.
"""

from __future__ import annotations

import sys

from trace_waits.main import main  # the folder, which Python finds before this file

if __name__ == "__main__":
    sys.exit(main())
