"""What the programs in `tools` have in common."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("tqdm")

from tests.tool_scripts import TOOLS


@pytest.mark.parametrize("name", ["bench_gpu", "bench_frontends"])
def test_a_benchmark_measures_the_package_that_is_installed(name: str, tmp_path: Path) -> None:
    """It may be compiled, which the one beside the tools is not."""
    package = tmp_path / "offload_engine"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit('the one that is installed')")
    done = subprocess.run(
        [sys.executable, str(TOOLS / f"{name}.py"), "--help"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stderr.strip().endswith("the one that is installed")
