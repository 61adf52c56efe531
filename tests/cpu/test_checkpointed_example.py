# SPDX-License-Identifier: Apache-2.0
"""The example of `offload_wrapper` runs, and says what is true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.dist.programs import ROOT, run_program


def test_checkpointed_model_example(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; pip install transformers")
    environment = {"CUDA_VISIBLE_DEVICES": ""}
    (printed,) = run_program(ROOT / "examples" / "checkpointed_model.py", "3", cwd=tmp_path, environment=environment)
    first, last = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", printed.out).groups())  # type: ignore[union-attr]
    assert last < first and "equal to the last bit: True" in printed.out
    inputs, on_device, plain, offloaded = (int(kib) for kib in re.findall(r"(\d+) KiB", printed.out))
    assert (inputs, on_device) == (12 * 256, 2 * 256)
    assert plain - offloaded >= inputs - on_device - 256  # the embeddings, the first input, are held by the model too
    assert not list(tmp_path.iterdir())
