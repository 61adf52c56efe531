"""The environment is the one that the run promised: what is silently missing must not pass for tested."""

from __future__ import annotations

import os
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

import pytest

from offload_engine import IS_COMPILED, _te_base


@pytest.mark.skipif("OFFLOAD_TESTS_EXPECT_TE" not in os.environ, reason="this run did not promise TransformerEngine")
def test_transformer_engine_is_the_base() -> None:
    assert _te_base.USES_TRANSFORMER_ENGINE
    assert _te_base.HandlerBase.__module__.startswith("transformer_engine.")


def test_without_transformer_engine_our_own_class_is_the_base() -> None:
    try:
        metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        assert not _te_base.USES_TRANSFORMER_ENGINE
        assert _te_base.HandlerBase.__module__ == "offload_engine._te_base"
    else:
        pytest.skip("TransformerEngine is installed")


def test_the_core_is_compiled_where_the_run_promised_it() -> None:
    """A compiled module hides the source beside it: a run on the checkout must not test what was built of it once."""
    assert IS_COMPILED == ("OFFLOAD_TESTS_EXPECT_COMPILED" in os.environ)


def test_no_folder_of_tests_is_passed_over(pytestconfig: pytest.Config) -> None:
    """By default pytest does not look into folders of some names, "dist" among them."""
    tests = Path(__file__).parents[1]
    folders = {folder.name for file in tests.rglob("test_*.py") for folder in file.relative_to(tests).parents} - {""}
    assert {"cpu", "dist", "gpu"} <= folders
    patterns = pytestconfig.getini("norecursedirs")
    assert not [folder for folder in folders if any(fnmatch(folder, pattern) for pattern in patterns)]
