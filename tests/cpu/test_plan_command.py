# SPDX-License-Identifier: Apache-2.0
"""`python -m offload_engine.plan`, what a rehearsed model saves beside a real one, and torch's allocator imitated."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from offload_engine import OffloadConfig
from offload_engine.planning.hardware import Hardware, find_hardware
from offload_engine.planning.segments import Block, SegmentAllocator

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402

from offload_engine.plan import main, read_config  # noqa: E402
from offload_engine.rehearsal.model import ModelRehearsal  # noqa: E402
from offload_engine.rehearsal.tables import forecast_text  # noqa: E402

TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 128,
}
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
    assert "2 GPUs on 1 node(s) of a100-40x2 (datasheet" in text
    assert "a step of 128 tokens" in text
    assert re.search(r"It fits a100-40x2, fastest with: no offload", text)
    assert plot.stat().st_size > 1000


def test_a_file_that_does_not_fit_says_by_how_much(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, table = tmp_path / "config.json", tmp_path / "mine.toml"
    file.write_text(json.dumps({"model_type": "llama", **TINY}))
    table.write_text("[h200]\ngpu_gib = 0.5\n")
    assert main([str(file), "--seq-length", "8192", "--hardware-file", str(table)]) == 0
    assert re.search(r"It does not fit h200: even with layers .* GiB are missing", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("qwen2 --seq-length=0", "argument --seq-length: '0' is not a number"),
        ("qwen2 --optimizer-bytes=-8", "argument --optimizer-bytes: '-8' is not a number"),
        ("qwen2 --nodes=two", "argument --nodes: 'two' is not a number"),
        ("qwen2 --plan-plot=nowhere/plan.png", "'nowhere/plan.png' cannot be written: No such file or directory"),
        ("qwen2 --plan-plot=plan.doc", "argument --plan-plot: 'plan.doc' ends in none of eps"),
        ("qwen2 --budget 200GiB", "--budget 200GiB is above the 139.8 GiB of a GPU of h200"),
        ("qwen3000", "'qwen3000' is neither a config.json here nor a model type"),
        ("qwen2 --hardware h300", "'h300' is unknown hardware; known are"),
        ("qwen2 --set layers=3", "--set layers: the configuration of qwen2 has no such setting"),
        ("qwen2 --hardware-file nowhere.toml", "nowhere.toml"),
        ("qwen2 --recording nowhere.json", "nowhere.json"),
    ],
)
def test_mistakes_are_named_at_once(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRehearsal, "forecast", None)
    with contextlib.suppress(SystemExit):
        assert main(arguments.split()) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("before", [None, b"an older picture"])
def test_a_rehearsal_that_breaks_off_is_one_line_and_leaves_pictures_alone(
    before: bytes | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("offload_engine.plan._loss", mock.Mock(side_effect=RuntimeError("no kernel.\nframes of C++")))
    plot = tmp_path / "plan.png"
    if before is not None:
        plot.write_bytes(before)
    assert main(["qwen2", "--set", *SETTINGS, "--plan-plot", str(plot)]) == 1
    assert (plot.read_bytes() if plot.exists() else None) == before
    error = capsys.readouterr().err
    assert "plan: a step with no offload cannot be rehearsed: no kernel. Omit" in error and error.count("\n") == 1


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
    from offload_engine import enable_activation_offloading

    config = OffloadConfig(min_tensor_bytes=64, dry_run=True)  # a GPU's kernel saves its seeds, too
    model = _make()()
    with_engine = enable_activation_offloading(model, "none", config=config)
    _loss(model).backward()
    real = with_engine.stats
    with_engine.remove()
    rehearsal = ModelRehearsal(_make(), _loss, H200, min_tensor_bytes=64)
    rehearsal.run("no offload", dry_run=True)
    assert real.managed_bytes > 0
    assert rehearsal.managed_bytes == real.managed_bytes


def test_attention_with_dropout_saves_no_scores() -> None:
    """On a GPU; on this CPU it would."""
    rehearsals = [
        ModelRehearsal(_make(attention_dropout=share), _loss, H200, min_tensor_bytes=64) for share in (0, 0.1)
    ]
    for rehearsal in rehearsals:
        rehearsal.run("no offload", dry_run=True)
    plain, with_dropout = rehearsals
    assert with_dropout.managed_bytes == plain.managed_bytes > 0


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
        forecast = rehearsal(budget).forecast(8192)
        best = forecast.ranks[0].chosen
        assert best is not None and best.held_bytes <= budget
        assert getattr(best, kind) and best.kept_bytes
        assert forecast.steps[-1].name == "chosen within the budget" and forecast.steps[-1].fits
        text = forecast_text(forecast)
        assert "chosen within the budget, GiB a step" in text and "model.layers.5" in text
        assert "chosen within" not in forecast_text(roomy)


def test_a_process_holds_what_it_held_on_a_gpu() -> None:
    """Within 0.5% on an H200: the allocator reserves 4 to 14% more than is allocated."""
    sizes = {"num_hidden_layers": 8, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32}
    model = _make(**sizes, num_key_value_heads=8, vocab_size=32000)
    rehearsal = ModelRehearsal(model, partial(_loss, length=8192), H200, optimizer_bytes=0)
    turns = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    held = [turn["held_bytes"] for turn in turns if turn["kind"] == "qwen2"]
    assert [way.gpu_bytes for way in rehearsal.forecast(8192).ranks[0].ways] == pytest.approx(held, rel=0.005)


def test_a_request_takes_the_smallest_block_that_fits_and_leaves_the_rest() -> None:
    """A segment has the size of its class, in MiB."""
    sizes = ((1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB, 12), (21 * MIB + 1, 22))
    for nbytes, reserved in sizes:
        allocator = SegmentAllocator()
        assert nbytes <= allocator.allocate(nbytes).nbytes <= allocator.reserved_bytes == reserved * MIB
    allocator = SegmentAllocator()
    large, small = allocator.allocate(96 * MIB), allocator.allocate(64 * MIB)
    allocator.free(large)
    allocator.free(small)
    first, second = allocator.allocate(40 * MIB), allocator.allocate(90 * MIB)
    assert allocator.reserved_bytes == 160 * MIB and (first.at, second.at) == (small.at, large.at)
    assert allocator.allocate(24 * MIB).at == small.at + 40 * MIB  # what was left of it
    assert second.nbytes == 90 * MIB and allocator.allocate(5 * MIB).at == large.at + 90 * MIB
    allocator.allocate(2 * MIB)
    assert allocator.reserved_bytes == 180 * MIB  # one MiB is left of the first, too little to divide


def test_neighbours_become_one_and_only_whole_segments_are_returned() -> None:
    allocator = SegmentAllocator()
    allocator.free(allocator.allocate(60 * MIB))
    parts = [allocator.allocate(20 * MIB) for _ in range(3)]
    for index in (0, 2, 1):
        allocator.free(parts[index])
    whole = allocator.allocate(60 * MIB)
    assert whole.nbytes == allocator.reserved_bytes == 60 * MIB
    allocator.free(whole)
    kept = allocator.allocate(20 * MIB)  # a part of it
    allocator.free(allocator.allocate(50 * MIB))
    allocator.trim()
    assert allocator.reserved_bytes == 60 * MIB and kept.nbytes == 20 * MIB
    assert allocator.allocate(40 * MIB).at == kept.at + 20 * MIB and allocator.reserved_bytes == 60 * MIB


def test_blocks_never_overlap() -> None:
    chance, allocator = random.Random(1), SegmentAllocator()
    held: list[Block] = []
    for _ in range(2_000):
        if held and chance.random() < 0.5:
            allocator.free(held.pop(chance.randrange(len(held))))
        else:
            held.append(allocator.allocate(chance.choice([512, 3_000, MIB, 3 * MIB, chance.randrange(1, 64 * MIB)])))
    held.sort(key=lambda block: block.at)
    assert all(a.at + a.nbytes <= b.at for a, b in zip(held, held[1:], strict=False))
    assert sum(block.nbytes for block in held) <= allocator.reserved_bytes
    for block in held:
        allocator.free(block)
    allocator.trim()
    assert allocator.reserved_bytes == 0
