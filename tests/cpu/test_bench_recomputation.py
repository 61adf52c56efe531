"""The GPU benchmark's own offload beside recomputation, on one model that was built without either."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tests.cpu.test_bench_gpu import TINY, Alone, FakeEvent, FakeGauge, tools_on_path

with tools_on_path():
    from bench_gpu import contenders, measure, model, recomputation, settings


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


def test_goals_are_for_those_that_recompute_nothing() -> None:
    found = settings.parse(["--modules", "core_attn", "--modules", "core_attn+mlp", "--contenders", "ours,incumbent"])
    assert [entry.contender for entry in found.entries] == [
        "ours",
        "incumbent",
        "ours+recompute",
        "incumbent+recompute",
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


MODEL: dict[str, Any] = {"moe_grouped_gemm": True, "moe_shared_expert_intermediate_size": 32}


def switch(name: str) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Run in a process with megatron-core's parallel state: flags of a model built with recomputation, and switched."""
    from tests.dist import tiny

    fields = recomputation.selective([name])
    built = tiny.make_chunks(tiny.make_config("mixed", **MODEL, **fields))
    switched = tiny.make_chunks(tiny.make_config("mixed", **MODEL))
    off = _flags(switched)
    switch = recomputation.Recomputation(switched, fields)
    switch.on()
    on = _flags(switched)
    switch.off()
    return _flags(built), on, off, _flags(switched)


def _flags(chunks: list[torch.nn.Module]) -> list[Any]:
    modules = [entry for chunk in chunks for entry in chunk.named_modules()]
    flags = [
        (path, name, value)
        for path, module in modules
        for name, value in sorted(vars(module).items())
        if isinstance(value, bool) and ("recompute" in name or name == "checkpoint_core_attention")
    ]
    config: Any = chunks[0].config
    return [*flags, config.recompute_granularity, config.recompute_modules]


@pytest.mark.dist
@pytest.mark.parametrize("name", settings.RECOMPUTABLE)
def test_the_flags_are_those_of_a_model_built_with_it(name: str) -> None:
    pytest.importorskip("megatron.core")
    from tests.dist.launch import run_ranks

    ((built, on, off, off_again),) = run_ranks(switch, name)
    assert on == built
    assert off_again == off != on


def test_name_that_the_model_lacks_is_an_error() -> None:
    with pytest.raises(ValueError, match="no 'moe_act' to recompute"):
        recomputation.Recomputation([torch.nn.Linear(1, 1)], recomputation.selective(["moe_act"]))


def incumbent_flags() -> list[list[Any]]:
    """Run in a process with megatron-core's parallel state: before, in and behind a turn of the incumbent's."""
    from tests.dist import tiny

    os.environ["NVTE_CPU_OFFLOAD_V1"] = "1"
    chunks = tiny.make_chunks(tiny.make_config())
    (entry,) = settings.make_entries(["incumbent"], ["core_attn+mlp"])
    incumbent = contenders.make_contender(entry, chunks, {})
    found = [_flags(chunks)]
    for change in (incumbent.attach, incumbent.detach):
        change()
        found.append(_flags(chunks))
    return found


@pytest.mark.dist
def test_the_incumbent_may_be_beside_recomputation() -> None:
    pytest.importorskip("megatron.core")
    from tests.dist.launch import run_ranks

    ((before, during, behind),) = run_ranks(incumbent_flags)
    assert during[-2:] == ["selective", ["mlp"]]
    assert {(name, value) for _, name, value in during[:-2]} >= {("recompute_mlp", True)}
    assert behind == before != during


def test_a_trace_of_ours_may_be_beside_recomputation() -> None:
    found = settings.parse(["--modules", "core_attn+mlp", "--contenders", "ours", "--profile", "trace.json"])
    (entry,) = found.entries
    assert entry.kind in found.profile_contenders


def turns() -> dict[str, Any]:
    """Run in a process with megatron-core's parallel state: none, ours beside recomputation, none."""
    from tests.dist import tiny

    chunks = tiny.make_chunks(tiny.make_config("moe", moe_grouped_gemm=True))
    bench = measure.Bench(
        model.Training(TINY, chunks, "cpu"), Alone(), FakeGauge(), measure.Counts(1, 1), lambda what: None, FakeEvent
    )
    (none, both) = (
        contenders.make_contender(entry, chunks, {"min_tensor_bytes": 0, "directory": "none"})
        for entry in settings.make_entries(["none", "ours"], ["qkv_linear,experts+moe_act,core_attn"])
    )
    ran: list[int] = []
    hook = chunks[0].decoder.layers[1].self_attention.core_attention.register_forward_hook(lambda *_: ran.append(1))
    counts, records = [], []
    for number, contender in enumerate((none, both, none)):
        ran.clear()
        records.append(bench.turn(contender, number))
        counts.append(len(ran))
    hook.remove()
    return {"counts": counts, "copied": [r["copied_out_bytes"] for r in records], "parity": bench.parity()}


@pytest.mark.dist
def test_a_turn_moves_some_and_recomputes_some() -> None:
    pytest.importorskip("megatron.core")
    from tests.dist.launch import run_ranks

    (found,) = run_ranks(turns)
    once = 3 * TINY.nmb  # warm-up, the counted step, the timed one
    assert found["counts"] == [once, 2 * once, once]
    assert found["copied"][1] > 0 == found["copied"][0] == found["copied"][2]
    assert [parity["is_bitwise_equal"] for parity in found["parity"]] == [True] * 3
