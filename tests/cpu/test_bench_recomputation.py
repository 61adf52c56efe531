"""The GPU benchmark's own offload beside recomputation, on one model that was built without either."""

from __future__ import annotations

import pytest

from tests.cpu.test_bench_gpu import tools_on_path

with tools_on_path():
    from bench_gpu import settings


def labels(*arguments: str) -> list[str]:
    return [entry.label for entry in settings.parse(arguments).entries]


def test_names_behind_a_plus_are_recomputed_beside_offload() -> None:
    sets = ("--modules", "core_attn", "--modules", "core_attn,experts+moe_act,layernorm")
    assert labels("--setup", "b", *sets, "--contenders", "none,ours,incumbent,recompute") == [
        "none",
        "ours core_attn",
        "incumbent core_attn",
        "recompute",
        "ours core_attn,experts+moe_act,layernorm",
        "incumbent core_attn+moe_act,layernorm",
    ]


def test_settings_behind_an_at_sign_apply_to_ours_alone() -> None:
    sets = ("--modules", "core_attn", "--modules", "core_attn+moe_act@resident_bytes=1024,dry_run=True")
    found = settings.parse(["--setup", "b", *sets, "--contenders", "none,ours,incumbent,copies"])
    assert [(entry.label, entry.engine) for entry in found.entries] == [
        ("none", ()),
        ("ours core_attn", ()),
        ("incumbent core_attn", ()),
        ("copies core_attn", ()),
        ("ours core_attn+moe_act @resident_bytes=1024,dry_run=True", (("resident_bytes", 1024), ("dry_run", True))),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--modules core_attn@dry_run=True --contenders none,incumbent", "what is behind the @ is for ours: name it"),
        ("--modules core_attn@dry_run", "'dry_run' is not NAME=VALUE"),
        (
            "--modules core_attn+moe_act@dry_run=True --contenders incumbent",
            "what is behind the @ is for ours: name it",
        ),
        ("--modules experts+moe_act --contenders none,incumbent", "the incumbent offloads none of experts"),
        ("--modules core_attn+attention", "one or more of core_attn, moe_act, layernorm"),
        ("--modules core_attn+", "one or more of core_attn"),
        ("--modules +moe_act", "in front of it what is offloaded, got +moe_act"),
        (
            "--setup fine-2 --overlap-a2a --modules core_attn+moe_act --contenders ours",
            "leave out what is behind a plus",
        ),
    ],
)
def test_nonsense_is_an_error(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.parse(arguments.split())
    assert message in capsys.readouterr().err
