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
        "adversarial_device affinity bench_frontends bench_gpu bench_recipes budget_corrections budget_curve "
        "budget_hold byte_sizes compat config device_choice ended_processes examples frontend_examples "
        "hardware host_memory imports mutation_check node_share observe_labels observe_observer observe_report "
        "observe_trace output package pinned plan plan_command planner prepare_text rank_reports readme show_plan "
        "simulate sizes smp soak slurm_script tools verifier other_trainers mistakes_of_flags"
    ).split()
}
# The tests of tests/dist whose subject differs by versions of megatron-core, by the beginnings of their names: its
# modules, nodes, schedules, recomputation, dispatchers, settings, and what it holds. CI runs them with the oldest
# version as well, and tools/nightly.sh all others.
COMPAT = {
    "test_bad_input": ("test_a_setting", "test_fused", "test_refused"),
    "test_bypass": ("test_linear", "test_modules", "test_of_other", "test_one_that", "test_w"),
    "test_captures": ("test_named", "test_steps_are_captured_with_their_copies[alone"),
    "test_dispatch": (
        "test_flex_dispatcher[alone",
        "test_storages_held_by_the_schedule_are_emptied[Pipeline(size=2",
    ),
    "test_inputs": ("test_embeddings_without", "test_it_leaves", "test_more_than", "test_stage_inputs"),
    "test_launcher": (
        "test_every_row",
        "test_list_modules",
        "test_other_code",
        "test_runs_a_script",
        "test_what_would",
    ),
    "test_other_code": ("test_under_the_overlap", "test_without_other_code"),
    "test_parity": (
        "test_discarded",
        "test_distributed_optimizer",
        *(
            f"test_steps_are_those_without_offload[{row}"
            for row in (
                *("bare", "interleaved", "names", "selective", "full", "tensor"),
                *("overlap in", "overlap, recomputation"),
            )
        ),
    ),
    "test_recompute_switches": (
        "test_steps_are_the_same_whatever",
        "test_what_is_not_safe",
        "test_everything_is_put_back",
    ),
    "test_rehearsal": ("test_groups_are_those_of_a_real_step",),
    "test_take_over": ("",),
    "test_weights": ("test_a_parameter", "test_between", "test_every_weight"),
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
    if config.option.markexpr == "compat":
        _refuse_unmatched(items)
    for item in items:
        path = item.path.relative_to(tests)
        folder = path.parts[0]
        if folder == "cpu" and path.stem in ONCE:
            item.add_marker(pytest.mark.once)
        if folder == "dist" and item.name.startswith(COMPAT.get(path.stem, ())):
            item.add_marker(pytest.mark.compat)
        if folder in MARKER_OF_FOLDER:
            item.add_marker(MARKER_OF_FOLDER[folder])
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False"))
        if item.get_closest_marker("dist") and not torch.distributed.is_available():
            item.add_marker(pytest.mark.skip(reason="this torch was built without torch.distributed"))


def _refuse_unmatched(items: list[pytest.Item]) -> None:
    """Hold that a test that was renamed is not lost."""
    names = [(item.path.stem, item.name) for item in items]
    for file, beginnings in COMPAT.items():
        for beginning in beginnings:
            if not any(stem == file and name.startswith(beginning) for stem, name in names):
                raise pytest.UsageError(f"COMPAT: no test in {file} begins with {beginning!r}")


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
