# SPDX-License-Identifier: Apache-2.0
"""`RehearsalError`: a rehearsal that broke off, in one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_ADVICE = "Leave out what asks for it, or measure a step on a GPU with --offload-dry-run (OffloadConfig(dry_run=True))."


class RehearsalError(Exception):
    """Raised where a rehearsal breaks off; the message is one line."""


@contextlib.contextmanager
def rehearsing(what: str) -> Iterator[None]:
    """Name what is rehearsed inside where it breaks off, as where code reads contents, or asks for a GPU.

    Raises:
        RehearsalError: in place of a RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__  # no frames of C++
        raise RehearsalError(f"{what} cannot be rehearsed: {reason}. {_ADVICE}") from error
