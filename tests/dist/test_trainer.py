# SPDX-License-Identifier: Apache-2.0
"""The trainer: every kind of run, with and without offload, to the last bit; resuming; errors before the first step."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.dist.launch import Variables, run_ranks
from tests.dist.programs import EXAMPLES, TRAINER, Printed, Run, as_run, run_here, run_program, train

MODEL = (
    *("--num-layers", "4", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "32"),
    *("--global-batch-size", "4", "--train-iters", "3", "--make-vocab-size-divisible-by", "16"),
)
OFFLOAD = "--offload-activation --offload-min-tensor-bytes 1 --offload-dir none"
MOE = "--num-experts 4 --disable-bias-linear --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.01"
PP2 = "--pipeline-model-parallel-size 2"
VPP2 = f"{PP2} --num-virtual-stages-per-pipeline-rank 2"
OVERLAP = "--bf16 --overlap-moe-expert-parallel-comm"


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a .bin/.idx pair of the first help topics."""
    directory = tmp_path_factory.mktemp("text")
    run_program(EXAMPLES / "prepare_text.py", "--output-prefix", "text", cwd=directory)
    return directory


@pytest.fixture
def directory(text: Path, tmp_path: Path) -> Path:
    """Return a directory for one test, with the text in it."""
    for path in text.glob("text.*"):
        (tmp_path / path.name).symlink_to(path)
    return tmp_path


def run(directory: Path, flags: str = "", *, num_ranks: int = 1) -> Run:
    """Run the trainer; the run must succeed."""
    result = train(directory, *MODEL, *flags.split(), num_ranks=num_ranks)
    assert result.status == 0, result.output
    return result


LLAMA = (
    "--swiglu --position-embedding-type rope --normalization RMSNorm --group-query-attention --qk-layernorm "
    "--num-query-groups 2 --disable-bias-linear --untie-embeddings-and-output-weights "
    "--rampup-batch-size 2 2 4 --lr-decay-style cosine"
)
EVALUATING = f"{VPP2} {MOE} --eval-interval 1 --eval-iters 1 --eval-at-start"
DISTRIBUTED = f"--expert-model-parallel-size 2 {VPP2} {MOE} {OVERLAP} --use-distributed-optimizer --overlap-grad-reduce"
RUNS = [
    (1, LLAMA, "core_attn mlp_fc1"),
    (2, EVALUATING, "core_attn router_fc1"),
    (4, DISTRIBUTED, "layer_input core_attn router_fc1 moe_act"),
]


@pytest.mark.parametrize(("num_ranks", "flags", "modules"), RUNS, ids=["one rank", "vpp2 moe", "vpp2 ep2 overlap"])
def test_offload_changes_no_bit_and_moves_bytes(directory: Path, num_ranks: int, flags: str, modules: str) -> None:
    plain = run(directory, flags, num_ranks=num_ranks)
    offload = run(directory, f"{flags} {OFFLOAD} --offload-modules {modules}", num_ranks=num_ranks)
    assert offload.curve == plain.curve
    for without, having in zip(plain.steps, offload.steps, strict=True):
        assert without.get("validation_loss") == having.get("validation_loss")
        assert without["offload"]["copied_out_bytes"] == 0
        # a group whose backward comes before it was released needs no copy-in
        assert 0 < having["offload"]["copied_in_bytes"] <= having["offload"]["copied_out_bytes"]
        before, after = (step["offload"]["peak_resident_saved_bytes"] for step in (without, having))
        assert after < before


def test_the_record_of_a_plan(directory: Path) -> None:
    plain = run(directory, f"{PP2} --train-iters 7", num_ranks=2)
    assert all(step["offload"]["plan"] is None for step in plain.steps)
    flags = f"{PP2} --train-iters 7 --offload-gpu-budget 1GiB --offload-min-tensor-bytes 1B"
    result = run(directory, flags, num_ranks=2)
    assert result.curve == plain.curve
    first, planned = (result.steps[number]["offload"] for number in (0, 3))
    assert first["plan"].pop("budget_bytes") == 1 << 30 and first["copied_out_bytes"] > 0
    assert {*first["plan"].values()} == {planned["plan"]["measured_peak_bytes"]} == {None}, "not known yet"
    assert planned["plan"]["predicted_peak_bytes"] > 0
    last = result.steps[-1]
    plan, *of_ranks = [figures["offload"]["plan"] for figures in (last, *last["ranks"])]
    assert plan["budget_bytes"] == 1 << 30 and plan["recomputed_bytes"] == 0
    assert 0 < plan["measured_peak_bytes"] <= plan["budget_bytes"] and plan["predicted_step_ms"] > 0
    for name, combine in (("kept_bytes", sum), ("offloaded_bytes", sum), ("predicted_peak_bytes", max)):
        assert plan[name] == combine(rank[name] for rank in of_ranks)
    assert last["offload"]["copied_out_bytes"] == 0


