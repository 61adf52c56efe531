# SPDX-License-Identifier: Apache-2.0
"""Fixtures and skip rules of every test."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from importlib import metadata
from pathlib import Path

import pytest
import torch

# Markers that a folder gives to all of its tests.
MARKER_OF_FOLDER = {"gpu": pytest.mark.gpu, "dist": pytest.mark.dist}
# Files of tests/cpu that test no compiled module, and nothing that differs by versions of Python: examples, documents,
# tools, and what the engine decides whatever is below it. CI runs them once.
ONCE = {
    f"test_{name}"
    for name in (
        "adversarial_device affinity bench_frontends budget_corrections choose config "
        "ended_processes examples host_memory imports node_share observe_report package "
        "plan_command planner readme replay simulate sizes smp soak tools verifier other_trainers"
    ).split()
}


def pytest_report_header() -> str:
    """List the versions that decide what these tests prove."""
    packages = ("torch", "megatron-core", "transformer-engine")
    return "offload: " + ", ".join(f"{name} {_installed_version(name)}" for name in packages)


def _installed_version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by folder, and skip what this machine cannot run, saying why."""
    tests = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(tests)
        folder = path.parts[0]
        if folder == "cpu" and path.stem in ONCE:
            item.add_marker(pytest.mark.once)
        if folder in MARKER_OF_FOLDER:
            item.add_marker(MARKER_OF_FOLDER[folder])
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False"))
        if item.get_closest_marker("dist") and not torch.distributed.is_available():
            item.add_marker(pytest.mark.skip(reason="this torch was built without torch.distributed"))


@pytest.fixture(scope="session", autouse=True)
def imported_objects_frozen() -> None:
    """Hide the objects that imports made from the collector, so that a collection between tests is cheap."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def gc_off() -> Iterator[None]:
    """Turn the collector off within a test: a reference cycle shows as memory that stays."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed the same random numbers in every test, whatever ran before it."""
    value = 1234
    random.seed(value)
    torch.manual_seed(value)
    return value


def _live_tensors() -> dict[int, torch.Tensor]:
    # type(), not isinstance: asking some objects for __class__ runs their code.
    return {id(o): o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)}


@pytest.fixture
def no_tensor_left(gc_off: None) -> Callable[[], AbstractContextManager[None]]:
    """Fail if a tensor made inside the block is still alive at its end; the collector stays off."""

    @contextmanager
    def check() -> Iterator[None]:
        before = _live_tensors()
        yield
        left = [t for key, t in _live_tensors().items() if before.get(key) is not t]
        shapes = [f"{tuple(t.shape)} {t.dtype}" for t in left]
        assert not left, f"{len(left)} tensors are still alive: {shapes[:10]}"

    return check
