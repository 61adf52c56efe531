# SPDX-License-Identifier: Apache-2.0
"""Two nodes: two agents of torchrun with addresses of their own, against the same ranks on one node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.dist.trainer import EXAMPLES, Run, train

NUM_NODES, PER_NODE = 2, 2
# Pipelines and gradients go from node to node, tokens to experts of the same node.
FLAGS = (
    *("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2"),
    *("--expert-model-parallel-size", "2", "--num-experts", "4", "--use-distributed-optimizer", "--bf16"),
    *("--hidden-size", "64", "--seq-length", "64", "--train-iters", "3"),
)
OFFLOAD = ("--offload-activation", "--offload-modules", "core_attn", "moe_act", "--offload-min-tensor-bytes", "1")
# What a rank runs: it notes where it is and what of the node's memory is its own, and trains.
RANK = """
import json, os, socket, sys
from pathlib import Path

socket.gethostname = lambda: os.environ["NODE"]
sys.path.insert(0, {examples!r})
import pretrain_gpt
from offload_engine._devices.node_share import num_processes_of_node

names = ("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "NODE")
place = [*(os.environ[name] for name in names), num_processes_of_node()]
Path("rank_" + os.environ["RANK"]).write_text(json.dumps(place))
sys.exit(pretrain_gpt.main())
"""


def train_on_nodes(directory: Path, *flags: str) -> Run:
    """Run the trainer under an agent for each node; the run must succeed."""
    (directory / "rank.py").write_text(RANK.format(examples=str(EXAMPLES)))
    metrics = directory / "metrics.json"
    with ExitStack() as stack:
        agents = [_start_agent(directory, node, "--metrics-json", str(metrics), *flags) for node in range(NUM_NODES)]
        for agent in agents:
            stack.enter_context(agent)
            stack.callback(agent.kill)
        output = "".join(agent.communicate(timeout=240)[0] for agent in agents)
    assert all(agent.returncode == 0 for agent in agents), output
    return Run(0, [json.loads(line) for line in metrics.read_text().splitlines()], output)


def _start_agent(directory: Path, node: int, *flags: str) -> subprocess.Popen[str]:
    # The agents meet at a file, so that no port has to be free; the ranks take one of the first agent's choice.
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(directory / "rendezvous"), "--rdzv-id", "two-nodes"]
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", str(NUM_NODES)]
    command += ["--nproc-per-node", str(PER_NODE), *meeting, "--rdzv-conf", "store_type=file"]
    command += ["--local-addr", f"127.0.0.{node + 1}", str(directory / "rank.py"), *flags]
    path = os.pathsep.join([str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "NODE": f"node{node}"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=directory, env={**os.environ, **variables}, **pipes)


def test_two_nodes_train_as_one_to_the_last_bit(tmp_path: Path) -> None:
    one_node = train(tmp_path, *FLAGS, num_ranks=NUM_NODES * PER_NODE, has_data=False)
    assert one_node.status == 0, one_node.output
    two_nodes = train_on_nodes(tmp_path, *FLAGS, *OFFLOAD)
    assert two_nodes.curve == one_node.curve
    assert "│ 2-3 " in two_nodes.output and "had no record" not in two_nodes.output, "tables of both nodes"
    for step in two_nodes.steps:
        assert all(rank["offload"]["copied_in_bytes"] > 0 for rank in step["ranks"])

    places = [json.loads((tmp_path / f"rank_{rank}").read_text()) for rank in range(NUM_NODES * PER_NODE)]
    assert [(place[0], place[1], place[2]) for place in places] == [
        (str(rank), str(rank % PER_NODE), str(rank // PER_NODE)) for rank in range(NUM_NODES * PER_NODE)
    ]
    assert len({tuple(place[2:5]) for place in places}) == NUM_NODES, "each node has its own name"
    assert {place[5] for place in places} == {PER_NODE}, "what a node's processes share, not what all do"
