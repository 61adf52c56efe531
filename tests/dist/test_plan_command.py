# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_patches --plan`, from the command line to the tables, and the rehearsal that they come from.

A rehearsal has the groups of a real step, with the same bytes, and the figures that GPUs have shown.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.dist.launch import Pipeline, run_ranks
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


Printed = tuple[str, str, int]
"""What a command prints, its errors, and its exit status."""


def _run(*commands: list[str]) -> list[Printed]:
    """Run commands in one process of their own: none of them changes anything for the others."""
    (found,) = run_ranks(_commands, commands, pipeline=None, timeout_s=300)
    return found


def _commands(commands: Sequence[list[str]]) -> list[Printed]:
    from megatron_patches.__main__ import main

    os.environ["NVTE_CPU_OFFLOAD_V1"] = "1"  # megatron.training asks for it where it reads recipes
    found = []
    for arguments in commands:
        out, error, status = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            try:
                main(arguments)
            except SystemExit as end:
                status = int(end.code or 0)
        found.append((out.getvalue(), error.getvalue(), status))
    return found


def _plan(*arguments: str) -> str:
    """Return the tables of a job that can be planned."""
    ((out, error, status),) = _run(["--plan", *arguments])
    assert status == 0, error
    return out


def _check_mistakes(mistakes: list[tuple[list[str], str]]) -> None:
    """Each is one line."""
    found = _run(*(arguments for arguments, _ in mistakes))
    for (_, message), (_, error, status) in zip(mistakes, found, strict=True):
        assert status == 2 and message in error.splitlines()[-1], error


def test_dense_in_a_pipeline(tmp_path: Path) -> None:
    plot = tmp_path / "plan.png"
    parallel = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--use-distributed-optimizer"]
    out = _plan("--hardware", "h100x8", "--plan-plot", str(plot), *JOB, *INTERLEAVED, *parallel)
    assert "8 GPUs on 1 node(s) of h100x8 (datasheet" in out and re.search(r"│ 1 +│ core_attn +│", out)
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
    assert "4 GPUs on 2 node(s)" in out and "Experts: all are assumed to get equally many tokens." in out
    assert {name for _, name in _moved(out)} == {"core_attn", "router_fc1"}


def test_a_budget_that_needs_offload() -> None:
    """The saved tensors of two forwards do not fit; what was chosen does, and takes less time than the other ways."""
    wide = ["--num-layers", "8", "--seq-length", "4096", "--hidden-size", "1024"]
    out = _plan("--budget", "11.3GiB", *JOB, *wide, "--attention-dropout", "0", "--hidden-dropout", "0")
    lines = (line.split("│") for line in out.splitlines())
    rows = {words[1].strip(): [word.strip() for word in words[2:]] for words in lines if words[2:]}
    none, chosen = rows["no offload"], rows["chosen within the budget"]
    assert (none[4], chosen[4]) == ("no", "yes") and "fastest with: chosen within the budget" in out
    assert float(none[0].replace(",", "")) <= float(chosen[0].replace(",", ""))


def _moved(out: str) -> dict[tuple[str, str], tuple[int, float, float]]:
    """Return groups, GiB a step and GiB moved of each stage and module."""
    cells = [[word.strip() for word in line.split("│")[1:-1]] for line in out.splitlines() if line.count("│") == 8]
    return {(row[0], row[1]): (int(row[2]), float(row[3]), float(row[4])) for row in cells if row[2].isdigit()}


@pytest.mark.parametrize("is_in_front", [True, False], ids=["in front of the script", "behind it"])
def test_what_stays_on_a_run_stays_in_the_forecast(is_in_front: bool) -> None:
    """And the budget of the run is that of the forecast: all of the GPU but the margin that a run leaves."""

    def plan(*flags: str) -> str:
        long = ["--seq-length", "4096", "--hidden-size", "256", "--attention-dropout", "0"]
        front, behind = (flags, ()) if is_in_front else ((), flags)
        return _plan("--hardware", "h200x2", *front, *JOB, *long, *TWO_STAGES, *behind)

    first, last = ("0", "mlp_fc1"), ("1", "mlp_fc1")
    everything = _moved(plan(*NAMES))
    assert everything[first][0] == 8 and everything[first][2] > 0.01 and everything[last][2] > 0
    assert _moved(plan(*NAMES, "--offload-num-layers", "1"))[first][0] == 4
    assert _moved(plan(*NAMES, "--offload-min-tensor-bytes", "mlp_fc1=1GiB"))[first][2] == 0
    delta = _moved(plan(*NAMES, "--offload-rank-delta-bytes", "1GiB"))
    assert delta[first] == everything[first] and delta[last][2] == 0
    assert _moved(plan(*NAMES, "--offload-fraction", "0"))[first][2] == 0
    assert "137.62 of 139.8 GiB of each GPU" in plan(*AUTO)
    assert {name for _, name in _moved(plan("--offload-activation"))} == {"core_attn"}