@pytest.mark.parametrize(
    ("num_ranks", "flags"), [(1, "--attention-dropout 0.2"), (2, f"{VPP2} {MOE} --bf16 --use-distributed-optimizer")]
)
def test_a_resumed_run_repeats_every_bit(directory: Path, num_ranks: int, flags: str) -> None:
    flags += " --train-iters 5 --lr-warmup-iters 2"
    whole = run(directory, flags, num_ranks=num_ranks)
    saved = directory / "checkpoints"
    first = run(directory, f"{flags} --save {saved} --exit-interval 2", num_ranks=num_ranks)
    rest = run(directory, f"{flags} --load {saved}", num_ranks=num_ranks)
    assert first.curve + rest.curve == whole.curve
    assert [step["step"] for step in rest.steps] == [3, 4, 5]


MISTAKES = {
    "--data-path nowhere/text": "nowhere/text.bin does not exist",
    "--pipeline-model-parallel-size 2": "1 processes: --pipeline-model-parallel-size 2 needs a multiple of 2",
    "--global-batch-size 3 --micro-batch-size 2": "batch size (3) is not divisible by micro batch size (2)",
    "--load nowhere": "there is no checkpoint in nowhere",
    "--num-experts 2 --moe-router-topk 4": "--moe-router-topk 4 is more than --num-experts 2",
    "--num-layers 2 --load {saved}": "num_layers 4 (now 2)",
    "--offload-dir . --offload-resident-bytes 0": (
        "--offload-resident-bytes, --offload-dir without --offload-activation"
    ),
}


def test_mistakes_end_the_run_before_its_first_step(directory: Path) -> None:
    """With one line of explanation."""
    saved = directory / "saved"
    run(directory, f"--train-iters 1 --save {saved}")
    for flags, message in MISTAKES.items():
        result = train(directory, *MODEL, *flags.format(saved=saved).split())
        assert result.status != 0 and result.steps == [] and "Traceback" not in result.output, result.output
        assert "error:" in result.output and message in result.output, result.output


FAILS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch.distributed as dist
from gpt_trainer.arguments import UsageError, parse_arguments
from gpt_trainer.environment import environment
from megatron_patches import apply_cpu_support

error = UsageError if sys.argv[2] == "of all" else ZeroDivisionError
try:
    with apply_cpu_support(), environment(parse_arguments([])):
        raise error()
except error:
    print(dist.is_initialized())
