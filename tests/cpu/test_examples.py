"""Each example of an integration trains, and ends with the losses of the run without offload."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
LOSS = re.compile(r"loss'?:? '?(\d+\.\d+)")

NEEDS = {
    "with_transformers.py": ["transformers", "accelerate"],
    "with_lightning.py": ["lightning"],
    "with_accelerate.py": ["accelerate", "transformers"],
    "with_pipelining.py": [],
}


def skip_without(*packages: str) -> None:
    """Skip the test if one of them is not there."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -e '.[integrations]' makes this run")


def losses(name: str, *options: str) -> list[str]:
    """Read the losses that the example prints, in two steps."""
    skip_without(*NEEDS[name])
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    arguments = [*(launcher if name == "with_pipelining.py" else []), str(EXAMPLES / name), "--steps", "2", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=240)
    assert run.returncode == 0, run.stdout + run.stderr
    found = LOSS.findall(run.stdout)
    assert len(found) >= 2, run.stdout + run.stderr
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_losses_are_those_without_offload(name: str) -> None:
    with_offload = losses(name)
    assert with_offload == losses(name, "--no-offload")
    assert float(with_offload[-1]) < float(with_offload[0])
