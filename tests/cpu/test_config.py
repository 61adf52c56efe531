# SPDX-License-Identifier: Apache-2.0
"""OffloadConfig: accepted values and the errors for others; the device of an engine; sizes as people type them."""

from __future__ import annotations

import dataclasses
import re
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from offload_engine import FixedBounds, OffloadEngine, Planned
from offload_engine._budget.margin import budget_bytes
from offload_engine._devices import CpuDevice
from offload_engine.config import MIB, OffloadConfig
from offload_engine.frontends._common.device import _compute_devices, device_for
from offload_engine.policies import ResidentBudget
from offload_engine.sizes import Size, fine_size, parse_bytes, parse_size, short_size


@pytest.mark.parametrize(
    ("error", "message", "settings"),
    [
        (ValueError, "min_tensor_bytes must not be negative, got -1", {"min_tensor_bytes": -1}),
        (ValueError, "host_limit_bytes must not be negative, got -8", {"host_limit_bytes": -8}),
        *(
            (TypeError, f"{name} must be an integer number of bytes", {name: value})
            for name in ("min_tensor_bytes", "host_limit_bytes", "gpu_budget")
            for value in (1.5, 1e6, True)
        ),
        *(
            (
                TypeError,
                "must be an integer number of bytes, such as 60 << 30, or use OffloadConfig.from",
                {name: "1MiB"},
            )
            for name in ("min_tensor_bytes", "host_limit_bytes")
        ),
        (ValueError, "gpu_budget: 'much' is not a size", {"gpu_budget": "much"}),
        (ValueError, "gpu_budget: '0%'", {"gpu_budget": "0%"}),
        (ValueError, "host_policy must be one of keep, error, got 'spill'", {"host_policy": "spill"}),
        (ValueError, "more than any storage has: nothing could ever be off", {"min_tensor_bytes": 2**70}),
        (ValueError, "nothing could ever be offloaded. Raise the limit or lower", {"host_limit_bytes": MIB - 1}),
        (TypeError, "directory must be a path, 'none' or None, got 3", {"directory": 3}),
        *((TypeError, "policy must be an object such as", {"policy": wrong}) for wrong in ("lowest peak", Planned, 3)),
        (TypeError, "dry_run must be True or False, got 'false'", {"dry_run": "false"}),
        (ValueError, "gpu_budget must not be negative", {"gpu_budget": -1}),
        (ValueError, "dry_run moves nothing: omit one", {"gpu_budget": 1, "dry_run": True}),
        (ValueError, "recompute must be one of auto, off, got 'on'", {"recompute": "on"}),
        *(
            (ValueError, f"^gpu_budget={budget!r} and policy={re.escape(repr(policy))} both decide what", settings)
            for budget, policy in (
                *((1, ResidentBudget(5)), (1, FixedBounds(horizon_bytes=5)), (1, Planned(resident_bytes=5))),
                ("auto", ResidentBudget(5)),
            )
            for settings in [{"gpu_budget": budget, "policy": policy}]
        ),
    ],
)
def test_bad_values_are_refused(error: type[Exception], message: str, settings: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        OffloadConfig(**settings)
    with pytest.raises(error, match=message):
        OffloadConfig().replace(**settings)


def test_values_at_the_limits_and_defaults() -> None:
    config = OffloadConfig()
    assert (config.min_tensor_bytes, config.host_limit_bytes, config.directory) == (MIB, None, None)
    assert OffloadConfig(min_tensor_bytes=2**40).replace(host_limit_bytes=2**40).min_tensor_bytes == 2**40
    assert OffloadConfig(min_tensor_bytes=0, host_limit_bytes=0, directory="/there").directory == "/there"
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.min_tensor_bytes = 1  # type: ignore[misc]


def test_sizes_of_a_command_line_are_taken_as_people_type_them() -> None:
    config = OffloadConfig.from_flags(min_tensor_bytes="64KiB", host_limit_bytes="1.5 GB", resident_bytes="2g")
    policy = ResidentBudget(2 << 30)
    assert config == OffloadConfig(min_tensor_bytes=65536, host_limit_bytes=1_500_000_000, policy=policy)
    for text, message in (("x", "'x' is not a size"), ("50%", "'50%' is not a number of bytes")):
        with pytest.raises(ValueError, match=f"^min_tensor_bytes: {message}"):
            OffloadConfig.from_flags(min_tensor_bytes=text)


def test_sizes_are_printed_in_the_largest_unit_that_they_reach() -> None:
    sizes = (12 << 30) + (2 << 28), 383 << 20, 5 << 19, 12 << 10, 1, 0
    assert [*map(short_size, sizes)] == ["12.50 GiB", "383 MiB", "2 MiB", "12 KiB", "1 byte", "0 bytes"]
    assert [*map(fine_size, sizes)] == ["12.50 GiB", "383.00 MiB", "2.50 MiB", "12.00 KiB", "1 byte", "0 bytes"]


def test_a_budget_may_be_text_and_stays_text_where_it_depends_on_a_gpu() -> None:
    texts = {"60GiB": 60 << 30, "60G": 60 << 30, "1.5 GB": 1_500_000_000, "512": 512, "90%": "90%", " Auto ": "auto"}
    for text, expected in texts.items():
        assert OffloadConfig(gpu_budget=text).gpu_budget == expected, text
        assert OffloadConfig.from_flags(gpu_budget=text) == OffloadConfig(gpu_budget=expected), text


def test_a_budget_is_a_share_of_the_gpu_and_not_above_it() -> None:
    gpu, none = (mock.Mock(**{"total_bytes.return_value": total}) for total in (1000, 0))
    assert [budget_bytes(size, gpu) for size in (0, 1000, "50%", "100%", "auto")] == [0, 1000, 500, 1000, None]
    assert budget_bytes(1001, none) == 1001
    with pytest.raises(
        ValueError, match="^gpu_budget 1001B is above the 1,000 bytes of the GPU: lower it, or give auto"
    ):
        budget_bytes(1001, gpu)
    for size in ("50%", "auto"):
        with pytest.raises(ValueError, match=f"^gpu_budget {size} depends on the memory of a GPU, and there is none"):
            OffloadEngine(OffloadConfig(gpu_budget=size, directory="none"), CpuDevice("none"))


# -- the device of an engine ------------------------------------------------------------------------------------------

PLAIN = OffloadConfig(directory="none")


def test_a_model_on_the_cpu_stays_there_and_without_weights_the_engine_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    model = nn.BatchNorm1d(2)
    choices: tuple[list[nn.Module | torch.Tensor], ...] = ([model], [*model.parameters()], [model, torch.ones(2)])
    for parts in choices:
        device = device_for(parts, PLAIN)
        assert isinstance(device, CpuDevice)
        device.close()
    assert device_for([], PLAIN) is None
    assert device_for([nn.ReLU(), torch.ones(2, device="meta")], PLAIN) is None
    for wrong in ("cuda", 0, torch.device("cpu")):
        with pytest.raises(TypeError, match="torch.device. Omit it"):
            OffloadEngine(PLAIN, wrong)  # type: ignore[arg-type]


def test_model_with_weights_sharded_on_the_cpu_computes_elsewhere() -> None:
    gpu = torch.device("cuda", 1)
    wrapped: Any = nn.Sequential(nn.Linear(2, 2))
    wrapped[0].compute_device = gpu  # as FullyShardedDataParallel has it
    assert list(_compute_devices(wrapped)) == [gpu]
    weight: Any = nn.Parameter(torch.ones(2))
    for kind, device in (("cuda", torch.device("cuda")), ("cpu", torch.device("cpu"))):
        weight.device_mesh = SimpleNamespace(device_type=kind)  # as a DTensor has it
        assert list(_compute_devices(weight)) == [device]


# -- sizes as people type them ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "nbytes"),
    [
        ("60GiB/60G/60 g/60gib", 60 << 30),
        ("60GB", 60_000_000_000),
        ("1.5 GB", 1_500_000_000),
        (".5k/512", 512),
        ("1.3KiB", 1331),
        ("1P/1024T", 1 << 50),
        (" 1_048_576 ", 1 << 20),
        ("7B/7.0", 7),
        ("0", 0),
    ],
)
def test_bytes(texts: str, nbytes: int) -> None:
    for text in texts.split("/"):
        assert parse_bytes(text) == nbytes and parse_size(text) == Size(nbytes)


