# SPDX-License-Identifier: Apache-2.0
"""The launcher ends offload behind its script: the last plan is written, no patch is left, errors are the script's."""

from __future__ import annotations

import logging
import sys
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest

pytest.importorskip("megatron.core")

from tests.dist.launch import run_ranks  # noqa: E402

SCRIPT = """
import sys
from tests.dist.launch import Group, Pipeline, set_up_groups
from tests.dist.tiny import make_chunks, make_config, run

set_up_groups(Group(0, 1, "file://" + sys.argv[1] + "/store", Pipeline()), Pipeline())


def pretrain():
    chunks = make_chunks(make_config())
    for _ in range(int(sys.argv[2])):
        run(chunks, 2)


pretrain()
if "fail" in sys.argv:
    raise ZeroDivisionError("of the script")
"""


def test_last_tables_and_plans_are_written(tmp_path: Path) -> None:
    """Also where the model was freed with the function that trained it."""
    (logged,) = run_ranks(_launch, _write(tmp_path), pipeline=None)
    assert logged.count("the last plan") == 1
    assert any("activation offload in the second step" in line for line in logged)


@pytest.mark.parametrize("removal", ["works", "fails"])
def test_an_error_of_the_script_is_not_hidden(removal: str, tmp_path: Path) -> None:
    run_ranks(_check_error, removal, _write(tmp_path), pipeline=None)


def _write(tmp_path: Path) -> list[str]:
    script = tmp_path / "pretrain.py"
    script.write_text(SCRIPT)
    return ["--offload-activation", "--offload-min-tensor-bytes", "1", str(script), str(tmp_path)]


def _launch(argv: list[str]) -> list[str]:
    from megatron_patches.__main__ import main
    from megatron_patches._plan_files import PlanFiles

    lines: list[str] = []
    logger = logging.getLogger("megatron_patches")
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    sys.argv = ["megatron_patches", *argv, "2"]
    with mock.patch.object(PlanFiles, "close", side_effect=lambda engine: lines.append("the last plan")):
        main()
    _check_unpatched()
    return lines


def _check_error(removal: str, argv: list[str]) -> None:
    from megatron_patches.__main__ import main
    from megatron_patches._runtime import ModelRuntime

    sys.argv = ["megatron_patches", *argv, "1", "fail"]
    failure = mock.patch.object(ModelRuntime, "close", side_effect=RuntimeError("of the removal"))
    with failure if removal == "fails" else nullcontext(), pytest.raises(ZeroDivisionError, match="of the script"):
        main()
    if removal == "works":
        _check_unpatched()


def _check_unpatched() -> None:
    """Patches can be applied anew only where none is in force."""
    from megatron_patches import apply, apply_cpu_support

    with apply(), apply_cpu_support():
        pass
