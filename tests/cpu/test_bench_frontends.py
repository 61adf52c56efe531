# SPDX-License-Identifier: Apache-2.0
"""benchmarks/run.py frontends, as far as it runs without a GPU."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import apart
from benchmarks.frontends import link_bound, longest, main, settings
from benchmarks.frontends.workload import Attached, Workload
from offload_engine import ResidencyMeter, SavedTensorTracker

for package in ("tqdm", "psutil", "transformers"):
    pytest.importorskip(package)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Run the program with these flags; return its records by their kind and label."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # as the program sets it
    file, plot = tmp_path / "records.jsonl", tmp_path / "plot.png"

    def run(flags: str) -> dict[str, dict[str, dict[str, Any]]]:
        main.main(f"--device cpu --tiny {flags} --json {file} --plot {plot}".split())
        assert plot.read_bytes().startswith(b"\x89PNG")
        found: dict[str, dict[str, Any]] = {}
        for record in map(json.loads, file.read_text().splitlines()):
            found.setdefault(record["kind"], {})[record.get("label", "")] = record
        return found

    return run


def test_all_that_run_without_a_gpu_agree_to_the_last_bit(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = run("--rounds 1 --iters-per-round 1 --markdown")
    assert set(found["missing"]) == settings.NEED_GPU
    assert set(found["summary"]) == set(settings.CONTENDERS) - settings.NEED_GPU
    printed = " ".join(capsys.readouterr().out.split())
    for name, summary in found["summary"].items():
        assert summary["failure"] is None and summary["num_steps"] == 1, name
        assert summary["is_bitwise_equal"] or name == "none", name
        if name in settings.OURS:
            # What is needed before its copy-out is over stays: how much that is depends on the machine.
            assert summary["engine"]["copied_out_bytes"] >= summary["engine"]["copied_in_bytes"] > 0, name
        assert f"| {name}: " in printed


def test_the_longest_sequence_of_two_contenders(run: Any) -> None:
    found = run("--longest --contenders none,any_model --longest-upper 128")["longest"]
    assert list(found) == ["none", "any_model"]
    for one in found.values():
        assert (one["trained"], one["failed"], one["is_final"]) == (128, None, True)


def wait_for(seconds: float, nbytes: int) -> int:
    held = torch.ones(nbytes, dtype=torch.uint8)
    time.sleep(seconds)
    return held.numel()


@pytest.mark.parametrize(
    ("work", "seconds", "limit", "failure"),
    [
        ((0.0, 5), 60.0, 1 << 60, None),
        ((60.0, 5), 0.5, 1 << 60, "stopped: its 0 s were over"),
        ((60.0, 2 << 30), 60.0, 1 << 30, "GiB of host memory, 1 are allowed"),
        ((0.0, 1 << 60), 60.0, 1 << 60, "RuntimeError: "),
    ],
    ids=["ends", "time", "memory", "error"],
)
def test_a_process_is_bounded(work: tuple[float, int], seconds: float, limit: int, failure: str | None) -> None:
    ended = apart.run_apart(wait_for, *work, seconds=seconds, host_bytes=limit)
    assert ended.seconds < 30 and ended.is_over_time == (failure is not None and "were over" in failure)
    assert (ended.value, ended.failure) == (5, None) if failure is None else failure in (ended.failure or "")


def is_imported(name: str) -> bool:
    return name in sys.modules


def test_a_process_imports_before_it_is_run() -> None:
    work = is_imported, "pyclbr"
    with apart.Apart(*work, imports=["pyclbr", "no.such.module"]) as first, apart.Apart(*work) as second:
        found = [process.run(seconds=60.0, host_bytes=1 << 60) for process in (second, first)]
    assert [(one.value, one.failure) for one in found] == [(False, None), (True, None)]


@pytest.mark.parametrize("limit", [0, 4, 5, 64, 1000, 4095, 5000])
@pytest.mark.parametrize("first", [4, 64, 2000, 10_000])
@pytest.mark.parametrize("known", [(), (4, 8)])
def test_the_longest_that_trains_is_found_from_any_guess(limit: int, first: int, known: tuple[int, ...]) -> None:
    search = longest.Search(first, 4, 4096, {seq: seq <= limit for seq in known})
    tried: list[int] = []
    while not search.is_final:
        tried.append(search.next_seq)
        search.note(search.next_seq <= limit)
    assert search.trained == min(limit, 4096) // 4 * 4
    assert search.failed == (search.trained + 4 if search.trained < 4096 else None)
    assert max(tried, default=0) <= 4096
    assert len({*tried, *known}) == len(tried) + len(known), "no length is tried twice"


def test_attention_within_documents_is_attention_to_each_of_them() -> None:
    shape = settings.Shape(layers=2, seq=64, **settings.TINY)
    packed = Workload(shape, "cpu", documents=16)
    whole = Workload(shape, "cpu")
    whole.model.load_state_dict(packed.model.state_dict())
    positions = torch.arange(64)[None]
    found = packed.model(input_ids=packed.tokens, position_ids=positions).last_hidden_state
    for index in range(4):
        cut = slice(16 * index, 16 * index + 16)
        alone = whole.model(input_ids=packed.tokens[:, cut], position_ids=positions[:, cut]).last_hidden_state
        torch.testing.assert_close(found[:, cut], alone)


def test_saved_bytes_of_a_layer_are_those_that_autograd_saves() -> None:
    def saved_bytes(layers: int) -> int:
        workload = Workload(settings.Shape(layers=layers, seq=32, **settings.TINY), "cpu")
        workload.model.to(torch.bfloat16)
        workload.set_length(32)
        meter = ResidencyMeter()
        tracker = SavedTensorTracker(meter, workload.model.parameters())
        workload.step(Attached(around_forward=lambda: tracker))
        return meter.peak_bytes

    shape = settings.Shape(layers=1, seq=32, **settings.TINY)
    assert saved_bytes(3) - saved_bytes(2) == 32 * link_bound.saved_bytes_per_token(shape)
