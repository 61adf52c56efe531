# SPDX-License-Identifier: Apache-2.0
"""Runs an example with deterministic algorithms: torchrun -m tests.gpu.run_example NAME OPTIONS..."""

from __future__ import annotations

import io
import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from unittest.mock import patch

from tests.cpu.test_examples import EXAMPLES
from tests.gpu.parity import deterministic_algorithms


def run_example(arguments: Sequence[str]) -> str:
    """Return what `python examples/NAME OPTIONS...` prints.

    Args:
        arguments: the name and the options.
    """
    program, printed = [str(EXAMPLES / arguments[0]), *arguments[1:]], io.StringIO()
    with deterministic_algorithms(), redirect_stdout(printed), patch.object(sys, "argv", program):
        runpy.run_path(program[0], run_name="__main__")
    return printed.getvalue()


if __name__ == "__main__":
    print(run_example(sys.argv[1:]))
