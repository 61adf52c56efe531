# SPDX-License-Identifier: Apache-2.0
"""The examples of `manage_activations` and `offload_wrapper` run, and say what is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dist.programs import ROOT, run_program

EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_any_model_trains_with_the_same_losses_and_less_memory(device: str, tmp_path: Path) -> None:
    def run(*options: str) -> str:
        return run_program(EXAMPLES / "any_model.py", "--steps", "3", "--device", device, *options, cwd=tmp_path)[0].out

    offloaded, plain = run(), run("--no-offload")
    (losses,) = re.findall(r"losses (.*)", offloaded)
    assert f"losses {losses}" in plain and len(set(losses.split())) == 3
    saved, resident, host, late = map(int, re.findall(r"\d+", offloaded.split("saved per step")[1]))
    assert resident < saved / 4 and host >= saved / 2 and late == 0
    assert not list(tmp_path.iterdir())


def test_checkpointed_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    (printed,) = run_program(EXAMPLES / "checkpointed_model.py", "3", cwd=tmp_path, environment=environment)
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", printed.out).groups())  # type: ignore[union-attr]
    assert last < first and "equal to the last bit: True" in printed.out
    inputs, on_device, plain, offloaded = (int(kib) for kib in re.findall(r"(\d+) KiB", printed.out))
    assert (inputs, on_device) == (12 * 256, 2 * 256)
    assert plain - offloaded >= inputs - on_device - 256  # the embeddings, the first input, are held by the model too
    assert not list(tmp_path.iterdir())
