# SPDX-License-Identifier: Apache-2.0
"""The part of tests/dist that CI runs with the oldest megatron-core loses nothing without a word."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import COMPAT

DIST = Path(__file__).parents[1] / "dist"
# Their subject is the engine's own decisions, torch, what a later megatron-core brought, or what other tests cover with
# each version of it.
WITH_ONE_VERSION = {
    f"test_{name}"
    for name in (
        "attachments budget_agreement fsdp gpu_budget megatron_fsdp moves newer_layers optimizer_offload "
        "pipelining plan_command second_step trainer"
    ).split()
}


def test_each_file_has_tests_for_the_oldest_version_or_says_that_it_needs_none() -> None:
    files = {path.stem for path in DIST.glob("test_*.py")}
    assert COMPAT.keys() | WITH_ONE_VERSION == files and not COMPAT.keys() & WITH_ONE_VERSION
