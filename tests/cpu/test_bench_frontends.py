# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/run.py frontends` on the CPU, and what tells whether gradients are equal in all benchmarks."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gradients
from benchmarks.frontends import main, settings


def test_all_that_run_without_a_gpu_agree_to_the_last_bit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for package in ("tqdm", "psutil", "transformers", "matplotlib"):
        pytest.importorskip(package)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # as the program sets it
    file, plot = tmp_path / "records.jsonl", tmp_path / "plot.png"
    flags = f"--device cpu --tiny --rounds 1 --iters-per-round 1 --json {file} --plot {plot}"
    main.main(flags.split())
    assert plot.read_bytes().startswith(b"\x89PNG")
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for record in map(json.loads, file.read_text().splitlines()):
        found[record["kind"]][record.get("label", "")] = record
    assert set(found["missing"]) == settings.NEED_GPU
    assert set(found["summary"]) == set(settings.CONTENDERS) - settings.NEED_GPU
    for name, summary in found["summary"].items():
        assert summary["failure"] is None and summary["num_steps"] == 1, name
        assert summary["is_bitwise_equal"] or name == "none", name
        if name in settings.OURS:
            # What is needed before its copy-out is over stays: how much that is depends on the machine.
            assert summary["engine"]["copied_out_bytes"] >= summary["engine"]["copied_in_bytes"] > 0, name


def test_fingerprints_notice_one_bit_and_the_order() -> None:
    grad = torch.randn(1000).bfloat16()
    flipped, swapped = grad.clone(), grad.clone()
    flipped.view(torch.int16)[500] ^= 1
    swapped[[0, 1]] = grad[[1, 0]]
    tensors = grad, grad.clone(), flipped, swapped
    own, same, *others = (gradients.fingerprint({"w": one, "b": None}, [torch.tensor(1.5)]) for one in tensors)
    assert gradients.compare(own, same) == gradients.Difference(2, 0, 0.0, True)
    for other in others:
        difference = gradients.compare(own, other)
        assert difference.num_differing == 1 and difference.max_relative > 0 and not difference.is_bitwise_equal
