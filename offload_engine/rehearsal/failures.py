# SPDX-License-Identifier: Apache-2.0
"""`RehearsalError`: says in one line why a rehearsal failed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

_ADVICE = "Omit what needs it, or measure a step on a GPU with --offload-dry-run (OffloadConfig(dry_run=True))."


class RehearsalError(Exception):
    """Raised when a rehearsal fails; the message is one line."""


@contextlib.contextmanager
def rehearsing(what: str) -> Iterator[None]:
    """Return a context manager that names what is rehearsed if it fails, because code reads contents or needs a GPU.

    Raises:
        RehearsalError: instead of a RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__  # no frames of C++
        raise RehearsalError(f"{what} cannot be rehearsed: {reason}. {_ADVICE}") from error
