#!/usr/bin/env python3
"""Budgets from the floor to no offload, beside settings made by hand, in one run on one device: a benchmark.

    python3 tools/budget_curve.py --json curve.json --plot curve.png
    python3 tools/budget_curve.py --seq 4096 --budgets 3
    python3 tools/budget_curve.py --draw curve.json --plot curve.png
    python3 tools/budget_curve.py --device cpu --tiny

The parts are in the folder `budget_curve` beside this file; `budget_curve/by_hand.py` lists the settings.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # behind what is installed, which may be compiled

from budget_curve.main import main  # noqa: E402  # the folder, which Python finds before this file

if __name__ == "__main__":
    sys.exit(main())
