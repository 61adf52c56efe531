"""The example of `offload_wrapper` runs, and says what is true."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_checkpointed_model_example(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")
    command = [sys.executable, str(ROOT / "examples" / "checkpointed_model.py"), "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", done.stdout).groups())  # type: ignore[union-attr]
    assert last < first and "equal to the last bit: True" in done.stdout
    inputs, on_device, plain, offloaded = (int(kib) for kib in re.findall(r"(\d+) KiB", done.stdout))
    assert (inputs, on_device) == (12 * 256, 2 * 256)
    assert plain - offloaded >= inputs - on_device - 256  # the embeddings, the first input, are held by the model too
    assert not list(tmp_path.iterdir())
