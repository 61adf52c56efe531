# SPDX-License-Identifier: Apache-2.0
"""Small runs of the benchmarks, as far as they run without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gradients
from benchmarks.frontends import settings
from tests.dist.programs import BENCHMARK, run_program

# They make CUDA streams, or pin.
NEED_GPU = {"te_v1", "verl", "verl_ckpt", "torchtune", "trl", "torch", "ckpt_torch", "parts_torch"}
TINY = "--device cpu --tiny --layers 4 --budgets 2 --iters 1 --warmup 1".split()
IN_A_ROW = "--in-a-row", "2"


def test_front_ends_agree_to_the_last_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for package in ("tqdm", "psutil", "transformers"):
        pytest.importorskip(package)
    from benchmarks.frontends import main

    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # as the program sets it
    file, plot = tmp_path / "records.jsonl", tmp_path / "plot.png"
    names = [name for name in settings.CONTENDERS if name not in NEED_GPU]
    flags = f"--device cpu --tiny --rounds 1 --iters-per-round 1 --markdown --contenders {','.join(names)}"
    main.main([*flags.split(), "--json", str(file), "--plot", str(plot)])
    assert plot.read_bytes().startswith(b"\x89PNG")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    summaries = {record["label"]: record for record in records if record["kind"] == "summary"}
    assert list(summaries) == names
    printed = " ".join(capsys.readouterr().out.split())
    for name, summary in summaries.items():
        assert summary["failure"] is None and summary["num_steps"] == 1, name
        assert summary["is_bitwise_equal"] or name == "none", name
        if name in settings.OURS:
            # What is needed before its copy-out is over stays: how much that is depends on the machine.
            assert summary["engine"]["copied_out_bytes"] >= summary["engine"]["copied_in_bytes"] > 0, name
        assert f"| {name}: " in printed


def test_budgets_are_measured_beside_settings_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "curve.json", tmp_path / "curve.png"
    (printed,) = run_program(
        BENCHMARK, "budget_curve", *TINY, *IN_A_ROW, "--json", str(file), "--markdown", cwd=tmp_path
    )
    [length] = json.loads(file.read_text())["lengths"]
    turns = {turn["setting"]: turn for turn in length["turns"] if turn["budget_bytes"] is None}
    budgets = [turn for turn in length["turns"] if turn["budget_bytes"] is not None]
    assert not length["left_out"] and not any(turn["failure"] for turn in length["turns"])
    assert turns["all"]["held_bytes"] < turns["none"]["held_bytes"]
    assert {"layers", "layers_ckpt", "every_other", "half_ckpt", "any_model"} <= set(turns)
    assert len(budgets) == 2
    for turn in budgets:
        assert turn["held_bytes"] <= turn["predicted_bytes"] <= turn["budget_bytes"]
        assert turn["steps_until_held"] >= 4 and turn["first_predicted_bytes"] and turn["host_ms"] > 0
    assert all(turn["parity"]["is_bitwise_equal"] for turn in length["turns"])
    assert "| best by hand that fits |" in printed.out
    assert all(turn["in_a_row_ms"][0] > 0 for turn in length["turns"])
    [columns, *_] = (line.split("|") for line in printed.out.splitlines() if line.startswith("| setting "))
    place = [column.strip() for column in columns].index("over none in a row")
    assert [line.split("|")[place].strip() for line in printed.out.splitlines() if line.startswith("| none ")] == [
        "1.0000"
    ]
    assert sum(turn["setting"] == "none" for turn in length["turns"]) == 4 and printed.out.count("\n| none ") == 1
    run_program(BENCHMARK, "budget_curve", "--draw", str(file), "--plot", str(picture), cwd=tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")


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
