# SPDX-License-Identifier: Apache-2.0
"""`python -m offload_engine.plan`, what a rehearsed model saves beside a real one, and torch's allocator imitated."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from offload_engine import OffloadConfig, enable_activation_offloading
from offload_engine.planning.hardware import Hardware, find_hardware
from offload_engine.planning.segments import Segment, SegmentAllocator

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402

from offload_engine.plan import main, read_config  # noqa: E402
from offload_engine.rehearsal.model import ModelRehearsal  # noqa: E402
from offload_engine.rehearsal.tables import forecast_text  # noqa: E402

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "vocab_size": 128}
TINY |= {"num_attention_heads": 2, "num_key_value_heads": 2}
SETTINGS = [f"{name}={value}" for name, value in TINY.items()]
SEQUENCE = 32
H200 = find_hardware("h200")
MIB = 1 << 20
RESULTS = Path(__file__).parents[2] / "docs/results/2026-11-26_forecast_h200.jsonl"


def test_a_model_type(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "plan.png"
    flags = ["--seq-length", "64", "--hardware", "a100-40x2", "--plan-plot", str(plot)]
    assert main(["qwen2", "--set", *SETTINGS, *flags]) == 0
    text = capsys.readouterr().out
    assert "2 GPUs on 1 node of a100-40x2 (datasheet" in text
    assert "a step of 128 tokens" in text
    assert re.search(r"It fits a100-40x2, fastest with: no offload", text)
    assert plot.stat().st_size > 1000


def test_a_file_that_does_not_fit_says_by_how_much(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, table = tmp_path / "config.json", tmp_path / "mine.toml"
    file.write_text(json.dumps({"model_type": "llama", **TINY}))
    table.write_text("[h200]\ngpu_gib = 0.5\n")
    assert main([str(file), "--seq-length", "8192", "--hardware-file", str(table)]) == 0
    assert re.search(r"It does not fit h200: [.0-9]+ MiB are missing even with layers ", capsys.readouterr().out)


MISTAKES = {
    "qwen2 --seq-length=0": "argument --seq-length: '0' is not a number",
    "qwen2 --optimizer-bytes=-8": "argument --optimizer-bytes: '-8' is not a number",
    "qwen2 --nodes=two": "argument --nodes: 'two' is not a number",
    "qwen2 --plan-plot=nowhere/plan.png": "'nowhere/plan.png' cannot be written: No such file or directory",
    "qwen2 --plan-plot=plan.doc": "argument --plan-plot: 'plan.doc' ends in none of eps",
    "qwen2 --budget 200GiB": "--budget 200GiB is above the 139.8 GiB of a GPU of h200",
    "qwen3000": "'qwen3000' is neither a config.json here nor a model type",
    "qwen2 --hardware h300": "--hardware: 'h300' is unknown hardware; known are",
    "qwen2 --set layers=3": "--set layers: the configuration of qwen2 has no such setting",
    "qwen2 --hardware-file nowhere.toml": "--hardware-file nowhere.toml cannot be read: No such file or directory",
    "qwen2 --recording nowhere.json": "--recording nowhere.json cannot be read: No such file or directory",
}


def test_mistakes_are_named_at_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRehearsal, "forecast", None)
    for arguments, message in MISTAKES.items():
        with contextlib.suppress(SystemExit):
            assert main(arguments.split()) == 1
        assert message in capsys.readouterr().err, arguments


def test_a_rehearsal_that_breaks_off_is_one_line_and_leaves_pictures_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("offload_engine.plan._loss", mock.Mock(side_effect=RuntimeError("no kernel.\nframes of C++")))
    (old := tmp_path / "old.png").write_bytes(b"an older picture")
    for plot in (old, tmp_path / "new.png"):
        assert main(["qwen2", "--set", *SETTINGS, "--plan-plot", str(plot)]) == 1
        error = capsys.readouterr().err
        assert "plan: a step with no offload cannot be rehearsed: no kernel. Omit" in error and error.count("\n") == 1
    assert old.read_bytes() == b"an older picture" and [*tmp_path.iterdir()] == [old]


def test_an_error_of_several_lines_is_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers raises where a package is missing."""
    monkeypatch.setattr("offload_engine.plan.read_config", mock.Mock(side_effect=ImportError("It needs\n  a package.")))
    assert main(["qwen2"]) == 1
    assert capsys.readouterr().err == "python -m offload_engine.plan: It needs a package.\n"


def _loss(model: Any, length: int = SEQUENCE) -> torch.Tensor:
    tokens = torch.zeros((1, length), dtype=torch.int64)
    out: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return out


def _make(**changes: float) -> Callable[[], torch.nn.Module]:
    """Return a function that makes a model; its code is imported now, outside of the rehearsal."""
    config = read_config(
        "qwen2", {**TINY, "hidden_size": 2048, "intermediate_size": 4096, **changes} if changes else TINY
    )
    options: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    return lambda: AutoModelForCausalLM.from_config(config, **options).train()


