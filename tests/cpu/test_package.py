# SPDX-License-Identifier: Apache-2.0
"""The package: what its metadata says, and that a wheel holds what is in the checkout and nothing else."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import offload_engine

ROOT = Path(__file__).parents[2]
if not (ROOT / "pyproject.toml").exists():
    pytest.skip("the copy for the compiled core has no pyproject.toml", allow_module_level=True)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Modules that are there because something else is: a front-end is imported by those who have the library.
OPTIONAL = {"megatron", "transformer_engine", "transformers", "lightning", "pytorch_lightning", "matplotlib", "mypyc"}


def test_every_source_says_its_licence() -> None:
    folders = ("offload_engine", "megatron_patches", "tests", "tools", "benchmarks", "examples")
    sources = [path for folder in folders for ext in ("py", "sh", "c") for path in (ROOT / folder).rglob(f"*.{ext}")]
    texts = {path: path.read_text() for path in (*sources, ROOT / "setup.py")}
    silent = [path for path, text in texts.items() if text and "SPDX-License-Identifier: Apache-2.0\n" not in text[:80]]
    assert len(texts) > 400 and not silent


def imported(package: str) -> Iterator[str]:
    for path in (ROOT / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0]


@pytest.mark.parametrize("package", ["offload_engine", "megatron_patches"])
def test_what_is_imported_is_required(package: str) -> None:
    required = {re.split(r"[>=<\[]", text)[0].replace("-", "_") for text in PROJECT["dependencies"]}
    own = {"offload_engine", "megatron_patches", *sys.stdlib_module_names}
    assert set(imported(package)) - own - OPTIONAL <= required
    assert (ROOT / package / "py.typed").exists()


def test_a_wheel_holds_what_is_there_now(tmp_path: Path) -> None:
    """Also where an earlier build has left a module that has gone since."""
    pytest.importorskip("setuptools", minversion="77")
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("offload_engine", "megatron_patches", "tools", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (shutil.copytree if (ROOT / name).is_dir() else shutil.copy)(ROOT / name, checkout / name)
    left = checkout / "build" / "lib" / "offload_engine" / "gone.py"
    left.parent.mkdir(parents=True)
    left.write_text("")
    code = (
        f"import sys; sys.path.insert(0, 'tools'); import build_backend as b; print(b.build_wheel({str(tmp_path)!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    with zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]) as wheel:
        names = set(wheel.namelist())
        metadata = wheel.read(f"offload_engine-{offload_engine.__version__}.dist-info/METADATA").decode()
    expected = {path.relative_to(ROOT).as_posix() for package in ("offload_engine", "megatron_patches")
                for path in (ROOT / package).rglob("*.py")}  # fmt: skip
    assert {name for name in names if name.endswith(".py")} == expected
    assert {"offload_engine/py.typed", "megatron_patches/py.typed", "offload_engine/planning/hardware.toml"} <= names
    assert "\n# Offload engine\n" in metadata and "Requires-Dist: packaging" in metadata
