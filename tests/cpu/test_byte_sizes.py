# SPDX-License-Identifier: Apache-2.0
"""Sizes as people type them."""

from __future__ import annotations

import argparse
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload_engine.sizes import Size, bytes_flag, parse_bytes, parse_size


def test_bytes() -> None:
    for texts, nbytes in (
        (("60GiB", "60G", "60 g", "60gib"), 60 << 30),
        (("60GB",), 60_000_000_000),
        (("1.5 GB",), 1_500_000_000),
        ((".5k",), 512),
        (("1.3KiB",), 1331),
        (("2T",), 2 << 40),
        (("1P",), 1 << 50),
        ((" 1_048_576 ",), 1 << 20),
        (("7B", "7.0"), 7),
        (("0",), 0),
    ):
        for text in texts:
            assert parse_bytes(text) == nbytes and parse_size(text) == Size(nbytes)


def test_what_depends_on_how_much_there_is() -> None:
    total = 80 << 30
    for text, percent, nbytes in (
        ("90%", "90", total * 9 // 10),
        ("12.5 %", "12.5", total // 8),
        ("33.3%", "33.3", total * 333 // 1000),
        ("100%", "100", total),
        ("auto", None, total - 5),
    ):
        assert parse_size(text) == Size(percent=None if percent is None else Decimal(percent))
        assert parse_size(text).resolve(total, 5) == nbytes
        with pytest.raises(ValueError, match="depends on a total, and there is none here: give a number of"):
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


def test_flags_say_it_as_argparse_does(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=bytes_flag("MiB"))
    sizes = [parser.parse_args(["--size", text]).size for text in ("3", "1.5", "2GiB", "8B")]
    assert sizes == [3 << 20, 3 << 19, 2 << 30, 8]
    with pytest.raises(SystemExit):
        parser.parse_args(["--size", "3 x"])
    assert "argument --size: '3 x' is not a size: give a number of MiB (2), or one" in capsys.readouterr().err


WHOLE = st.integers(0, 1 << 60) | st.builds(lambda n, power: n << 10 * power, st.integers(0, 4096), st.integers(0, 5))
SHARES = st.decimals("0.0001", "100", places=4)


@given(st.builds(lambda nbytes: Size(nbytes), WHOLE) | st.builds(lambda percent: Size(percent=percent), SHARES))
def test_the_text_of_a_size_is_that_size(size: Size) -> None:
    assert parse_size(str(size)) == size
