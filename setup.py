# SPDX-License-Identifier: Apache-2.0
"""The compiled core. What the package is and needs is in pyproject.toml, tested versions are in constraints-*.txt."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

COMPILE = "OFFLOAD_ENGINE_COMPILE"  # in the environment, "1" asks for the compiled core
OPTIMIZE = "OFFLOAD_ENGINE_OPTIMIZE"  # level for the C compiler, "2" by default: "0" builds in half the time, for tests
IN_PLACE = (
    f"{COMPILE}=1 asks for compiled modules beside the source, in the checkout: they would hide it, and every later "
    "edit. Install without --editable, or into another folder (pip install --target)."
)
CORE = Path("offload_engine")
# What runs for each saved tensor and each group, and what plans a step. A module that is missing here stays
# interpreted, with every test green and the host time of a group or of a plan doubled: so their number is stated too,
# and held by a test of the compiled core.
COMPILED_FOLDERS = ("_chunk", "_host", "_policy", "_saved")
ALSO_COMPILED = (
    "_captured/replays.py",
    "_compat/build.py",
    "_compat/tensor_reads.py",
    "_devices/cuda_routine.py",
    "_devices/cuda_runtime.py",
    "_devices/regions.py",
    "functions.py",
    "group_boundaries.py",
    "meter.py",
    "planning/allocations.py",
    "planning/budget.py",
    "planning/by_name.py",
    "planning/choices.py",
    "planning/chosen.py",
    "planning/clocks.py",
    "planning/copy_ins.py",
    "planning/fitted.py",
    "planning/host_bytes.py",
    "planning/memory.py",
    "planning/moves.py",
    "planning/other_bytes.py",
    "planning/performed.py",
    "planning/pipeline.py",
    "planning/plan.py",
    "planning/planner.py",
    "planning/predict.py",
    "planning/recompute.py",
    "planning/reduced.py",
    "planning/releases.py",
    "planning/replay.py",
    "planning/residents.py",
    "planning/segments.py",
    "planning/shapes.py",
    "planning/shortened.py",
    "planning/simulate.py",
    "planning/simulated.py",
    "planning/slowed.py",
    "planning/steps.py",
    "planning/worth.py",
    "stats.py",
    "tracker.py",
)
NUM_COMPILED = 78
IN_C = ("_compat/_tensor_reads", "_devices/_cuda_calls")


def compiled_sources() -> list[Path]:
    """Return the files that become machine code.

    Raises:
        SystemExit: if there are more or fewer than `NUM_COMPILED`.
    """
    folders = [path for name in COMPILED_FOLDERS for path in (CORE / name).glob("*.py") if path.stem != "__init__"]
    paths = sorted([*folders, *(CORE / name for name in ALSO_COMPILED)])
    if len(paths) != NUM_COMPILED:
        found = ", ".join(map(str, paths))
        raise SystemExit(f"setup.py: {len(paths)} modules to compile, expected {NUM_COMPILED}: {found}")
    return paths


def compiled_modules() -> list[Extension]:
    """Return the core, made from its Python source, and the modules in C; torch and all else is opaque to both."""
    try:
        from mypyc.build import mypycify
    except ImportError as error:
        raise SystemExit(
            f"{COMPILE}=1 without build isolation needs mypyc: pip install 'mypy[mypyc]' ({error})"
        ) from error
    paths = compiled_sources()
    arguments = ["--config-file=", "--follow-imports=skip", "--ignore-missing-imports", "--no-warn-unused-ignores"]
    level = os.environ.get(OPTIMIZE, "2")
    modules: list[Extension] = mypycify([*arguments, *map(str, paths)], opt_level=level, group_name="offload_engine")
    in_c = (f"{CORE}/{name}" for name in IN_C)
    flags = ["-pthread"]
    return [
        *modules,
        *(
            Extension(name.replace("/", "."), [f"{name}.c"], extra_compile_args=flags, extra_link_args=flags)
            for name in in_c
        ),
    ]


class BuildCompiled(build_ext):
    """Builds elsewhere than in the checkout, and says what to do without a compiler."""

    def run(self) -> None:
        if self.inplace:
            raise SystemExit(IN_PLACE)
        try:
            super().run()
        except (BaseError, CCompilerError) as error:
            raise SystemExit(
                f"the core could not be compiled: {error}. {COMPILE}=1 needs a C compiler and Python's headers "
                "(Debian: apt-get install gcc python3-dev). Without it the package is pure Python, and does the same."
            ) from error


def is_compiling() -> bool:
    """Return whether to compile: only in commands that build, as others need not have a compiler."""
    asked = os.environ.get(COMPILE, "0")
    if asked not in ("0", "1"):
        raise SystemExit(f"{COMPILE} must be 0 or 1, got {asked!r}")
    if asked == "1" and "editable_wheel" in sys.argv:
        raise SystemExit(IN_PLACE)
    return asked == "1" and not {"build", "build_ext", "bdist_wheel"}.isdisjoint(sys.argv)


setup(
    ext_modules=compiled_modules() if is_compiling() else [],
    cmdclass={"build_ext": BuildCompiled},
)
