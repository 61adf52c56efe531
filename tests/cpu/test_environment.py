# SPDX-License-Identifier: Apache-2.0
"""The environment is the one that the run promised: what is silently missing must not pass for tested."""

from __future__ import annotations

import importlib.util
import os
from importlib import metadata
from pathlib import Path
from unittest import mock

import pytest

from offload_engine import IS_COMPILED
from offload_engine._compat import te_base

ROOT = Path(__file__).parents[2]


def test_transformer_engine_is_the_base_where_it_is_there_or_the_run_promised_it() -> None:
    promised = "OFFLOAD_TESTS_EXPECT_TE" in os.environ
    names = {found.name.replace("_", "-") for found in metadata.distributions()}
    is_there = promised or "transformer-engine" in names
    package = "transformer_engine." if is_there else "offload_engine._compat.te_base"
    assert te_base.HandlerBase.__module__.startswith(package)


def test_the_core_is_compiled_where_the_run_promised_it() -> None:
    """A compiled module hides the source beside it: a run on the checkout must not test what was built of it once."""
    assert IS_COMPILED == ("OFFLOAD_TESTS_EXPECT_COMPILED" in os.environ)


@pytest.mark.skipif("OFFLOAD_TESTS_EXPECT_COMPILED" not in os.environ, reason="this run did not promise compiled code")
def test_every_module_of_the_core_is_compiled() -> None:
    """A module that setup.py has lost would run as before, only slower."""
    spec = importlib.util.spec_from_file_location("_settings_of_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    settings = importlib.util.module_from_spec(spec)
    with mock.patch("setuptools.setup"):
        spec.loader.exec_module(settings)
    sources = [ROOT / path for path in settings.compiled_sources()]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in sources]
    interpreted = [name for name in modules if str(importlib.import_module(name).__file__).endswith(".py")]
    assert not interpreted
