# SPDX-License-Identifier: Apache-2.0
"""Runs examples/pretrain_gpt.py in forked ranks: torchrun without the seconds that every rank's imports take."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.dist.launch import Variables, agent_store, run_ranks

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


def train(directory: Path, *flags: str, num_ranks: int = 1, has_data: bool = True) -> Run:
    """Train on `directory/text`, unless it has no data, with as many ranks; write the metrics below `directory`, too.

    Raises:
        RankFailed: if a rank dies or does not finish.
    """
    metrics = directory / f"metrics_{len(list(directory.glob('metrics_*')))}.json"
    data = ["--data-path", str(directory / "text")] if has_data else []
    argv = [*data, "--metrics-json", str(metrics), *flags]
    with agent_store() as meeting:
        outcomes = run_ranks(run_script, argv, world_size=num_ranks, pipeline=Variables(meeting))
    return Run(max(status for status, _ in outcomes), steps_of(metrics), "\n".join(output for _, output in outcomes))


def steps_of(metrics: Path) -> list[dict[str, Any]]:
    """Read what a run wrote; nothing if it ended before its first step."""
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def run_script(argv: Sequence[str]) -> tuple[int, str]:
    """Run the trainer in this process, a rank; return its exit status, and what it wrote to the terminal."""
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = _main(argv)
    return status, output.getvalue()


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