def test_mistakes_are_one_line() -> None:
    _check_mistakes(
        [
            (["--plan", "--budget", "200GiB", *JOB], "--budget 200GiB is above the 139.8"),
            (["--plan", *JOB, "--offload-gpu-budget", "200GiB"], "--offload-gpu-budget 200GiB is above"),
            (["--plan", *NAMES, "router_fc1", *JOB], "--offload-modules matches nothing in this model: 'router_fc1'"),
            (["--plan", *JOB, *AUTO, "--offload-min-tensor-bytes", "moe_act=1"], "moe_act=1, but 'moe_act' has no"),
            (["--plan", *NAMES, "--offload-dir", "/tmp", *JOB], "--offload-dir /tmp is for a run without"),
            (["--plan", str(TRAINER), *MODEL, "--mock-data"], "the vocabulary is not known: add --vocab-size"),
            (["--plan", "--hardware", "h200x3", *JOB, *TWO_STAGES], "3 GPUs cannot be divided among model replicas"),
            (["--hardware", "h100", "--budget", "3GiB", str(TRAINER)], "--hardware, --budget without --plan changes"),
        ]
    )


# -- scripts of Megatron-LM --------------------------------------------------------------------------------------------

RECIPE = ["--fine-grained-activation-offloading", "--offload-modules", "core_attn", "qkv_linear"]
RECIPE += ["--activation-offload-fraction", "0.5"]


@pytest.fixture
def job(tmp_path: Path) -> list[str]:
    """Return a script of Megatron-LM with its arguments; skip the test without it."""
    pytest.importorskip("megatron.training")
    script = tmp_path / "pretrain_gpt.py"
    script.write_text("")
    training = ["--max-position-embeddings", "64", "--train-iters", "1", "--lr", "1e-4", "--micro-batch-size", "1"]
    training += ["--tokenizer-type", "NullTokenizer", "--global-batch-size", "8"]
    return [str(script), *JOB[1:], *training]


@pytest.mark.parametrize(("flags", "num_microbatches"), [([], 4), (["--context-parallel-size", "2"], 8)], ids=str)
def test_a_script_of_megatron_lm(flags: list[str], num_microbatches: int, job: list[str]) -> None:
    """Its checks ask for the GPU's architecture, and for a variable of CUDA."""
    named = ["--offload-activation", "--offload-modules", "core_attn", "--offload-num-layers", "1"]
    out = _plan("--hardware", "h200x2", *job, *flags, *named)
    assert "a step of 512 tokens" in out
    assert {key: row[0] for key, row in _moved(out).items()} == {("0", "core_attn"): num_microbatches}


def test_the_optimizer_is_divided_among_one_of_its_instances(job: list[str]) -> None:
    held = []
    for number in ("1", "8"):
        flags = ["--use-distributed-optimizer", "--num-distributed-optimizer-instances", number]
        out = _plan("--hardware", "h200x8", *job, "--hidden-size", "1024", *flags)
        (row,) = (line.split("│") for line in out.splitlines() if " B │" in line)
        held.append(float(row[3]))
    # 2 bytes of weights, 4 of a gradient, and 12 among eight GPUs or on each.
    assert held[1] / held[0] == pytest.approx((6 + 12) / (6 + 12 / 8), rel=0.05)


def test_a_recipe_of_megatron_lm_and_mistakes_behind_its_script(job: list[str]) -> None:
    ((out, error, status),) = _run(["--plan", "--offload-engine", *job, *RECIPE])
    assert status == 0, error
    assert {name for _, name in _moved(out)} == {"core_attn", "qkv_linear"} and "offloaded in part" in out
    mistakes = [
        (["--hiden-size", "3"], "unrecognized arguments: --hiden-size 3 (did you mean --hidden-size?)"),
        (["--fp8-format", "hybrid", "--spec", "a", "b"], "--plan does not rehearse --fp8-format, --spec:"),
        (["--cuda-graph-impl", "local"], "--plan does not rehearse --cuda-graph-impl:"),
        (RECIPE, "own, which is not rehearsed: give --offload-engine"),
    ]
    _check_mistakes([(["--plan", *job, *flags], message) for flags, message in mistakes])


# -- the rehearsal -----------------------------------------------------------------------------------------------------

NUM_MICROBATCHES = 4
REHEARSED = {
    "dense": ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"],
    "moe": ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "router", "router_fc1", "moe_act", "router_fc2"],
}
MIB = 1 << 20

Groups = list[list[tuple[str, int, int]]]
"""Of each virtual stage: name, layer and bytes of its groups."""


@pytest.mark.compat
@pytest.mark.parametrize(("kind", "shape"), [("dense", Pipeline(2)), ("moe", Pipeline(2, 2))], ids=str)
def test_groups_are_those_of_a_real_step(kind: str, shape: Pipeline) -> None:
    real = run_ranks(_real_groups, kind, pipeline=shape)
    (rehearsed,) = run_ranks(_rehearsed_groups, kind, shape, pipeline=None)
    assert rehearsed == real
    assert all(nbytes for groups in real for stage in groups for name, _, nbytes in stage if name == "core_attn")


