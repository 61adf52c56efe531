#!/usr/bin/env python3
"""Why the allocator reserves more than is allocated: the requests that it found no block for, and what was free then.

    python3 tools/bench_gpu.py --setup b --no-micro --rounds 1 --memory-history history.pickle
    python3 tools/reserved_memory.py history-none.pickle history-ours-core_attn.pickle

Such a history is what `torch.cuda.memory._dump_snapshot` writes; https://pytorch.org/memory_viz draws it.
The parts are in the folder `reserved_memory` beside this file.
"""

from __future__ import annotations

import sys

from reserved_memory.main import main  # the folder, which Python finds before this file

if __name__ == "__main__":
    sys.exit(main())
