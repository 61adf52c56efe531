# SPDX-License-Identifier: Apache-2.0
"""Programs of this repository, in processes forked from one that has imported what they import: no start of seconds."""

from __future__ import annotations

import os
import runpy
import socket
import sys
import tempfile
from pathlib import Path
from typing import IO, NamedTuple

from tests.dist.launch import Variables, run_ranks

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "run.py"


class Printed(NamedTuple):
    out: str
    err: str


def run_program(
    path: Path, *arguments: str, cwd: Path, num_ranks: int = 1, environment: dict[str, str] | None = None
) -> list[Printed]:
    """Run the script as `python` or, on several ranks, as `torchrun` does; return what each rank printed.

    Raises:
        RankFailed: if it raised, or left with another code than 0.
    """
    launched = Variables(free_port()) if num_ranks > 1 else None
    job = (str(path), arguments, cwd, environment or {})
    return run_ranks(_main, *job, world_size=num_ranks, pipeline=launched, timeout_s=240.0)


def run_code(code: str, *, cwd: Path) -> str:
    """Run a program that is in no file of its own; return what it printed."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "code.py"
        path.write_text(code)
        return run_program(path, cwd=cwd)[0].out


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def _main(path: str, arguments: tuple[str, ...], cwd: Path, variables: dict[str, str]) -> Printed:
    os.environ.update(variables)
    os.chdir(cwd)
    sys.argv = [path, *arguments]
    sys.path.insert(0, str(Path(path).parent))
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as error:
            if error.code:
                raise AssertionError(f"left with {error.code!r}: {_read(err)[-2000:]}") from error
        return Printed(_read(out), _read(err))


def _read(file: IO[bytes]) -> str:
    sys.stdout.flush()
    sys.stderr.flush()
    file.seek(0)
    return file.read().decode()
