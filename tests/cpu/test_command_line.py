# SPDX-License-Identifier: Apache-2.0
"""What a mistake on the command line looks like: one line, once, in the words that were typed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core")

from megatron_patches import OneLineParser, add_offload_arguments, end_run  # noqa: E402
from megatron_patches._command_line import as_typed  # noqa: E402
from megatron_patches._model.modules import canonical_names  # noqa: E402


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_ERROR_FILE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("--offload-module", "did you mean --offload-modules?"),
        ("--offload_modules", "it is written --offload-modules"),
        ("--fine-grained-activation-offloading", "is --offload-activation, or --offload-engine"),
        ("--cpu-offloading-num-layers=3", "--cpu-offloading-num-layers is --offload-num-layers here"),
        ("--num-layers-per-virtual-pipeline-stage", "is --num-virtual-stages-per-pipeline-rank here"),
    ],
)
def test_hints_for_unknown_flags(typed: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = OneLineParser(prog="train.py", allow_abbrev=False)
    add_offload_arguments(parser)
    with pytest.raises(SystemExit) as end:
        parser.parse_args([typed])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train.py: error: unrecognized arguments: {typed} (") and hint in line
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("all", "give --offload-gpu-budget, such as auto"),
        ("mlp", "did you mean mlp_norm mlp_fc1 mlp_act mlp_fc2?"),
        ("core_atn", "did you mean 'core_attn'?"),
    ],
)
def test_hints_for_unknown_names(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match="unknown module name") as error:
        canonical_names([name])
    assert hint in str(error.value)
    assert canonical_names(["core_attn,qkv_linear"]) == canonical_names(["qkv_linear", "core_attn"])


def test_settings_are_named_as_flags_and_modules_as_typed() -> None:
    text = "offload_modules has 'router_fc1', but recompute_granularity='full' (('expert_fc1' stands for 'router_fc1')"
    assert as_typed(text.replace("((", "("), ["expert_fc1,core_attn"]) == (
        "--offload-modules has 'expert_fc1', but --recompute-granularity 'full'"
    )
    text = "set offload_activation=True (--offload-activation): host_limit_bytes=1,024 is below min_tensor_bytes=2"
    assert as_typed(text, []) == (
        "set --offload-activation: --offload-host-limit-bytes 1,024 is below --offload-min-tensor-bytes 2"
    )


def test_under_torchrun_the_line_is_in_the_report_and_the_first_rank_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank that has an error of its own still speaks, later."""
    waits: list[float] = []
    monkeypatch.setattr("megatron_patches._command_line.time.sleep", waits.append)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for rank, waited in (("0", []), ("3", [5.0])):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as end:
            end_run("train.py", "offload_activation is off")
        assert end.value.code == 1 and waits == waited
        report = json.loads((tmp_path / "error.json").read_text())
        assert report["message"] == "train.py: error: --offload-activation is off"
        (tmp_path / "error.json").unlink()


def test_without_torchrun_only_rank_0_speaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "argv", ["train.py"])
    with pytest.raises(SystemExit):
        end_run("train.py", "no room")
    assert capsys.readouterr().err == ""
