# SPDX-License-Identifier: Apache-2.0
"""Two nodes: two agents of torchrun with addresses of their own, against the same ranks on one node."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

from tests.dist.launch import Variables, run_ranks
from tests.dist.programs import TRAINER, Printed, Run, as_run, run_here, train

NUM_NODES, PER_NODE = 2, 2
# Pipelines and gradients go from node to node, tokens to experts of the same node.
FLAGS = (
    *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
    *("--expert-model-parallel-size", "2", "--num-experts", "4", "--use-distributed-optimizer", "--bf16"),
    *("--hidden-size", "64", "--seq-length", "64", "--train-iters", "3"),
)
OFFLOAD = ("--offload-activation", "--offload-modules", "core_attn", "moe_act", "--offload-min-tensor-bytes", "1")


Job = tuple[str, tuple[str, ...], Path, dict[str, str]]
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
    job: Job = (str(TRAINER), ("--metrics-json", str(metrics), *flags), directory, {})
    agents = run_ranks(_agent, job, world_size=NUM_NODES, pipeline=Variables({}), timeout_s=240.0, has_children=True)
    ranks = [ended for agent in agents for _, ended in sorted(agent.items())]
    run = as_run(metrics, [rank.printed for rank in ranks])
    assert run.status == 0, run.output
    return run, ranks


def _agent(job: Job) -> dict[int, Ended]:
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


def _rank(node: str, job: Job) -> Ended:
    from offload_engine._devices.node_share import num_processes_of_node

    socket.gethostname = lambda: node
    variables = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")]
    return Ended(run_here(*job), variables, os.environ["MASTER_ADDR"], num_processes_of_node())


def test_two_nodes_train_as_one_to_the_last_bit(tmp_path: Path) -> None:
    one_node = train(tmp_path, *FLAGS, num_ranks=NUM_NODES * PER_NODE, has_data=False)
    assert one_node.status == 0, one_node.output
    two_nodes, ranks = train_on_nodes(tmp_path, *FLAGS, *OFFLOAD)
    assert two_nodes.curve == one_node.curve
    assert "│ 2-3 " in two_nodes.output and "had no record" not in two_nodes.output, "tables of both nodes"
    for step in two_nodes.steps:
        assert all(rank["offload"]["copied_in_bytes"] > 0 for rank in step["ranks"])
    places = [[str(rank), str(rank % PER_NODE), str(rank // PER_NODE)] for rank in range(NUM_NODES * PER_NODE)]
    assert [rank.variables for rank in ranks] == places
    assert {rank.address for rank in ranks} == {"127.0.0.1"}, "that of the first node"
    assert {rank.num_sharing for rank in ranks} == {PER_NODE}, "what a node's processes share, not what all do"
