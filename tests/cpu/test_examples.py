# SPDX-License-Identifier: Apache-2.0
"""The examples train, end with the losses of the run without offload, and say what is true."""

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


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_losses_are_those_without_offload(name: str, tmp_path: Path) -> None:
    def losses(*options: str) -> list[str]:
        num_ranks = 2 if name == "with_pipelining.py" else 1
        printed = run_program(EXAMPLES / name, "--steps", "2", *options, cwd=tmp_path, num_ranks=num_ranks)
        return LOSS.findall("".join(of_rank.out for of_rank in printed))

    skip_without(*NEEDS[name])
    with_offload = losses()
    assert with_offload == losses("--no-offload")
    assert len(with_offload) >= 2 and float(with_offload[-1]) < float(with_offload[0])


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
    skip_without("transformers")
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    (printed,) = run_program(EXAMPLES / "checkpointed_model.py", "3", cwd=tmp_path, environment=environment)
    assert "equal to the last bit: True" in printed.out
    inputs, on_device, plain, offloaded = (int(kib) for kib in re.findall(r"(\d+) KiB", printed.out))
    assert (inputs, on_device) == (12 * 256, 2 * 256)
    assert plain - offloaded >= inputs - on_device - 256  # the embeddings, the first input, are held by the model too
