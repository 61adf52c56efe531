# SPDX-License-Identifier: Apache-2.0
"""The records of a run, each written as soon as it is there, and where they come from."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import offload_engine

_VARIABLES = ("NVTE_", "CUDA_", "NCCL_", "GLOO_", "PYTORCH_", "TORCH_", "OMP_")


class Records(list[dict[str, Any]]):
    """All records so far; also, where a file is given, a line of JSON for each at the end of that."""

    def __init__(self, file: Path | None) -> None:
        super().__init__()
        self._file = file

    def write(self, records: Iterable[dict[str, Any]]) -> None:
        new = list(records)
        self += new
        if self._file is not None:
            with self._file.open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in new)

    def of(self, *kinds: str) -> list[dict[str, Any]]:
        """Return the records of these kinds."""
        return [record for record in self if record["kind"] in kinds]


def provenance(packages: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a record besides its settings; `packages` are those whose versions matter."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in packages},
        "core": core_in_words(),
        "package": str(Path(offload_engine.__file__).parent),
        "commit": _commit(),
        "environment": {k: v for k, v in os.environ.items() if k.startswith(_VARIABLES)},
    }


def counters_of(stats: Any) -> dict[str, int]:
    """Return the counters of an engine for a step."""
    return {name: value for name, value in asdict(stats).items() if isinstance(value, int)}


def core_in_words() -> str:
    return "compiled" if offload_engine.IS_COMPILED else "pure Python"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None
