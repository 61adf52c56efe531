# SPDX-License-Identifier: Apache-2.0
"""`write_out`: writes the answer of a command to standard output, whose reader may leave early, as `head` does."""

from __future__ import annotations

import os
import signal
import sys


def write_out(text: str) -> None:
    """Write `text` to standard output at once.

    Raises:
        SystemExit: if its reader has left, with the status by which a shell reports that.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it exits, and would report the same error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
