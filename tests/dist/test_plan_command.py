# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_patches --plan`, from the command line to the tables."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
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

    os.environ["NVTE_CPU_OFFLOAD_V1"] = "1"  # megatron.training asks for it where it reads recipes
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
    assert "and 8 GiB of CUDA and TransformerEngine's kernels" in " ".join(out.split())
    assert re.search(r"full recomputation +│ .* │ +yes │", out)
    assert "It fits h100x8, fastest with: no offload" in out
    assert plot.stat().st_size > 1000


def test_groups_of_microbatches_above_the_pipelines_size() -> None:
    """Fewer microbatches than two groups would end in a group that is no whole one."""
    parallel = ["--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"]
    parallel += ["--microbatch-group-size-per-virtual-pipeline-stage", "4", "--global-batch-size", "8"]
    out, error, status = _run("--plan", "--hardware", "h200x2", TRAINER, *MODEL, *DATA, *parallel)
    assert status == 0, error
    assert "a step of 512 tokens" in out


def test_experts_on_two_nodes_and_named_modules_only() -> None:
    flags = ["--plan", "--hardware", "h200x2", "--nodes", "2", "--offload-activation"]
    flags += ["--offload-modules", "core_attn", "router_fc1"]
    out, _, status = _run(*flags, TRAINER, *MODEL, *DATA, *EXPERTS)
    assert status == 0
    assert "4 GPUs on 2 node(s)" in out and "Experts: all are assumed to get equally many tokens." in out
    assert "router_fc1" in out and "core_attn" in out and "moe_act" not in out


def test_a_budget_that_needs_offload(tmp_path: Path) -> None:
    """The saved tensors of two forwards do not fit; what was chosen does, and takes less time than the other ways."""
    wide = ["--num-layers", "8", "--seq-length", "4096", "--hidden-size", "1024"]
    model = [*MODEL, *wide, "--attention-dropout", "0", "--hidden-dropout", "0"]
    out, _, status = _run("--plan", "--budget", "11.3GiB", TRAINER, *model, *DATA)
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


_LONG = ["--seq-length", "4096", "--hidden-size", "256", "--attention-dropout", "0"]
_TWO_STAGES = ["--pipeline-model-parallel-size", "2"]
_NAMES = ["--offload-activation", "--offload-modules", "core_attn", "mlp_fc1"]
_AUTO = ["--offload-gpu-budget", "auto"]


def _moved(out: str) -> dict[tuple[str, str], tuple[int, float, float]]:
    """Return groups, GiB a step and GiB moved of each stage and module."""
    cells = [[word.strip() for word in line.split("│")[1:-1]] for line in out.splitlines() if line.count("│") == 8]
    return {(row[0], row[1]): (int(row[2]), float(row[3]), float(row[4])) for row in cells}


@pytest.mark.parametrize("is_in_front", [True, False], ids=["in front of the script", "behind it"])
def test_what_stays_on_a_run_stays_in_the_forecast(is_in_front: bool) -> None:
    def plan(*flags: str) -> dict[tuple[str, str], tuple[int, float, float]]:
        own = [*_NAMES, *flags]
        front, behind = (own, []) if is_in_front else ([], own)
        script = [TRAINER, *MODEL, *DATA, *_LONG, *_TWO_STAGES, *behind]
        out, error, status = _run("--plan", "--hardware", "h200x2", *front, *script)
        assert status == 0, error
        return _moved(out)

    first, last = ("0", "mlp_fc1"), ("1", "mlp_fc1")
    everything = plan()
    assert everything[first][0] == 8 and everything[first][2] > 0.01 and everything[last][2] > 0
    assert plan("--offload-num-layers", "1")[first][0] == 4
    assert plan("--offload-min-tensor-bytes", "mlp_fc1=1GiB")[first][2] == 0
    delta = plan("--offload-rank-delta-bytes", "1GiB")
    assert delta[first] == everything[first] and delta[last][2] == 0
    assert plan("--offload-fraction", "0")[first][2] == 0


@pytest.mark.parametrize("is_in_front", [True, False], ids=["in front of the script", "behind it"])
def test_the_budget_of_the_run_is_that_of_the_forecast(is_in_front: bool) -> None:
    """It is all of the GPU but the margin that a run leaves."""
    front, behind = (_AUTO, []) if is_in_front else ([], _AUTO)
    out, error, status = _run("--plan", "--hardware", "h200", *front, TRAINER, *MODEL, *DATA, *behind)
    assert status == 0 and "137.62 of 139.8 GiB of each GPU" in out, error


def test_only_core_attention_where_nothing_is_named() -> None:
    out, error, status = _run("--plan", TRAINER, *MODEL, *DATA, "--offload-activation")
    assert status == 0 and {name for _, name in _moved(out)} == {"core_attn"}, error


_JOB = [TRAINER, *MODEL, *DATA]
_MISTAKES = [
    (["--plan", "--budget", "200GiB", *_JOB], "--budget 200GiB is above the 139.8"),
    (["--plan", *_JOB, "--offload-gpu-budget", "200GiB"], "--offload-gpu-budget 200GiB is above"),
    (["--plan", *_NAMES, "router_fc1", *_JOB], "--offload-modules matches nothing in this model: 'router_fc1'"),
    (["--plan", *_JOB, *_AUTO, "--offload-min-tensor-bytes", "moe_act=1"], "moe_act=1, but 'moe_act' has no group"),
    (["--plan", *_NAMES, "--offload-dir", "/tmp", *_JOB], "--offload-dir /tmp is for a run without"),
    (["--plan", *_JOB, "--offload-num-layers", "1"], "--offload-num-layers without"),
    (["--plan", "--nodes", "two", TRAINER], "argument --nodes: 'two' is not a number of at least 1"),
    (["--plan", "--hardware", "h300", TRAINER], "'h300' is unknown hardware; known are a100-40"),
    (["--plan", TRAINER, *MODEL, "--mock-data"], "the vocabulary is not known: add --vocab-size"),
    (["--plan", "--hardware", "h200x3", *_JOB, *_TWO_STAGES], "3 GPUs cannot be divided among model replicas of 2"),
    (["--hardware", "h100", "--budget", "3GiB", TRAINER], "--hardware, --budget without --plan changes nothing"),
]


