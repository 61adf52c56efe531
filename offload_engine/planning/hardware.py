# SPDX-License-Identifier: Apache-2.0
"""Reads machines from a table in a file: their memory and speeds, by name. No torch here."""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from importlib import resources
from typing import Any, Final

from offload_engine.planning.clocks import Link

_NAME: Final = re.compile(r"(?P<gpu>.+?)(?:x(?P<number>[1-9][0-9]*))?")
_GIB: Final = 1 << 30
_SOURCES: Final = ("measured", "datasheet")
_GPUS_OF_HOST: Final = 8
_MAY_BE_ZERO: Final = ("fp8_tflops",)


@dataclass(frozen=True)
class Hardware:
    """GPUs of one host; `hardware.toml` explains each field.

    Raises:
        ValueError: for a value that is not above zero, or an unknown source.
    """

    name: str
    gpu_gib: float
    bf16_tflops: float
    fp8_tflops: float
    attention_tflops: float
    attention_backward_tflops: float
    sdpa_tflops: float
    sdpa_backward_tflops: float
    memory_gbps: float
    out_gbps: float
    in_gbps: float
    both_gbps: float
    all_out_gbps: float
    all_in_gbps: float
    all_both_gbps: float
    peer_gbps: float
    host_gib: float
    source: str
    num_gpus: int = 1
    speed: float = 1.0
    """How many times as fast kernels are as the rates say."""

    def __post_init__(self) -> None:
        if self.source not in _SOURCES:
            raise ValueError(f"source must be one of {', '.join(_SOURCES)}, got {self.source!r}")
        for name in _NUMBERS:
            value = getattr(self, name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
                raise ValueError(f"{name} must be a number above 0, got {value!r}")

    @property
    def gpu_bytes(self) -> int:
        """Return the memory of a GPU."""
        return int(self.gpu_gib * _GIB)

    @property
    def host_bytes(self) -> int:
        """Return the memory of the host."""
        return int(self.host_gib * _GIB)

    def link(self, num_copying: int, is_both_ways: bool) -> Link:
        """Return the link of one GPU.

        Args:
            num_copying: number of GPUs of a host that copy at once; several share the total bandwidth of eight.
            is_both_ways: copies go out and in at once, as in a pipeline.

        Raises:
            ValueError: if `num_copying` is below 1.
        """
        if num_copying < 1:
            raise ValueError(f"num_copying must be at least 1, got {num_copying}")
        alone = (self.both_gbps, self.both_gbps) if is_both_ways else (self.out_gbps, self.in_gbps)
        shared = (self.all_both_gbps,) * 2 if is_both_ways else (self.all_out_gbps, self.all_in_gbps)
        if num_copying == 1:
            return Link(*alone)
        return Link(*(min(one, all_ * _GPUS_OF_HOST / num_copying) for one, all_ in zip(alone, shared, strict=True)))


_NUMBERS: Final = tuple(field.name for field in fields(Hardware) if field.name not in ("name", "source"))


def find_hardware(name: str, file: str | os.PathLike[str] | None = None) -> Hardware:
    """Find a machine: `h200`, or `h200x8` for eight of these GPUs in one host.

    Args:
        name: name in the table.
        file: a table of the user, whose machines take precedence; it may override single values of a known machine.

    Raises:
        ValueError: for an unknown name, with all names that are known; or a file that is not such a table.
        OSError: if the file cannot be read.
    """
    table = _read_package()
    if file is not None:
        for key, row in _read(file).items():
            table[key] = {**table.get(key, {}), **row}
    if name in table:  # before the number is split off, because a name may end in one
        return _make(name, name, 1, table[name])
    match = _NAME.fullmatch(name)
    gpu, number = (match["gpu"], match["number"]) if match else (name, None)
    if gpu not in table or number is None:
        raise ValueError(
            f"{name!r} is unknown hardware; known are {', '.join(sorted(table))}, each also followed by the number of "
            "GPUs in a host, as in h200x8. Describe another machine in a file: --hardware-file FILE"
        )
    return _make(name, gpu, int(number), table[gpu])


def with_link(hardware: Hardware, link: Link) -> Hardware:
    """Return the machine with a link that was measured there."""
    all_of_it = {name: getattr(link, name.removeprefix("all_")) for name in ("all_out_gbps", "all_in_gbps")}
    both = min(link.out_gbps, link.in_gbps)
    share = hardware.num_gpus / _GPUS_OF_HOST
    return replace(
        hardware,
        out_gbps=link.out_gbps,
        in_gbps=link.in_gbps,
        both_gbps=both,
        all_both_gbps=both * share,
        **{name: gbps * share for name, gbps in all_of_it.items()},
    )


def with_memory(hardware: Hardware, gpu_bytes: int) -> Hardware:
    """Return the machine with GPUs of this memory."""
    return replace(hardware, gpu_gib=gpu_bytes / _GIB)


def with_speed(hardware: Hardware, ratio: float) -> Hardware:
    """Return the machine with kernels that are this many times as fast as its rates say."""
    return replace(hardware, speed=ratio)


def _read_package() -> dict[str, dict[str, Any]]:
    text = resources.files("offload_engine.planning").joinpath("hardware.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def _read(file: str | os.PathLike[str]) -> dict[str, dict[str, Any]]:
    try:
        with open(file, "rb") as opened:
            table = tomllib.load(opened)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{os.fspath(file)} is not a TOML file: {error}") from None
    for name, row in table.items():
        if not isinstance(row, dict):
            raise ValueError(f"{os.fspath(file)}: {name} must be a machine: [{name}], then a line for each value")
    return table


def _make(name: str, gpu: str, num_gpus: int, row: Mapping[str, Any]) -> Hardware:
    known = {field.name for field in fields(Hardware)} - {"name", "num_gpus", "speed"}
    if unknown := sorted(row.keys() - known):
        raise ValueError(
            f"hardware {gpu}: {unknown[0]} is not a value of a machine; those are {', '.join(sorted(known))}"
        )
    if missing := sorted(known - row.keys()):
        raise ValueError(f"hardware {gpu}: {missing[0]} is missing; a new machine needs {', '.join(sorted(known))}")
    try:
        return Hardware(name=name, num_gpus=num_gpus, **row)
    except ValueError as error:
        raise ValueError(f"hardware {gpu}: {error}") from None
