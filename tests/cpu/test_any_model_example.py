# SPDX-License-Identifier: Apache-2.0
"""The example of `manage_activations` runs, on the CPU and on a GPU, and says what is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dist.programs import ROOT, run_program

EXAMPLE = ROOT / "examples" / "any_model.py"


def run(device: str, folder: Path, *options: str) -> str:
    return run_program(EXAMPLE, "--steps", "3", "--device", device, *options, cwd=folder)[0].out


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_it_trains_with_the_same_losses_and_less_memory(device: str, tmp_path: Path) -> None:
    offloaded, plain = run(device, tmp_path), run(device, tmp_path, "--no-offload")
    (losses,) = re.findall(r"losses (.*)", offloaded)
    assert f"losses {losses}" in plain and len(set(losses.split())) == 3
    saved, resident, host, late = map(int, re.findall(r"\d+", offloaded.split("saved per step")[1]))
    assert resident < saved / 4 and host >= saved / 2 and late == 0
    assert not list(tmp_path.iterdir())
