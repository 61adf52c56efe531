# SPDX-License-Identifier: Apache-2.0
"""Runs examples/pretrain_gpt.py in forked ranks: torchrun without the seconds that every rank's imports take."""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.dist.launch import PRELOAD, agent_store

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Run:
    """What a run left: one record a step, and what it wrote to the terminal."""

    status: int
    steps: list[dict[str, Any]]
    output: str

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Return loss and gradient norm of each step."""
        return [(step["loss"], step["grad_norm"]) for step in self.steps]


def train(directory: Path, *flags: str, num_ranks: int = 1, timeout_s: float = 120.0, has_data: bool = True) -> Run:
    """Train on `directory/text`, unless it has no data, with as many ranks; write the metrics below `directory`, too.

    Raises:
        AssertionError: if a rank dies or does not finish.
    """
    metrics = directory / f"metrics_{len(list(directory.glob('metrics_*')))}.json"
    data = ["--data-path", str(directory / "text")] if has_data else []
    argv = [*data, "--metrics-json", str(metrics), *flags]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    ranks = []
    with agent_store() as meeting:
        for rank in range(num_ranks):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_rank_main, args=(writer, rank, num_ranks, meeting, argv), daemon=True)
            process.start()
            writer.close()
            ranks.append((process, reader))
        try:
            outcomes = [_receive(reader, timeout_s) for _, reader in ranks]
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()
    steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return Run(max(status for status, _ in outcomes), steps, "\n".join(output for _, output in outcomes))


def _receive(reader: Connection, timeout_s: float) -> tuple[int, str]:
    try:
        return reader.recv() if reader.poll(timeout_s) else (1, "a rank did not finish in time")
    except EOFError:
        return 1, "a rank died without a word"


def _rank_main(writer: Connection, rank: int, num_ranks: int, meeting: dict[str, str], argv: Sequence[str]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(meeting)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = _main(argv)
    writer.send((status, output.getvalue()))
    writer.close()
    os._exit(status)  # without waiting for gloo's threads, whose peers may be gone


def _main(argv: Sequence[str]) -> int:
    sys.path.insert(0, str(EXAMPLES))
    import traceback

    import pretrain_gpt

    try:
        return pretrain_gpt.main(argv)
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
