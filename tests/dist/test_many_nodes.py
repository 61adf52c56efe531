# SPDX-License-Identifier: Apache-2.0
"""Two nodes: two agents of torchrun with addresses of their own, against the same ranks on one node."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import NamedTuple

from tests.dist.launch import Variables, run_ranks
from tests.dist.trainer import Run, run_script, steps_of, train

NUM_NODES, PER_NODE = 2, 2
# Pipelines and gradients go from node to node, tokens to experts of the same node.
FLAGS = (
    *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
    *("--expert-model-parallel-size", "2", "--num-experts", "4", "--use-distributed-optimizer", "--bf16"),
    *("--hidden-size", "64", "--seq-length", "64", "--train-iters", "3"),
)
OFFLOAD = ("--offload-activation", "--offload-modules", "core_attn", "moe_act", "--offload-min-tensor-bytes", "1")


class Ended(NamedTuple):
    """How a rank ended, where it was, and what of the node's memory was its own."""

    status: int
    output: str
    variables: list[str]
    address: str
    num_sharing: int


def train_on_nodes(directory: Path, *flags: str) -> tuple[Run, list[Ended]]:
    """Run the trainer under an agent for each node; the run must succeed."""
    metrics = directory / "metrics.json"
    argv = ["--metrics-json", str(metrics), *flags]
    meeting = str(directory / "rendezvous")
    agents = run_ranks(
        _agent, meeting, argv, world_size=NUM_NODES, pipeline=Variables({}), timeout_s=240.0, has_children=True
    )
    ranks = [Ended(*ended) for agent in agents for _, ended in sorted(agent.items())]
    output = "".join(rank.output for rank in ranks)
    assert not any(rank.status for rank in ranks), output
    return Run(0, steps_of(metrics), output), ranks


def _agent(meeting: str, argv: list[str]) -> dict[int, Ended]:
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
        rdzv_endpoint=meeting,
        rdzv_configs={"store_type": "file"},
        local_addr=f"127.0.0.{node + 1}",
        start_method="fork",
        max_restarts=0,
    )
    found: dict[int, Ended] = elastic_launch(config, _rank)(f"node{node}", argv)
    return found


def _rank(node: str, argv: list[str]) -> Ended:
    from offload_engine._devices.node_share import num_processes_of_node

    socket.gethostname = lambda: node
    variables = [os.environ[name] for name in ("RANK", "LOCAL_RANK", "GROUP_RANK")]
    status, output = run_script(argv)
    return Ended(status, output, variables, os.environ["MASTER_ADDR"], num_processes_of_node())


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
