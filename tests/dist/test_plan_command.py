# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_patches --plan`, from the command line to the tables."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from pathlib import Path

import pytest

from tests.dist.launch import run_ranks

TRAINER = str(Path(__file__).parents[2] / "examples" / "pretrain_gpt.py")
MODEL = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"]
MODEL += ["--bf16", "--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm"]
MODEL += ["--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"]
DATA = ["--mock-data", "--vocab-size", "256"]
EXPERTS = ["--num-experts", "4", "--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall"]
EXPERTS += ["--expert-model-parallel-size", "2"]


def _run(*arguments: str) -> tuple[str, str, int]:
    """Run the command in a process of its own; return what it prints, its errors, and its exit status."""
    (found,) = run_ranks(_command, list(arguments), pipeline=None, timeout_s=300)
    return found


def _command(arguments: list[str]) -> tuple[str, str, int]:
    from megatron_patches.__main__ import main

    out, error, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
    return out.getvalue(), error.getvalue(), status


def test_dense_in_a_pipeline(tmp_path: Path) -> None:
    plot = tmp_path / "plan.png"
    parallel = ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"]
    parallel += ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--use-distributed-optimizer"]
    flags = ["--plan", "--hardware", "h100x8", "--plan-plot", str(plot)]
    out, _, status = _run(*flags, TRAINER, *MODEL, *DATA, *parallel)
    assert status == 0
    assert "8 GPUs on 1 node(s) of h100x8 (datasheet" in out
    assert re.search(r"│ 1 +│ core_attn +│", out)
    assert "a step of 256 tokens" in out  # a global batch of 4
    assert re.search(r"full recomputation +│ .* │ +yes │", out)
    assert "It fits h100x8, fastest with: no offload" in out
    assert plot.stat().st_size > 1000


def test_experts_on_two_nodes_and_named_modules_only() -> None:
    flags = ["--plan", "--hardware", "h200x2", "--nodes", "2", "--offload-activation"]
    flags += ["--offload-modules", "core_attn", "router_fc1"]
    out, _, status = _run(*flags, TRAINER, *MODEL, *DATA, *EXPERTS)
    assert status == 0
    assert "4 GPUs on 2 node(s)" in out and "Experts: each is taken to get equally many tokens." in out
    assert "router_fc1" in out and "core_attn" in out and "moe_act" not in out


def test_a_budget_that_needs_offload(tmp_path: Path) -> None:
    """The saved tensors of two forwards do not fit; what was chosen does, and takes less time than the other ways."""
    wide = ["--num-layers", "8", "--seq-length", "4096", "--hidden-size", "1024"]
    model = [*MODEL, *wide, "--attention-dropout", "0", "--hidden-dropout", "0"]
    out, _, status = _run("--plan", "--budget", "3.9GiB", TRAINER, *model, *DATA)
    assert status == 0
    rows = {
        words[1].strip(): [word.strip() for word in words[2:]]
        for line in out.splitlines()
        if (words := line.split("│"))[2:]
    }
    assert rows["no offload"][4] == "no"
    assert rows["chosen within the budget"][4] == "yes"
    assert "fastest with: chosen within the budget" in out
    times = {name: float(rows[name][0].replace(",", "")) for name in ("no offload", "chosen within the budget")}
    assert times["no offload"] <= times["chosen within the budget"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--plan", "--hardware", "h300", TRAINER], "'h300' is unknown hardware; known are a100-40"),
        (["--plan", TRAINER, *MODEL, "--mock-data"], "the vocabulary is not known: add --vocab-size"),
        (
            ["--plan", "--hardware", "h200x3", TRAINER, *MODEL, *DATA, "--pipeline-model-parallel-size", "2"],
            "3 GPUs cannot be divided among model replicas of 2",
        ),
        (
            ["--hardware", "h100", "--budget", "3GiB", TRAINER],
            "--hardware, --budget without --plan changes nothing",
        ),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    _, error, status = _run(*arguments)
    assert status == 2
    assert message in error.splitlines()[-1]


def test_a_script_whose_arguments_cannot_be_read(tmp_path: Path) -> None:
    if importlib.util.find_spec("megatron.training") is not None:
        pytest.skip("Megatron-LM is installed, and reads them")
    script = tmp_path / "train.py"
    script.write_text("")
    _, error, status = _run("--plan", str(script), "--anything")
    assert status == 2
    assert "cannot be read" in error.splitlines()[-1]


def test_a_script_of_megatron_lm(tmp_path: Path) -> None:
    pytest.importorskip("megatron.training")
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("")
    training = ["--max-position-embeddings", "64", "--train-iters", "1", "--lr", "1e-4", "--micro-batch-size", "1"]
    training += ["--tokenizer-type", "NullTokenizer", "--global-batch-size", "8"]
    out, error, status = _run("--plan", str(script), *MODEL, *DATA, *training)
    assert status == 0, error
    assert "core_attn" in out and "a step of 512 tokens" in out
