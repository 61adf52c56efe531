# SPDX-License-Identifier: Apache-2.0
"""No program asks the system for a free port and uses it later: another may have taken it by then."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
ASKS = re.compile(r"\.bind\(\(")


def test_who_needs_a_port_listens_on_it_at_once() -> None:
    files = [path for name in ("tests", "tools", "benchmarks", "examples") for path in (ROOT / name).rglob("*")]
    asking = [path for path in files if path.suffix in (".py", ".sh") and ASKS.search(path.read_text())]
    assert len(files) > 300 and not asking
