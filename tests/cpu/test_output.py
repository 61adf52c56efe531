# SPDX-License-Identifier: Apache-2.0
"""Commands whose reader leaves early, as `head` does."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest

from megatron_patches import __main__ as launcher
from offload_engine.output import write_out


@pytest.mark.parametrize(
    "command",
    [lambda: write_out("a line\n"), lambda: launcher.main(["--list-modules"])],
    ids=["a line", "more than the buffer takes"],
)
def test_a_command_without_a_reader_ends_without_an_error(
    command: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:  # its end flushes once more, as that of Python does
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as ended:
            command()
    assert ended.value.code == 128 + signal.SIGPIPE
