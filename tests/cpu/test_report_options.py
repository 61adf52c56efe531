# SPDX-License-Identifier: Apache-2.0
"""Options of `python -m offload_engine.report` that have no effect beside others are errors."""

from __future__ import annotations

import pytest

from offload_engine.report import main


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--moves", "--why", "x"], "--why: not allowed with argument --moves"),
        (["--merge", "both.json", "--why", "x"], "--why: not allowed with argument --merge"),
        (["--merge", "both.json", "--moves"], "--moves: not allowed with argument --merge"),
        (["--merge", "both.json", "--rank", "0"], "--rank: not allowed with argument --merge"),
        (["--merge", "both.json", "--group", "0.3"], "--group: only of --moves"),
        (["--why", "x", "--group", "0.3"], "--group: only of --moves"),
    ],
)
def test_options_that_exclude_one_another(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["step.json", *options])
    assert message in capsys.readouterr().err
