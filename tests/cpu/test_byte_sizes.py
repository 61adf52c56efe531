# SPDX-License-Identifier: Apache-2.0
"""Sizes as people type them."""

from __future__ import annotations

import argparse
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_engine.sizes import Size, bytes_flag, parse_bytes, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        *((text, 60 << 30) for text in ("60GiB", "60G", "60 g", "60gib")),
        ("60GB", 60_000_000_000),
        ("1.5 GB", 1_500_000_000),
        (".5k", 512),
        ("1.3KiB", 1331),
        ("2T", 2 << 40),
        ("1P", 1 << 50),
        (" 1_048_576 ", 1 << 20),
        ("7B", 7),
        ("7.0", 7),
        ("0", 0),
    ],
)
def test_bytes(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes
    assert parse_size(text) == Size(nbytes)


@pytest.mark.parametrize(
    ("text", "percent"), [("90%", "90"), ("12.5 %", "12.5"), ("100%", "100"), ("0.001%", "0.001"), ("auto", None)]
)
def test_what_depends_on_how_much_there_is(text: str, percent: str | None) -> None:
    assert parse_size(text) == Size(percent=None if percent is None else Decimal(percent))
    with pytest.raises(ValueError, match="depends on a total, and there is none here: give a number of"):
        parse_bytes(text)


NO_SIZES = ("60g b", "nan", "inf", "", "%", "GiB", "1e6", "1,5 GB", "60 GiBytes", "٣GiB", "automatic")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, f"{text!r} is not a size: give a number of bytes") for text in NO_SIZES),
        *((text, f"{text!r} is negative") for text in ("-3GiB", "-1", "-5%")),
        ("0%", "'0%' is not a share: give more than 0% and at most 100%"),
        ("120%", "'120%' is not a share"),
        ("1.5", "'1.5' is not a whole number of bytes"),
    ],
)
def test_errors_name_what_was_given_and_what_is_accepted(text: str, message: str) -> None:
    with pytest.raises(ValueError) as error:
        parse_size(text)
    told = str(error.value)
    assert told.startswith(message) and "give" in told and "\n" not in told
    if "share:" not in told and "whole" not in told:
        assert told.endswith("(512MiB, 60GiB, 60G, 1.5 GB), a share (90%), or auto")


def test_flags_say_it_as_argparse_does(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=bytes_flag("MiB"))
    sizes = [parser.parse_args(["--size", text]).size for text in ("3", "1.5", "2GiB", "8B")]
    assert sizes == [3 << 20, 3 << 19, 2 << 30, 8]
    with pytest.raises(SystemExit):
        parser.parse_args(["--size", "3 x"])
    told = "argument --size: '3 x' is not a size: give a number of MiB (2), or one with a unit (512MiB, 60GiB, 60G, 1.5"
    assert told in capsys.readouterr().err


def test_sizes_are_resolved_where_the_total_is_known() -> None:
    total = 80 << 30
    assert parse_size("100GiB").resolve(total, 5) == 100 << 30
    assert parse_size("90%").resolve(total, 5) == total * 9 // 10
    assert parse_size("33.3%").resolve(1000) == 333
    assert parse_size("auto").resolve(total, 5) == total - 5
    assert parse_size("auto").resolve(3, 5) == 0


@given(st.integers(0, 1 << 60) | st.builds(lambda n, power: n << 10 * power, st.integers(0, 4096), st.integers(0, 5)))
def test_the_text_of_a_size_is_that_size(nbytes: int) -> None:
    assert parse_size(str(Size(nbytes))) == Size(nbytes)
    assert parse_bytes(str(Size(nbytes))) == nbytes


@given(st.decimals("0.0001", "100", places=4))
def test_the_text_of_a_share_is_that_share(percent: Decimal) -> None:
    assert parse_size(str(Size(percent=percent))) == Size(percent=percent)
