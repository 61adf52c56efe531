# SPDX-License-Identifier: Apache-2.0
"""Programs of this repository, in processes forked from one that has imported what they import: no start of seconds."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from tests.dist.launch import RankFailed, Variables, agent_store, run_ranks

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
TRAINER = EXAMPLES / "pretrain_gpt.py"
BENCHMARK = ROOT / "benchmarks" / "run.py"


class Printed(NamedTuple):
    """What a rank of a program printed, and its exit status."""

    out: str
    err: str
    status: int


def run_program(
    path: Path, *arguments: str, cwd: Path, num_ranks: int = 1, environment: dict[str, str] | None = None
) -> list[Printed]:
    """Run the script as `python` or, on several ranks, as `torchrun` does; return what each rank printed.

    Raises:
        RankFailed: if it raised, or left with another code than 0.
    """
    printed = _run(path, arguments, cwd, num_ranks, environment or {}, has_agent=num_ranks > 1)
    if any(rank.status for rank in printed):
        raise RankFailed("\n".join(rank.err[-2000:] for rank in printed))
    return printed


def run_code(code: str, *, cwd: Path) -> str:
    """Run a program that is in no file of its own; return what it printed."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "code.py"
        path.write_text(code)
        return run_program(path, cwd=cwd)[0].out


def _run(
    path: Path, arguments: tuple[str, ...], cwd: Path, num_ranks: int, environment: dict[str, str], *, has_agent: bool
) -> list[Printed]:
    job = (str(path), arguments, cwd, environment)
    if not has_agent:
        return run_ranks(run_here, *job, pipeline=None, timeout_s=240.0)
    with agent_store() as meeting:
        return run_ranks(run_here, *job, world_size=num_ranks, pipeline=Variables(meeting), timeout_s=240.0)


def run_here(path: str, arguments: tuple[str, ...], cwd: Path, variables: dict[str, str]) -> Printed:
    """Run the script in this process, which is to end with it."""
    os.environ.update(variables)
    os.chdir(cwd)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    status = 0
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            status = 1
            traceback.print_exc()
        return Printed(_read(out), _read(err), status)


def _read(file: IO[bytes]) -> str:
    sys.stdout.flush()
    sys.stderr.flush()
    file.seek(0)
    return file.read().decode()


# -- the trainer -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What a run of examples/pretrain_gpt.py left: one record a step, and what it wrote to the terminal."""

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
    arguments = (*data, "--metrics-json", str(metrics), *flags)
    printed = _run(TRAINER, arguments, directory, num_ranks, {}, has_agent=True)
    steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    output = "\n".join(text for rank in printed for text in (rank.out, rank.err))
    return Run(max(rank.status for rank in printed), steps, output)