@pytest.mark.parametrize(("arguments", "message"), _MISTAKES, ids=[message for _, message in _MISTAKES])
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    _, error, status = _run(*arguments)
    assert status == 2
    assert message in error.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "message"),
    [("build_chunk", "stage 0 cannot be"), ("_forward_step", "a step of stage 0 without offload cannot be")],
)
def test_a_rehearsal_that_breaks_off_is_one_line(name: str, message: str) -> None:
    ((_, error, status),) = run_ranks(_broken_command, name, pipeline=None)
    assert status == 2 and f"error: {message} rehearsed: no kernel. Omit" in error.splitlines()[-1]


def _broken_command(name: str) -> tuple[str, str, int]:
    from megatron_patches._rehearsal import stage

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel.\nframes of C++")

    setattr(stage, name, broken)
    return _command(["--plan", TRAINER, *MODEL, *DATA])


def test_a_script_whose_arguments_cannot_be_read(tmp_path: Path) -> None:
    if importlib.util.find_spec("megatron.training") is not None:
        pytest.skip("Megatron-LM is installed, and reads them")
    script = tmp_path / "train.py"
    script.write_text("")
    _, error, status = _run("--plan", str(script), "--anything")
    assert status == 2
    assert "cannot be read" in error.splitlines()[-1]


def _run_megatron_lm(folder: Path, front: list[str], behind: list[str]) -> tuple[str, str, int]:
    pytest.importorskip("megatron.training")
    script = folder / "pretrain_gpt.py"
    script.write_text("")
    training = ["--max-position-embeddings", "64", "--train-iters", "1", "--lr", "1e-4", "--micro-batch-size", "1"]
    training += ["--tokenizer-type", "NullTokenizer", "--global-batch-size", "8"]
    return _run("--plan", *front, str(script), *MODEL, *DATA, *training, *behind)


@pytest.mark.parametrize(
    ("front", "behind"),
    [
        pytest.param([], [], id="alone"),
        # Its checks ask for the GPU's architecture, and for a variable of CUDA.
        pytest.param(["--hardware", "h200x2"], ["--context-parallel-size", "2"], id="context parallelism"),
    ],
)
def test_a_script_of_megatron_lm(front: list[str], behind: list[str], tmp_path: Path) -> None:
    out, error, status = _run_megatron_lm(tmp_path, front, behind)
    assert status == 0, error
    assert "core_attn" in out and "a step of 512 tokens" in out


def test_the_optimizer_is_divided_among_one_of_its_instances(tmp_path: Path) -> None:
    flags, held = ["--hidden-size", "1024", "--use-distributed-optimizer"], []
    for number in ("1", "8"):
        behind = [*flags, "--num-distributed-optimizer-instances", number]
        out, error, status = _run_megatron_lm(tmp_path, ["--hardware", "h200x8"], behind)
        assert status == 0, error
        (row,) = (line.split("│") for line in out.splitlines() if " B │" in line)
        held.append(float(row[3]))
    # 2 bytes of weights, 4 of a gradient, and 12 among eight GPUs or on each.
    assert held[1] / held[0] == pytest.approx((6 + 12) / (6 + 12 / 8), rel=0.05)


def test_offload_flags_behind_a_script_of_megatron_lm(tmp_path: Path) -> None:
    flags = ["--offload-activation", "--offload-modules", "core_attn", "--offload-num-layers", "1"]
    out, error, status = _run_megatron_lm(tmp_path, [], flags)
    assert status == 0, error
    assert {key: row[0] for key, row in _moved(out).items()} == {("0", "core_attn"): 8}


@pytest.mark.parametrize("front", [["--offload-engine"], []], ids=["taken over", "megatron-core's own"])
def test_a_recipe_of_megatron_lm(front: list[str], tmp_path: Path) -> None:
    recipe = ["--fine-grained-activation-offloading", "--offload-modules", "core_attn", "qkv_linear"]
    out, error, status = _run_megatron_lm(tmp_path, front, [*recipe, "--activation-offload-fraction", "0.5"])
    if front:
        assert status == 0, error
        assert {name for _, name in _moved(out)} == {"core_attn", "qkv_linear"} and "offloaded in part" in out
        assert (
            error.count("activation_offload_fraction=0.5 of the groups of megatron-core becomes offload_fraction") == 1
        )
    else:
        assert status == 2 and "own, which is not rehearsed: give --offload-engine" in error.splitlines()[-1]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--hiden-size", "3"], "unrecognized arguments: --hiden-size 3 (did you mean --hidden-size?)"),
        (["--num-layers", "many"], "argument --num-layers: invalid int value: 'many'"),
        (["--fp8-format", "hybrid", "--spec", "a", "b"], "--plan does not rehearse --fp8-format, --spec:"),
        (["--cuda-graph-impl", "local"], "--plan does not rehearse --cuda-graph-impl:"),
    ],
)
def test_mistakes_behind_a_script_of_megatron_lm(flags: list[str], message: str, tmp_path: Path) -> None:
    _, error, status = _run_megatron_lm(tmp_path, [], flags)
    assert status == 2 and message in error.splitlines()[-1], error