def test_what_depends_on_how_much_there_is() -> None:
    total = 80 << 30
    for text, percent, nbytes in (
        ("90%", "90", total * 9 // 10),
        ("12.5 %", "12.5", total // 8),
        ("auto", None, total - 5),
    ):
        assert parse_size(text) == Size(percent=None if percent is None else Decimal(percent))
        assert parse_size(text).resolve(total, 5) == nbytes
        with pytest.raises(
            ValueError, match="is not a number of bytes, and only gpu_budget may be a share or auto: give a number of"
        ):
            parse_bytes(text)
    assert parse_size("auto").resolve(3, 5) == 0 and parse_size("100GiB").resolve(total, 5) == 100 << 30


NO_SIZES = ("60g b", "nan", "inf", "", "%", "GiB", "1e6", "1,5 GB", "60 GiBytes", "٣GiB", "automatic")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, "is not a size: give a number of bytes") for text in NO_SIZES),
        *((text, "is negative") for text in ("-3GiB", "-1", "-5%")),
        *((text, "is not a share: give more than 0% and at most 100%") for text in ("0%", "120%")),
        ("1.5", "is not a whole number of bytes"),
    ],
)
def test_errors_name_what_was_given_and_what_is_accepted(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_size(text)
    assert str(error.value).startswith(f"{text!r} {message}") and "give" in str(error.value)


WHOLE = st.integers(0, 1 << 60) | st.builds(lambda n, power: n << 10 * power, st.integers(0, 4096), st.integers(0, 5))
SHARES = st.decimals("0.0001", "100", places=4)


@settings(deadline=None)  # a loaded machine takes long
@given(st.builds(lambda nbytes: Size(nbytes), WHOLE) | st.builds(lambda percent: Size(percent=percent), SHARES))
def test_the_text_of_a_size_is_that_size(size: Size) -> None:
    assert parse_size(str(size)) == size
