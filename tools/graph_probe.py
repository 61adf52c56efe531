"""Probe of CUDA graphs that contain offloaded modules: bits, memory, step time and host time. Needs a GPU.

python3 tools/graph_probe.py --json probe.jsonl                 all parts, each in a process of its own
python3 tools/graph_probe.py --json probe.jsonl --only facts    one of them
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind what is installed, which may be compiled

from graph_probe.main import main  # noqa: E402  # the folder, which Python finds before this file

if __name__ == "__main__":
    sys.exit(main())
