# SPDX-License-Identifier: Apache-2.0
"""Captures what `megatron_patches` logs in a rank, where pytest sees nothing."""

from __future__ import annotations

import logging


def messages() -> list[str]:
    """Get every message from now on, until the process ends."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron_patches").addHandler(handler)
    return records
