# SPDX-License-Identifier: Apache-2.0
"""All of this folder needs megatron-core."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("megatron") else ["test_*.py"]
