# SPDX-License-Identifier: Apache-2.0
"""Machines by name, from the package's table and from a file of the user."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from offload_engine._observe.chrome_trace import write_trace
from offload_engine.planning.clocks import Link
from offload_engine.planning.hardware import find_hardware
from offload_engine.rehearsal.options import hardware_of, recorded_link
from tests.cpu.test_observe_report import a_step


def test_a_name_with_a_number_is_so_many_gpus_of_a_host() -> None:
    one, eight = find_hardware("h200"), find_hardware("h200x8")
    assert (one.num_gpus, eight.num_gpus) == (1, 8)
    assert (one.gpu_bytes, one.source) == (eight.gpu_bytes, "measured")
    assert find_hardware("a100-80x4").num_gpus == 4  # the number of the name is none of GPUs
    with pytest.raises(ValueError, match=r"'h201x8' is unknown hardware; known are a100-40, .*h200.*--hardware-file"):
        find_hardware("h201x8")


@pytest.mark.parametrize(
    ("num_gpus", "is_both_ways", "link"),
    [
        (1, True, Link(50.7, 50.7)),
        (1, False, Link(55.3, 55.4)),
        (8, True, Link(14.5, 14.5)),
        (4, True, Link(29.0, 29.0)),
        (2, False, Link(55.3, 55.4)),  # no faster than alone
    ],
)
def test_gpus_that_copy_at_once_share_the_host(num_gpus: int, is_both_ways: bool, link: Link) -> None:
    assert find_hardware("h200x8").link(num_gpus, is_both_ways=is_both_ways) == link


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return tmp_path / "mine.toml"


def test_a_users_file_changes_and_adds_machines(table: Path) -> None:
    table.write_text("[h200]\nhost_gib = 500\n")
    assert find_hardware("h200x8", table).host_gib == 500
    assert find_hardware("h200x8", table).gpu_gib == find_hardware("h200").gpu_gib
    rows = Path("offload_engine/planning/hardware.toml").read_text().partition("[h100]")[2].partition("\n[")[0]
    table.write_text(f'["box x2"]\n{rows}')
    assert find_hardware("box x2", table).num_gpus == 1  # a name of the table comes before the number
    assert find_hardware("box x2x4", table).num_gpus == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[h200]\nspeed = 3\n", "hardware h200: speed is not a value of a machine"),
        ("[h201]\ngpu_gib = 3\n", r"hardware h201: \w+ is missing"),
        ("[h200]\ngpu_gib = -1\n", "hardware h200: gpu_gib must be a number above 0, got -1"),
        ("[h200]\nsource = 'guess'\n", "source must be one of measured, datasheet"),
        ("h200 = 3\n", r"h200 must be a machine: \[h200\]"),
        ("[h200\n", "is not a TOML file"),
    ],
)
def test_mistakes_in_a_file(table: Path, text: str, message: str) -> None:
    table.write_text(text)
    with pytest.raises(ValueError, match=message):
        find_hardware("h201" if "h201" in text else "h200", table)


def test_a_recording_says_how_fast_copies_were(tmp_path: Path) -> None:
    """What was measured replaces the link; of both ways at once the slower counts."""
    trace = str(write_trace([a_step(0), a_step(1)], tmp_path / "trace.json"))
    link = recorded_link([trace])
    assert link == pytest.approx(Link(6.0, 2.0))  # out 12 MB in two milliseconds, in 4 MB in as long
    hardware = hardware_of("h100x8", None, [trace])
    assert hardware.link(8, is_both_ways=False) == link
    assert hardware.link(8, is_both_ways=True) == Link(link.in_gbps, link.in_gbps)
    empty = write_trace(replace(a_step(), copies=()), tmp_path / "empty.json")
    with pytest.raises(ValueError, match="empty.json: no copies out are recorded"):
        recorded_link([str(empty)])
