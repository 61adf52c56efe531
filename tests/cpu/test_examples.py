# SPDX-License-Identifier: Apache-2.0
"""Each example of an integration trains, and ends with the losses of the run without offload."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.dist.programs import ROOT, run_program

EXAMPLES = ROOT / "examples"
LOSS = re.compile(r"loss'?:? '?(\d+\.\d+)")

NEEDS = {
    "with_transformers.py": ["transformers", "accelerate"],
    "with_lightning.py": ["lightning"],
    "with_accelerate.py": ["accelerate", "transformers"],
    "with_pipelining.py": [],
    "with_trl.py": ["trl", "datasets"],
}


def skip_without(*packages: str) -> None:
    """Skip the test if one of them is not there."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -e '.[integrations,trl]' makes this run")


def losses(name: str, cwd: Path, *options: str) -> list[str]:
    """Read the losses that the example prints, in two steps."""
    skip_without(*NEEDS[name])
    num_ranks = 2 if name == "with_pipelining.py" else 1
    printed = run_program(EXAMPLES / name, "--steps", "2", *options, cwd=cwd, num_ranks=num_ranks)
    found = LOSS.findall("".join(of_rank.out for of_rank in printed))
    assert len(found) >= 2, printed
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_losses_are_those_without_offload(name: str, tmp_path: Path) -> None:
    with_offload = losses(name, tmp_path)
    assert with_offload == losses(name, tmp_path, "--no-offload")
    assert float(with_offload[-1]) < float(with_offload[0])
