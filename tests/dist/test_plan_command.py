# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_patches --plan`, from the command line to the tables."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
from pathlib import Path
from unittest import mock

import pytest

from megatron_patches.__main__ import _make_parser, _settings, main
from megatron_patches._rehearsal import stage
from megatron_patches._rehearsal.forecast import forecast_job
from megatron_patches._rehearsal.script import read_job
from offload_engine.planning.hardware import find_hardware
from tests.dist.launch import on_ranks, run_ranks
from tests.dist.programs import TRAINER

MODEL = ["--num-layers", "4", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"]
MODEL += ["--bf16", "--swiglu", "--disable-bias-linear", "--normalization", "RMSNorm"]
MODEL += ["--position-embedding-type", "rope", "--untie-embeddings-and-output-weights"]
JOB = [str(TRAINER), *MODEL, "--mock-data", "--vocab-size", "256"]
EXPERTS = ["--num-experts", "4", "--moe-grouped-gemm", "--moe-token-dispatcher-type", "alltoall"]
EXPERTS += ["--expert-model-parallel-size", "2"]
TWO_STAGES = ["--pipeline-model-parallel-size", "2"]
INTERLEAVED = [*TWO_STAGES, "--num-virtual-stages-per-pipeline-rank", "2"]
NAMES = ["--offload-activation", "--offload-modules", "core_attn", "mlp_fc1"]
AUTO = ["--offload-gpu-budget", "auto"]
LONG = ["--seq-length", "4096"]


def _plan(*arguments: str) -> str:
    """Return the tables of a job that can be planned."""
    [(out, error, status)] = _run([list(arguments)], "--plan")
    assert status == 0, error
    return out


def _run(each: list[list[str]], *first: str) -> list[tuple[str, str, int]]:
    """Run commands in a process of their own; return what each prints, its errors, and its exit status."""
    (found,) = run_ranks(_commands, [[*first, *arguments] for arguments in each], pipeline=None, timeout_s=300)
    return found


def _commands(each: list[list[str]]) -> list[tuple[str, str, int]]:
    os.environ["NVTE_CPU_OFFLOAD_V1"] = "1"  # megatron.training asks for it where it reads recipes
    return [_command(arguments) for arguments in each]


def _command(arguments: list[str]) -> tuple[str, str, int]:
    out, error, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            main(arguments)
        except SystemExit as end:
            status = int(end.code or 0)
    return out.getvalue(), error.getvalue(), status


def test_dense_in_a_pipeline(tmp_path: Path) -> None:
    plot = tmp_path / "plan.png"
    parallel = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--use-distributed-optimizer"]
    out = _plan("--hardware", "h100x8", "--plan-plot", str(plot), *JOB, *INTERLEAVED, *parallel)
    assert "8 GPUs on 1 node of h100x8 (datasheet" in out and re.search(r"│ 1 +│ core_attn +│", out)
    assert "a step of 256 tokens" in out  # a global batch of 4
    assert re.search(r"full recomputation +│ .* │ +yes │", out)
    assert "It fits h100x8, fastest with: no offload" in out
    assert plot.stat().st_size > 1000


def test_groups_of_microbatches_above_the_pipelines_size() -> None:
    """Fewer microbatches than two groups would end in a group that is no whole one."""
    groups = ["--microbatch-group-size-per-virtual-pipeline-stage", "4", "--global-batch-size", "8"]
    assert "a step of 512 tokens" in _plan("--hardware", "h200x2", *JOB, *INTERLEAVED, *groups)


def test_experts_on_two_nodes_and_named_modules_only() -> None:
    named = ["--offload-activation", "--offload-modules", "core_attn", "router_fc1"]
    out = _plan("--hardware", "h200x2", "--nodes", "2", *named, *JOB, *EXPERTS)
    assert "4 GPUs on 2 nodes of" in out and "Experts: all are assumed to get equally many tokens." in out
    assert {name for _, name in _moved(out)} == {"core_attn", "router_fc1"}


def test_a_budget_that_needs_offload() -> None:
    """The saved tensors of two forwards do not fit; what was chosen does, and takes less time than the other ways."""
    wide = ["--num-layers", "8", *LONG, "--hidden-size", "1024", "--global-batch-size", "2"]
    out = _plan("--budget", "12GiB", *JOB, *wide, "--attention-dropout", "0", "--hidden-dropout", "0")
    lines = (line.split("│") for line in out.splitlines())
    rows = {words[1].strip(): [word.strip() for word in words[2:]] for words in lines if words[2:]}
    none, chosen = rows["no offload"], rows["chosen within the budget"]
    assert (none[4], chosen[4]) == ("no", "yes") and "fastest with: chosen within the budget" in out
    assert float(none[0].replace(",", "")) <= float(chosen[0].replace(",", ""))
    refused = "Stage 0: a budget does not recompute mlp of 8 layers: add_bias_linear"
    with_biases = _plan("--budget", "12GiB", *(word for word in JOB if word != "--disable-bias-linear"), *wide)
    assert [refused in " ".join(each.split()) for each in (out, with_biases)] == [False, True]


def test_a_budget_recomputes_in_a_forecast_as_in_a_run() -> None:
    """Each layer's MLP, which is half of what a step saves, unless the run's flag forbids it."""
    job = [*JOB, "--num-layers", "8", *LONG, "--hidden-size", "1024", "--global-batch-size", "2"]
    budget = ["--offload-gpu-budget", "11.4GiB", "--attention-dropout", "0", "--hidden-dropout", "0"]
    found = _run([[*job, *budget, "--offload-recompute", flag] for flag in ("auto", "off")], "--plan")
    chosen = r"│ mlp_\w+ +│ +[\d.]+ │ +[\d.]+ │ +([\d.]+) │ +[\d.]+ │\n"  # between what is offloaded and waits
    milliseconds, recomputed = [], []
    for out, error, _ in found:
        row = re.search(r"chosen within the budget +│ +([\d.]+) │", out)
        assert row is not None, error
        milliseconds.append(float(row[1]))
        recomputed.append(sum(float(last) for last in re.findall(chosen, out)))
    assert milliseconds[0] < 0.5 * milliseconds[1]
    assert recomputed[0] > 1 and recomputed[1] == 0


@on_ranks(None)
def test_the_curve_of_a_pipeline_is_that_of_its_fullest_gpu() -> None:
    """From the lowest budget of both stages to a step in which nothing moves."""
    os.environ["NVTE_CPU_OFFLOAD_V1"] = "1"
    wide = ["--num-layers", "8", *LONG, "--hidden-size", "1024", "--global-batch-size", "8"]
    job = read_job([*JOB, *wide, *TWO_STAGES, "--attention-dropout", "0", "--hidden-dropout", "0"], 2)
    forecast = forecast_job(job, find_hardware("h200x2"), has_curve=True)
    none, first, last = forecast.steps[0], forecast.curve[0], forecast.curve[-1]
    assert len(forecast.curve) > 4 and first.gpu_bytes < none.gpu_bytes - (1 << 30)
    assert last.milliseconds == pytest.approx(none.milliseconds) and none.milliseconds < first.milliseconds
    assert last.gpu_bytes == pytest.approx(none.gpu_bytes, rel=0.05) and last.fits


def _moved(out: str) -> dict[tuple[str, str], tuple[int, float, float]]:
    """Return groups, GiB a step and GiB moved of each stage and module."""
    cells = [[word.strip() for word in line.split("│")[1:-1]] for line in out.splitlines() if line.count("│") == 8]
    return {(row[0], row[1]): (int(row[2]), float(row[3]), float(row[4])) for row in cells if row[2].isdigit()}


STAYING: dict[str, list[str]] = {
    "everything moves": NAMES,
    "layers": [*NAMES, "--offload-num-layers", "1"],
    "sizes": [*NAMES, "--offload-min-tensor-bytes", "mlp_fc1=1GiB"],
    "by rank": [*NAMES, "--offload-rank-delta-bytes", "1GiB"],
    "fraction": [*NAMES, "--offload-fraction", "0"],
    "default names": ["--offload-activation"],
    "budget": AUTO,
}


def test_what_stays_on_a_run_stays_in_the_forecast() -> None:
    """And the budget of the run is that of the forecast: all of the GPU but the margin that a run leaves."""
    job = [*JOB, *LONG, "--attention-dropout", "0", "--hidden-size", "256", *TWO_STAGES, "--global-batch-size", "2"]
    found = _run([["--hardware", "h200x2", *flags, *job] for flags in STAYING.values()], "--plan")
    tables = {name: out for name, (out, _, _) in zip(STAYING, found, strict=True)}
    moved = {name: _moved(table) for name, table in tables.items()}
    first, last = ("0", "mlp_fc1"), ("1", "mlp_fc1")
    everything = moved["everything moves"]
    assert everything[first][0] == 4 and everything[first][2] > 0.01 and everything[last][2] > 0
    assert moved["layers"][first][0] == 2
    assert moved["sizes"][first][2] == moved["fraction"][first][2] == 0
    assert moved["by rank"][first] == everything[first] and moved["by rank"][last][2] == 0
    assert {name for _, name in moved["default names"]} == {"core_attn"}
    assert "137.62 of 139.8 GiB of each GPU" in tables["budget"]


@on_ranks(None)
def test_flags_behind_the_script_are_those_in_front_of_it() -> None:
    found = []
    for flags in STAYING.values():
        front = read_job(JOB, 2, _settings(_make_parser().parse_args(flags)))
        found.append(repr(front.settings))
        assert found[-1] == repr(read_job([*JOB, *flags], 2).settings)
    assert len({*found}) == len(STAYING)


MISTAKES = [
    (["--plan", "--budget", "200GiB", *JOB], "--budget 200GiB is above the 139.8"),
    (["--plan", *JOB, "--offload-gpu-budget", "200GiB"], "--offload-gpu-budget 200GiB is above"),
    (
        ["--plan", "--budget", "6GiB", *JOB, "--offload-gpu-budget", "50%"],
        "--budget 6GiB and --offload-gpu-budget 50% both",
    ),
    (["--plan", *NAMES, "router_fc1", *JOB], "--offload-modules matches nothing in this model: 'router_fc1'"),
    (["--plan", *JOB, *AUTO, "--offload-min-tensor-bytes", "moe_act=1"], "moe_act=1, but 'moe_act' has no group"),
    (["--plan", *NAMES, "--offload-dir", "/tmp", *JOB], "--offload-dir /tmp is for a run without"),
    (["--plan", *JOB, "--offload-num-layers", "1"], "--offload-num-layers without"),
    (["--plan", "--nodes", "two", str(TRAINER)], "argument --nodes: 'two' is not a number of at least 1"),
    (["--plan", "--hardware", "h300", str(TRAINER)], "'h300' is unknown hardware; known are a100-40"),
    (["--plan", str(TRAINER), *MODEL, "--mock-data"], "the vocabulary is not known: add --vocab-size"),
    (["--plan", "--hardware", "h200x3", *JOB, *TWO_STAGES], "3 GPUs cannot be divided among model replicas of 2"),
    (["--hardware", "h100", "--budget", "3GiB", str(TRAINER)], "--hardware, --budget without --plan changes nothing"),
    (["--offload-activation"], "no script given"),
    (["missing.py"], "there is no script 'missing.py'"),
]


def test_mistakes_are_one_line() -> None:
    _check_mistakes(MISTAKES)


def _check_mistakes(mistakes: list[tuple[list[str], str]]) -> None:
    """Make all of them in one process: none of them changes anything."""
    for (_, message), (_, error, status) in zip(mistakes, _run([each for each, _ in mistakes]), strict=True):
        assert status == 2 and message in error.splitlines()[-1], error


@on_ranks(None)
def test_a_rehearsal_that_breaks_off_is_one_line() -> None:
    for name, what in (("_forward_step", "a step of stage 0 without offload"), ("build_chunk", "stage 0")):
        setattr(stage, name, mock.Mock(side_effect=RuntimeError("no kernel.\nframes of C++")))
        _, error, status = _command(["--plan", *JOB])
        assert status == 2 and f"error: {what} cannot be rehearsed: no kernel. Omit" in error.splitlines()[-1]


def test_a_script_whose_arguments_cannot_be_read(tmp_path: Path) -> None:
    if importlib.util.find_spec("megatron.training") is not None:
        pytest.skip("Megatron-LM is installed, and reads them")
    script = tmp_path / "train.py"
    script.write_text("")
    _check_mistakes([(["--plan", str(script), "--anything"], "cannot be read")])


# -- scripts of Megatron-LM --------------------------------------------------------------------------------------------


def _script(folder: Path) -> list[str]:
    """Return one with its arguments; skip the test without Megatron-LM."""
    pytest.importorskip("megatron.training")
    script = folder / "pretrain_gpt.py"
    script.write_text("")
    training = ["--max-position-embeddings", "64", "--train-iters", "1", "--lr", "1e-4", "--micro-batch-size", "1"]
    training += ["--tokenizer-type", "NullTokenizer", "--global-batch-size", "8"]
    return [str(script), *JOB[1:], *training]


@pytest.mark.parametrize("context", [1, 2])
def test_a_script_of_megatron_lm(context: int, tmp_path: Path) -> None:
    """Its checks ask for the GPU's architecture, and for a variable of CUDA."""
    named = ["--offload-activation", "--offload-modules", "core_attn", "--offload-num-layers", "1"]
    out = _plan("--hardware", "h200x2", *_script(tmp_path), "--context-parallel-size", str(context), *named)
    assert "a step of 512 tokens" in out
    assert {key: row[0] for key, row in _moved(out).items()} == {("0", "core_attn"): 4 * context}


def test_the_optimizer_is_divided_among_one_of_its_instances(tmp_path: Path) -> None:
    held = []
    for number in ("1", "8"):
        flags = ["--use-distributed-optimizer", "--num-distributed-optimizer-instances", number]
        out = _plan("--hardware", "h200x8", *_script(tmp_path), "--hidden-size", "1024", *flags)
        (row,) = (line.split("│") for line in out.splitlines() if " B │" in line)
        held.append(float(row[3]))
    # 2 bytes of weights, 4 of a gradient, and 12 among eight GPUs or on each.
    assert held[1] / held[0] == pytest.approx((6 + 12) / (6 + 12 / 8), rel=0.05)


RECIPE = ["--fine-grained-activation-offloading", "--offload-modules", "core_attn", "qkv_linear"]
RECIPE += ["--activation-offload-fraction", "0.5"]


def test_a_recipe_of_megatron_lm(tmp_path: Path) -> None:
    [(out, error, _)] = _run([["--offload-engine", *_script(tmp_path), *RECIPE]], "--plan")
    assert {name for _, name in _moved(out)} == {"core_attn", "qkv_linear"} and "offloaded in part" in out
    assert error.count("activation_offload_fraction=0.5 of the groups of megatron-core becomes offload_fraction") == 1


def test_mistakes_behind_a_script_of_megatron_lm(tmp_path: Path) -> None:
    mistakes = [
        (["--hiden-size", "3"], "unrecognized arguments: --hiden-size 3 (did you mean --hidden-size?)"),
        (["--num-layers", "many"], "argument --num-layers: invalid int value: 'many'"),
        (["--fp8-format", "hybrid", "--spec", "a", "b"], "--plan does not rehearse --fp8-format, --spec:"),
        (["--cuda-graph-impl", "local"], "--plan does not rehearse --cuda-graph-impl:"),
        (RECIPE, "own, which is not rehearsed: give --offload-engine"),
    ]
    job = ["--plan", *_script(tmp_path)]
    _check_mistakes([([*job, *flags], message) for flags, message in mistakes])