def _real_groups(kind: str) -> Groups:
    """Return the groups that the engine counts on the CPU, of the last microbatch."""
    from megatron.core.transformer.moe import router

    from megatron_patches import apply
    from megatron_patches._rehearsal.rows import balanced
    from tests.dist.tiny import ALL, engine_of, make_chunks, make_config, run

    router.topk_routing_with_score_function = balanced(router.topk_routing_with_score_function)
    with apply(ALL.replace(dry_run=True), modules=REHEARSED[kind], has_report=False) as handle:
        chunks = make_chunks(make_config(kind))
        run(chunks, NUM_MICROBATCHES, forward_step=_forward_step)
        handle.record()
        run(chunks, NUM_MICROBATCHES, forward_step=_forward_step)
        groups = engine_of(handle).last_record.groups  # type: ignore[union-attr]
    found: Groups = [[] for _ in chunks]
    for group in groups:
        stage, _, behind = group.group.partition(".")
        if behind.partition(":")[0] == str(NUM_MICROBATCHES - 1):
            found[int(stage)].append((group.name, group.layer, group.own_bytes))
    return found


def _forward_step(batches: Iterator[torch.Tensor], model: Any) -> Any:
    tokens = next(batches)
    positions = torch.arange(tokens.shape[1])[None].expand(tokens.shape[0], -1)
    return model(tokens, positions, None, labels=tokens), lambda output: (
        output.float().mean(),
        {"loss": output.mean()},
    )


def _rehearsed_groups(kind: str, shape: Pipeline) -> list[Groups]:
    """Return the groups of each rank of a pipeline, all of them from this process."""
    from megatron_patches._arguments import Settings
    from megatron_patches._rehearsal.job import TrainingJob
    from megatron_patches._rehearsal.stage import StageRehearsal
    from offload_engine import OffloadConfig
    from offload_engine.planning.hardware import find_hardware
    from tests.dist.tiny import MICRO_BATCH, SEQUENCE, VOCABULARY, make_config

    sizes = {"pipeline_model_parallel_size": shape.size, "virtual_pipeline_model_parallel_size": shape.virtual}
    job = TrainingJob(
        partial(make_config, kind),
        vocab_size=VOCABULARY,
        seq_length=SEQUENCE,
        micro_batch_size=MICRO_BATCH,
        num_microbatches=NUM_MICROBATCHES,
        world_size=shape.num_ranks,
        has_te=False,
        model={"share_embeddings_and_output_weights": False},
        has_data_parallelism=False,
        parallel=sizes,
    )
    hardware = find_hardware("h200")
    ranks = []
    for rank in range(shape.size):
        with StageRehearsal(job, hardware, hardware.link(1, False), rank).ready() as stage:
            outcome = stage.run(Settings(OffloadConfig(min_tensor_bytes=1, dry_run=True), tuple(REHEARSED[kind])))
        ranks.append([[(g.name, g.layer, g.nbytes) for g in chunk.groups] for chunk in outcome.shapes])
    return ranks


# From docs/results/2026-11-23_h200.md: MiB allocated on each rank, without offload and with, and ms of a step of each.
MEASURED = {
    "a": ([19_697], [11_515], 858.1, 1_320.9),
    "c-dense": ([16_887, 13_359], [7_246, 7_548], 972.4, 1_342.5),
}


@pytest.mark.parametrize("setup", MEASURED)
def test_figures_of_h200(setup: str) -> None:
    """Peaks within 0.1%, the step within 3%; with everything offloaded, which the link bounds, within 10%."""
    (found,) = run_ranks(_forecast_of_setup, setup, pipeline=None, timeout_s=600)
    for got, expected, tolerance in zip(found, MEASURED[setup], (1e-3, 1e-3, 0.03, 0.10), strict=True):
        assert got == pytest.approx(expected, rel=tolerance)


def _forecast_of_setup(name: str) -> list[Any]:
    from benchmarks.gpu import settings
    from megatron_patches._rehearsal.forecast import forecast_job
    from offload_engine.planning.hardware import find_hardware

    logging.disable(logging.WARNING)
    setup = settings.SETUPS[name]
    forecast = forecast_job(_job_of(setup.shape, setup.num_gpus), find_hardware(f"h200x{setup.num_gpus}"))
    peaks = [[rank.ways[way].peak_bytes // MIB for rank in forecast.ranks] for way in (0, 1)]
    return [*peaks, *(step.milliseconds for step in forecast.steps[:2])]


def _job_of(shape: Any, num_gpus: int) -> Any:
    """Return the job of a benchmark with TransformerEngine's layers."""
    from benchmarks.gpu import model
    from megatron_patches._rehearsal.job import TrainingJob

    def make_config(**changes: Any) -> Any:
        config = model.make_config(shape, False)
        return dataclasses.replace(config, perform_initialization=False, **changes)

    return TrainingJob(
        make_config,
        shape.vocab,
        shape.seq,
        shape.mbs,
        shape.nmb,
        num_gpus,
        model={"share_embeddings_and_output_weights": False, "position_embedding_type": "rope"},
        has_data_parallelism=False,
        optimizer_bytes=0,
        parallel={"pipeline_model_parallel_size": shape.pp, "virtual_pipeline_model_parallel_size": shape.vpp or None},
    )