"""


@pytest.mark.parametrize(
    ("num_ranks", "which", "stays"), [(1, "of one", False), (2, "of one", True), (2, "of all", False)]
)
def test_after_an_error_of_one_rank_none_waits_for_the_others(
    num_ranks: int, which: str, stays: bool, tmp_path: Path
) -> None:
    """To destroy the groups would, and nobody would see the error. What all ranks are told alike ends them."""
    (script := tmp_path / "fails.py").write_text(FAILS)
    ranks = run_program(script, str(EXAMPLES), which, cwd=tmp_path, num_ranks=num_ranks)
    assert [rank.out.split() for rank in ranks] == [[str(stays)]] * num_ranks


def test_without_flags_it_learns_the_built_in_text(directory: Path) -> None:
    """All defaults but for the size, which would take a CPU long."""
    small = ("--hidden-size", "64", "--seq-length", "128", "--lr", "0.01")
    result = train(directory, *small, "--eval-interval", "10", has_data=False)
    assert result.status == 0, result.output
    assert len(result.curve) == 10 and result.curve[-1][0] < result.curve[0][0] - 1.0
    assert result.steps[-1]["validation_loss"] < result.curve[0][0] - 1.0


def test_no_more_flags_than_the_switch(directory: Path) -> None:
    """The built-in text, a model that saves enough to move, and a line of what moved; experts need no second flag."""
    small = ("--train-iters", "2", "--num-layers", "2")  # the defaults would take a CPU long
    result = train(directory, "--offload-activation", "--num-experts", "2", *small, has_data=False)
    assert result.status == 0, result.output
    assert "--disable-bias-linear is implied" in result.output
    assert re.search(r"step 2, offload of all ranks: moved \d+ MiB, \d+% of the .* compute waited", result.output)


# -- two nodes: two agents of torchrun with addresses of their own, against the same ranks on one node -----------------

NUM_NODES, PER_NODE = 2, 2
# Pipelines and gradients go from node to node, tokens to experts of the same node.
FLAGS = (
    *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
    *("--expert-model-parallel-size", "2", "--num-experts", "4", "--use-distributed-optimizer", "--bf16"),
    *("--hidden-size", "64", "--seq-length", "64", "--train-iters", "3"),
)
OFFLOAD_ON_NODES = "--offload-activation --offload-modules core_attn moe_act --offload-min-tensor-bytes 1".split()


Program = tuple[str, tuple[str, ...], Path, dict[str, str]]
"""Of `run_here`."""


class Ended(NamedTuple):
    """What a rank printed, where it was, and what of the node's memory was its own."""

    printed: Printed
    variables: list[str]
    address: str
    num_sharing: int


def train_on_nodes(directory: Path, *flags: str) -> tuple[Run, list[Ended]]:
    """Run the trainer under an agent for each node; the run must succeed."""
    metrics = directory / "metrics.json"
    job: Program = (str(TRAINER), ("--metrics-json", str(metrics), *flags), directory, {})
    agents = run_ranks(_agent, job, world_size=NUM_NODES, pipeline=Variables({}), timeout_s=240.0, has_children=True)
    ranks = [ended for agent in agents for _, ended in sorted(agent.items())]
    run = as_run(metrics, [rank.printed for rank in ranks])
    assert run.status == 0, run.output
    return run, ranks


def _agent(job: Program) -> dict[int, Ended]:
    """Do what `python -m torch.distributed.run` does on a node, but for the start of the interpreters."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    node = int(os.environ["RANK"])
    config = LaunchConfig(
        min_nodes=NUM_NODES,
        max_nodes=NUM_NODES,
        nproc_per_node=PER_NODE,
        run_id="two-nodes",
        # The agents meet at a file, so that no port has to be free; the ranks take one of the first agent's choice.
        rdzv_backend="c10d",
        rdzv_endpoint=str(job[2] / "rendezvous"),
        rdzv_configs={"store_type": "file"},
        local_addr=f"127.0.0.{node + 1}",
        start_method="fork",
        max_restarts=0,
    )
    found: dict[int, Ended] = elastic_launch(config, _rank)(f"node{node}", job)
    return found


def _rank(node: str, job: Program) -> Ended:
    from offload_engine._devices.node_share import num_processes_of_node

    socket.gethostname = lambda: node
    variables = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")]
    return Ended(run_here(*job), variables, os.environ["MASTER_ADDR"], num_processes_of_node())


def test_two_nodes_train_as_one_to_the_last_bit(tmp_path: Path) -> None:
    one_node = train(tmp_path, *FLAGS, num_ranks=NUM_NODES * PER_NODE, has_data=False)
    assert one_node.status == 0, one_node.output
    two_nodes, ranks = train_on_nodes(tmp_path, *FLAGS, *OFFLOAD_ON_NODES)
    assert two_nodes.curve == one_node.curve
    assert "│ 2-3 " in two_nodes.output and "had no record" not in two_nodes.output, "tables of both nodes"
    for step in two_nodes.steps:
        assert all(rank["offload"]["copied_in_bytes"] > 0 for rank in step["ranks"])
    places = [[str(rank), str(rank % PER_NODE), str(rank // PER_NODE)] for rank in range(NUM_NODES * PER_NODE)]
    assert [rank.variables for rank in ranks] == places
    assert {rank.address for rank in ranks} == {"127.0.0.1"}, "that of the first node"
    assert {rank.num_sharing for rank in ranks} == {PER_NODE}, "what a node's processes share, not what all do"