def test_bytes_are_those_of_a_real_step() -> None:
    """All saved bytes of a step, as the engine counts them; the fused kernel of this CPU saves what a GPU's does."""
    config = OffloadConfig(min_tensor_bytes=64, dry_run=True)  # a GPU's kernel saves its seeds, too
    model = _make()()
    with_engine = enable_activation_offloading(model, "none", config=config)
    _loss(model).backward()
    real = with_engine.stats
    with_engine.remove()
    assert _managed_bytes(_make()) == real.managed_bytes > 0


def _managed_bytes(make: Callable[[], torch.nn.Module]) -> int:
    rehearsal = ModelRehearsal(make, _loss, H200, min_tensor_bytes=64)
    rehearsal.run("no offload", dry_run=True)
    return rehearsal.managed_bytes


def test_attention_with_dropout_saves_no_scores() -> None:
    """On a GPU; on this CPU it would."""
    plain, with_dropout = (_managed_bytes(_make(attention_dropout=share)) for share in (0, 0.1))
    assert with_dropout == plain > 0


def test_within_a_budget_each_layer_is_kept_offloaded_or_recomputed() -> None:
    """What has room is kept; with a slow link layers are recomputed."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    slow = dataclasses.replace(H200, out_gbps=2.0, in_gbps=2.0)
    for hardware, kind in ((H200, "kept_bytes"), (slow, "recomputed_bytes")):

        def rehearsal(budget: int | None = None, machine: Hardware = hardware) -> ModelRehearsal:
            return ModelRehearsal(_make(**sizes), partial(_loss, length=8192), machine, budget_bytes=budget)

        roomy = rehearsal().forecast(8192)
        none, offloaded, _ = roomy.ranks[0].ways
        budget = (none.gpu_bytes + offloaded.gpu_bytes) // 2
        forecast = rehearsal(budget).forecast(8192, has_curve=True)
        best = forecast.ranks[0].chosen
        assert best is not None and best.held_bytes <= budget
        assert getattr(best, kind) and best.kept_bytes
        assert forecast.steps[-1].name == "chosen within the budget" and forecast.steps[-1].fits
        text = forecast_text(forecast)
        assert "chosen within the budget, GiB a step" in text and "model.layers.5" in text
        assert "chosen within" not in forecast_text(roomy)
        below = [step for step in forecast.curve if step.gpu_bytes <= budget]
        chosen, above = forecast.steps[-1], forecast.curve[len(below) :]
        assert min(len(below), len(above)) > 1 and len(forecast.curve) > 5 and not roomy.curve
        assert above[0].milliseconds <= chosen.milliseconds <= below[-1].milliseconds


def test_a_process_holds_what_it_held_on_a_gpu() -> None:
    """Within 0.5% on an H200: the allocator reserves 4 to 14% more than is allocated."""
    sizes = {"num_hidden_layers": 8, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32}
    model = _make(**sizes, num_key_value_heads=8, vocab_size=32000)
    rehearsal = ModelRehearsal(model, partial(_loss, length=8192), H200, optimizer_bytes=0)
    turns = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    held = [turn["held_bytes"] for turn in turns if turn["kind"] == "qwen2"]
    assert [way.gpu_bytes for way in rehearsal.forecast(8192).ranks[0].ways] == pytest.approx(held, rel=0.005)


def test_a_segment_has_the_size_of_its_class_and_is_returned_as_a_whole() -> None:
    """How blocks are found, divided and joined is compared with what H200s have reserved, in test_replay.py."""
    sizes = ((1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12), (21 * MIB + 1, 22))
    for nbytes, reserved in sizes:
        allocator = SegmentAllocator()
        assert nbytes <= allocator.allocate(nbytes).nbytes <= allocator.reserved_bytes == reserved * MIB
    allocator = SegmentAllocator()
    first, second = allocator.allocate(60 * MIB), allocator.allocate(40 * MIB)
    allocator.free(first)
    assert allocator.allocate(59 * MIB).nbytes == 60 * MIB, "one MiB is too little to divide"
    allocator.free(second)
    allocator.trim()
    assert allocator.reserved_bytes == 60 * MIB
    allocator.allocate(40 * MIB)
    assert allocator.reserved_bytes == 100 * MIB, "what was returned is not used again"


def test_segments_get_the_highest_address_at_which_they_fit() -> None:
    """Of equal blocks the lower one is used, so what is reserved depends on it: 2 GiB more or less on an H200."""

    def segment(at: int, nbytes: int, is_free: bool) -> Segment:
        return Segment(at * MIB, 0, False, ((nbytes * MIB, is_free),))

    allocator = SegmentAllocator()
    far_below, top = segment(10, 30, False), segment(9000, 100, False)
    holes = [segment(8000, 60, True), segment(8060, 60, True), segment(8500, 40, True), segment(7900, 50, True)]
    allocator.adopt([top, far_below, segment(7950, 50, False), *holes])
    allocator.trim()
    found = [allocator.allocate(nbytes * MIB).at // MIB for nbytes in (100, 40, 20, 60, 50)]
    assert found == [8020, 8500, 8000, 7890, 7840]
