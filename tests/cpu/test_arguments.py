# SPDX-License-Identifier: Apache-2.0
"""The settings as configuration fields and as flags, what mistakes look like, and modules in CUDA graphs."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402

from megatron_patches import (  # noqa: E402
    Handle,
    OneLineParser,
    PatchError,
    add_offload_arguments,
    apply,
    end_run,
    offload_config_from_args,
)
from megatron_patches._arguments import Settings, check_fields, resolve  # noqa: E402
from megatron_patches._command_line import as_typed  # noqa: E402
from megatron_patches._flags import SETTINGS  # noqa: E402
from megatron_patches._model.gpu_budget import budget_of  # noqa: E402
from megatron_patches._model.graphs import captured_names, check_cuda_graphs, num_graphs_beside_copies  # noqa: E402
from megatron_patches._model.modules import MODULES, canonical_names  # noqa: E402
from megatron_patches._rehearsal import script  # noqa: E402
from offload_engine import FixedBounds, OffloadConfig  # noqa: E402
from offload_engine.sizes import Size, parse_size  # noqa: E402

CONFIGS = pytest.mark.parametrize("config_class", [TransformerConfig, MLATransformerConfig])
NO_DEFAULTS = Settings(OffloadConfig(), ())


@pytest.fixture
def applied() -> Iterator[Handle]:
    with apply() as handle:
        yield handle


def make(config_class: type = TransformerConfig, /, **settings: Any) -> Any:
    return config_class(num_layers=2, hidden_size=8, num_attention_heads=2, **settings)


def parse(*words: str) -> argparse.Namespace:
    return add_offload_arguments(argparse.ArgumentParser()).parse_args(words)


@CONFIGS
def test_fields_are_there_as_long_as_applied(config_class: Any) -> None:
    before = {field.name for field in dataclasses.fields(config_class)}
    init, early = config_class.__init__, make(config_class)
    with apply():
        added = {field.name for field in dataclasses.fields(config_class)} - before
        assert len(added) == 21 and all(name.startswith("offload_") for name in added)
        assert make(config_class).offload_activation is False
        assert resolve(early, NO_DEFAULTS) is None  # made before: it counts as off
        assert dataclasses.replace(early, num_layers=4).offload_activation is False
        with pytest.raises(PatchError, match="already"):
            apply()
        assert make(config_class, offload_activation=True).offload_activation
    assert {field.name for field in dataclasses.fields(config_class)} == before
    assert config_class.__init__ is init and not hasattr(config_class, "offload_dir")
    with pytest.raises(TypeError, match="offload_activation"):
        make(config_class, offload_activation=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"offload_activation": False, "offload_modules": ["core_attn"]}, "without offload_activation"),
        ({"offload_modules": ["core_atn"]}, "unknown module name 'core_atn'.*did you mean 'core_attn'"),
        ({"offload_modules": ["all"]}, "unknown module name.*give --offload-gpu-budget, such as auto"),
        ({"offload_modules": ["mlp"]}, r"unknown module name.*did you mean mlp_norm mlp_fc1 mlp_act mlp_fc2\?"),
        ({"offload_modules": "core_attn"}, "must be a list of names"),
        ({"offload_min_tensor_bytes": -1}, "offload_min_tensor_bytes must not be negative"),
        ({"offload_horizon_bytes": 1.5}, "offload_horizon_bytes must be a whole number"),
        ({"offload_host_policy": "spill"}, "offload_host_policy must be one of keep, error"),
        ({"offload_gpu_budget": 0.9}, "must be a size, such as '60GiB'"),
        ({"offload_host_limit_bytes": True}, "offload_host_limit_bytes must be a whole"),
        ({"offload_activation": "false"}, "offload_activation must be True or False, got 'false'"),
        (
            {"offload_host_limit_bytes": "50%"},
            "offload_host_limit_bytes: '50%' is not a number of bytes, and only gpu_b",
        ),
        ({"offload_host_limit_bytes": 10, "offload_min_tensor_bytes": 11}, "nothing could ever be offloaded"),
        ({"cpu_offloading": True, "cpu_offloading_num_layers": 1}, "own cpu_offloading"),
        ({"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]}, "own fine_grained_activation"),
        ({"offload_recompute": "auto"}, "^offload_recompute=auto needs a budget: give --offload-gpu"),
        ({"offload_gpu_budget": "1G", "offload_recompute": "on"}, "^offload_recompute must be one of auto, off, got"),
    ],
)
def test_bad_settings_are_rejected(settings: dict[str, Any], message: str, applied: Handle) -> None:
    with pytest.raises(ValueError, match=message):
        make(**{"offload_activation": True, **settings})


def test_megatrons_own_offload_and_its_paged_stash_are_refused(applied: Handle) -> None:
    config = make(fine_grained_activation_offloading=True, offload_modules=["core_attn"])
    assert resolve(config, NO_DEFAULTS) is None
    with pytest.raises(ValueError, match="would both move"):
        resolve(config, Settings(OffloadConfig(), ("core_attn",)))
    stash = make(offload_activation=True)
    stash.moe_paged_stash = True  # from 0.19 on
    assert resolve(stash, NO_DEFAULTS) is not None
    with pytest.raises(ValueError, match="'dispatched_tokens', 'experts', 'moe_act', but.*moe_paged_stash=True"):
        resolve(stash, Settings(OffloadConfig(), ("router", "dispatched_tokens", "experts", "moe_act")))
    stash.offload_modules = ["core_attn", "expert_fc1"]
    with pytest.raises(ValueError, match="'router_fc1', but.*moe_paged_stash=True"):
        check_fields(stash)


def test_the_configuration_goes_before_the_defaults(applied: Handle) -> None:
    policy = FixedBounds(horizon_bytes=9)
    defaults = Settings(OffloadConfig(min_tensor_bytes=7, policy=policy), ("core_attn",))
    assert resolve(make(), defaults) == defaults
    settings = {"activation": True, "modules": ["expert_fc1"], "min_tensor_bytes": 0, "dir": "none"}
    own = make(**{f"offload_{name}": value for name, value in settings.items()}, offload_cpu_affinity=True)
    wanted = OffloadConfig(min_tensor_bytes=0, policy=policy, directory="none", cpu_affinity=True)
    assert resolve(own, defaults) == Settings(wanted, ("router_fc1",))
    assert resolve(make(offload_activation=True), NO_DEFAULTS) == Settings(OffloadConfig(), ("core_attn",))
    assert canonical_names(["core_attn,qkv_linear"]) == canonical_names(["qkv_linear", "core_attn"])


def test_flags() -> None:
    words = "activation modules=core_attn min-tensor-bytes=4 dir=none host-policy=error cpu-affinity"
    args = parse(*(f"--offload-{word}" for word in words.split()))
    assert args.offload_modules == ["core_attn"] and args.offload_activation
    expected = OffloadConfig(min_tensor_bytes=4, directory="none", host_policy="error", cpu_affinity=True)
    assert offload_config_from_args(args) == expected
    assert offload_config_from_args(parse()) == OffloadConfig()
    assert parse().offload_report and not parse("--no-offload-report").offload_report
    with pytest.raises(ValueError, match="--no-offload-report without --offload-activation"):
        offload_config_from_args(parse("--no-offload-report"))
    budget = parse("--offload-gpu-budget", "60GiB", "--offload-modules", "core_attn")
    assert budget.offload_gpu_budget == "60GiB" and offload_config_from_args(budget) == OffloadConfig()
    theirs = argparse.ArgumentParser()
    theirs.add_argument("--offload-modules", nargs="*", default=["theirs"])  # is there already
    assert add_offload_arguments(add_offload_arguments(theirs)).parse_args([]).offload_modules == ["theirs"]


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("host-limit-bytes", "-1", "'-1' is negative"),
        ("gpu-budget", "120%", "'120%' is not a share"),
        ("recompute", "on", "invalid choice: 'on'"),
    ],
)
def test_flags_reject_bad_values(flag: str, value: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(f"--offload-{flag}={value}")
    assert f"argument --offload-{flag}: {message}" in capsys.readouterr().err


SIZE_FLAGS = [setting.name for setting in SETTINGS if setting.argparse_kwargs().get("metavar") == "SIZE"]


@pytest.mark.parametrize("name", SIZE_FLAGS)
def test_every_size_may_have_a_unit_and_a_budget_of_the_gpu_may_be_a_share(
    name: str, applied: Handle, capsys: pytest.CaptureFixture[str]
) -> None:
    """What other sizes bound has no total, or one that nobody knows yet, such as all saved bytes."""
    flag, is_budget = f"--{name.replace('_', '-')}", name == "offload_gpu_budget"
    for text, nbytes in (("60GiB", 60 << 30), ("60G", 60 << 30), ("1.5GB", 1_500_000_000)):
        assert parse_size(str(getattr(parse(flag, text), name))) == Size(nbytes)
        assert getattr(make(offload_activation=True, **{name: text}), name) == text
    for text in ("50%", "auto"):
        if is_budget:
            with on_a_gpu_of(80 << 30):
                assert budget_of(parse_size(getattr(parse(flag, text), name))) == (40 << 30 if text == "50%" else text)
            continue
        with pytest.raises(SystemExit):
            parse(flag, text)
        message = f"{text!r} is not a number of bytes, and only gpu_budget may be a share or auto: give a number of by"
        assert f"argument {flag}: {message}" in capsys.readouterr().err
        with pytest.raises(ValueError, match=f"^{name}: {message}"):
            make(offload_activation=True, **{name: text})
    assert len(SIZE_FLAGS) == 7


@contextmanager
def on_a_gpu_of(nbytes: int) -> Iterator[None]:
    values = {"is_available": True, "mem_get_info": (nbytes, nbytes), "memory_reserved": 0, "memory_allocated": 0}
    with mock.patch.multiple(torch.cuda, **{name: mock.Mock(return_value=value) for name, value in values.items()}):
        yield


# -- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(
            ({"offload_gpu_budget": "60GiB", f"offload_{name}_bytes": 1}, f"decides what stays.*{name}_bytes=1: omit o")
            for name in ("resident", "horizon", "max_inflight")
        ),
        ({"offload_plan": "f"}, "offload_plan=f needs a budget: give .* omit --offload-plan"),
        ({"offload_plan_plot": "f"}, "offload_plan_plot=f needs a budget: give .* omit --off"),
    ],
)
def test_what_budgets_exclude_or_need(settings: dict[str, Any], message: str, applied: Handle) -> None:
    words = [str(word) for field, word in settings.items() for word in (f"--{field.replace('_', '-')}", word)]
    for refused in (lambda: make(**settings), lambda: offload_config_from_args(parse(*words))):
        with pytest.raises(ValueError, match=message):
            refused()


def test_a_budget_of_the_gpu_switches_the_offload_on(applied: Handle) -> None:
    for typed, size in (("60G", Size(60 << 30)), ("90%", parse_size("90%")), ("auto", Size()), (5000, Size(5000))):
        assert resolve(make(offload_gpu_budget=typed), NO_DEFAULTS) == NO_DEFAULTS._replace(gpu_budget=size)
    named = make(offload_gpu_budget="60G", offload_modules=["expert_fc1"], offload_plan="f", offload_plan_plot="g")
    wanted = Settings(OffloadConfig(), ("router_fc1",), gpu_budget=Size(60 << 30), plan="f", plan_plot="g")
    assert resolve(named, NO_DEFAULTS) == wanted
    defaults = NO_DEFAULTS._replace(gpu_budget=Size(7))
    assert resolve(make(), defaults) == resolve(make(offload_activation=True), defaults) == defaults


# -- other programs ---------------------------------------------------------------------------------------------------


def test_megatron_training_makes_flags_of_the_fields_and_fields_of_the_flags(applied: Handle) -> None:
    reason = "this wheel has no megatron.training"
    arguments = pytest.importorskip("megatron.training.arguments", reason=reason)
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    add_offload_arguments(parser)  # as a trainer of ours would; a stock script does not
    size = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --no-rope-fusion"  # that takes TransformerEngine
    flags = "--offload-activation --offload-modules core_attn router_fc1 --offload-horizon-bytes 3 --no-offload-report"
    args = parser.parse_args(f"{size} {flags}".split())
    args.params_dtype = torch.float32
    config = arguments.core_transformer_config_from_args(args)
    engine = OffloadConfig(policy=FixedBounds(horizon_bytes=3))
    assert resolve(config, NO_DEFAULTS) == Settings(engine, ("core_attn", "router_fc1"), has_report=False)


CHANGES_MEMORY = re.compile(
    "fp8|fp4|fsdp|offload|hybrid|heterogen|precision|optimizer|freeze|cross_ent|checkpoint_args|spec$"
)
# Of these: what comes only beside one that is refused, or changes what is written, or when, and not what a step holds.
CHANGES_NO_STEP = re.compile(
    "^(rl_|fsdp|megatron_fsdp|torch_fsdp2|strict_fsdp|keep_fp8|reuse_grad_buf_for_mxfp8|fp[48]_param|optimizer_offload|"
    ".*cpu_o|dino_|.*_from_checkpoint_args|muon_scalar_optimizer|optimizer_cuda_graph|.*_with_optimizer_step|dist.*_optim_)"
)


def test_each_argument_that_changes_memory_is_read_by_a_forecast_or_refused() -> None:
    arguments = pytest.importorskip("megatron.training.arguments", reason="this wheel has no megatron.training")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    flags = parser._option_string_actions
    refused = script._NOT_REHEARSED
    assert {name: flags[flag].dest for name, flag in refused.items()} == dict(zip(refused, refused, strict=True))
    # What a configuration has reaches the model, which is built; the rest is read by name.
    known = {field.name for field in dataclasses.fields(MLATransformerConfig)} | set(refused)
    known |= set(re.findall(r"\w+", Path(script.__file__).read_text()))
    suspects = {action.dest for action in parser._actions if CHANGES_MEMORY.search(action.dest)}
    assert [name for name in sorted(suspects - known) if not CHANGES_NO_STEP.match(name)] == []


# -- what a mistake looks like: one line, once, in the words that were typed ------------------------------------------


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_ERROR_FILE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("--offload-module", "did you mean --offload-modules?"),
        ("--offload_modules", "it is written --offload-modules"),
        ("--cpu-offloading-num-layers=3", "here --cpu-offloading-num-layers is --offload-num-layers"),
    ],
)
def test_hints_for_unknown_flags(typed: str, hint: str, alone: None, capsys: pytest.CaptureFixture[str]) -> None:
    parser = OneLineParser(prog="train.py", allow_abbrev=False)
    add_offload_arguments(parser)
    with pytest.raises(SystemExit) as end:
        parser.parse_args([typed])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"train.py: error: unrecognized arguments: {typed} (") and hint in line
    assert end.value.code == 2


def test_settings_are_named_as_flags_and_modules_as_typed() -> None:
    text = "offload_modules has 'router_fc1', but recompute_granularity='full' ('expert_fc1' stands for 'router_fc1')"
    typed = as_typed(text, ["expert_fc1,core_attn"])
    assert typed == "--offload-modules has 'expert_fc1', but --recompute-granularity 'full'"
    text = "set offload_activation=True (--offload-activation): host_limit_bytes=1,024 is too low"
    assert as_typed(text, []) == "set --offload-activation: --offload-host-limit-bytes 1,024 is too low"


def test_under_torchrun_the_first_rank_speaks(alone: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank that has an error of its own still speaks, later."""
    waits: list[float] = []
    monkeypatch.setattr("megatron_patches._command_line.time.sleep", waits.append)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    for rank, waited in (("0", []), ("3", [5.0])):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit) as end:
            end_run("train.py", "offload_activation is off")
        assert end.value.code == 1 and waits == waited
        report = json.loads((tmp_path / "error.json").read_text())
        assert report["message"] == "train.py: error: --offload-activation is off"
        (tmp_path / "error.json").unlink()


# -- modules that CUDA graphs capture are refused with both settings named, and all others are offloaded --------------


# As megatron-core keeps what it captures; for inference since 0.19.
Scope = enum.Enum("Scope", "attn mlp moe moe_router moe_preprocess mamba full_iteration")
Inference = enum.Enum("Inference", "none layer block")


def of_scopes(names: str, setting: str = "cuda_graph_scope", **settings: Any) -> Any:
    scopes = {setting: [Scope[scope] for scope in names.split()]}
    return SimpleNamespace(**{"cuda_graph_impl": "transformer_engine", **scopes, **settings})


@pytest.mark.parametrize("setting", ["cuda_graph_scope", "cuda_graph_modules"])
@pytest.mark.parametrize(
    ("scopes", "captured", "free"),
    [
        ("attn", "attn_norm layer_input qkv_linear core_attn mla_up_proj", "mlp_norm router_fc1"),
        ("mlp", "mlp_norm mlp_fc1 mlp_act", "core_attn moe_act router"),
        ("moe", "router experts dispatched_tokens shared_fc1", "core_attn mlp_fc1"),
        ("moe_router", "router mlp_norm shared_experts dispatched_tokens", "router_fc1 moe_act"),
        ("moe_preprocess", "router mlp_norm shared_fc1 dispatched_tokens", "experts mlp_fc2"),
        ("mamba", "mamba_mixer mamba_in_proj", "core_attn router_fc2 mtp_proj"),
        ("", " ".join(row.name for row in MODULES), ""),
    ],
)
def test_which_modules_are_captured(setting: str, scopes: str, captured: str, free: str) -> None:
    graphs, names = of_scopes(scopes, setting), [*free.split(), *captured.split()]
    assert captured_names(graphs, names) == captured.split()
    check_cuda_graphs(graphs, names)
    check_cuda_graphs(graphs, free.split(), has_budget=True)
    for name in captured.split():
        with pytest.raises(NotImplementedError, match=rf"offload_gpu_budget beside {setting}, which captures '{name}'"):
            check_cuda_graphs(graphs, [*free.split(), name], has_budget=True)


def test_layers_are_captured_behind_the_step_that_attaches_offload() -> None:
    check_cuda_graphs(of_scopes("attn", cuda_graph_warmup_steps=1), ["core_attn"])
    check_cuda_graphs(of_scopes("attn", cuda_graph_warmup_steps=0), ["router_fc1"])
    with pytest.raises(NotImplementedError, match="'core_attn', which cuda_graph_scope captures, .*_steps=0"):
        check_cuda_graphs(of_scopes("attn", cuda_graph_warmup_steps=0), ["core_attn"])


def test_copies_run_beside_graphs_where_nothing_is_eager_between_them() -> None:
    eager = ["attn", "moe_router", "attn moe_router moe_preprocess"]
    for scopes in (*eager, "", "attn mlp", "attn moe", "mamba"):
        assert num_graphs_beside_copies(of_scopes(scopes)) == (scopes not in eager)


@pytest.mark.parametrize("scopes", ["", "attn", "moe_router mamba"])
def test_the_local_implementation_is_refused(scopes: str) -> None:
    with pytest.raises(NotImplementedError, match="'router_fc1' beside cuda_graph_impl='local'"):
        check_cuda_graphs(of_scopes(scopes, cuda_graph_impl="local"), ["router_fc1"])


@pytest.mark.parametrize(
    "graphs",
    [
        {"cuda_graph_impl": "full_iteration", "cuda_graph_modules": []},
        {"cuda_graph_impl": "local", "cuda_graph_scope": [Scope.full_iteration]},
    ],
)
def test_where_steps_are_captured_whole_all_names_are_free_and_other_settings_are_not(graphs: dict[str, Any]) -> None:
    for steps in ({}, {"cuda_graph_warmup_steps": 3}):
        check_cuda_graphs(SimpleNamespace(**graphs, **steps), [row.name for row in MODULES])
    for settings, has_budget, message in (
        ({"cuda_graph_warmup_steps": 2}, False, "cuda_graph_warmup_steps=2"),
        ({}, True, "offload_gpu_budget beside a capture of whole steps"),
        ({"moe_expert_rank_capacity_factor": 1.5}, False, "moe_expert_rank_capacity_factor"),
    ):
        with pytest.raises(NotImplementedError, match=message):
            check_cuda_graphs(SimpleNamespace(**graphs, **settings), ["core_attn"], has_budget)


def test_graphs_that_no_training_step_replays_are_let_be() -> None:
    old = of_scopes("", cuda_graph_impl="local", cuda_graph_scope=["full_iteration_inference"])
    new = of_scopes("", "cuda_graph_modules", cuda_graph_impl="local", inference_cuda_graph_scope=Inference.block)
    for graphs in (SimpleNamespace(), of_scopes("attn", cuda_graph_impl="none"), old, new):
        check_cuda_graphs(graphs, ["core_attn"])
    new.inference_cuda_graph_scope = Inference.layer  # its graphs are replayed in training, too
    with pytest.raises(NotImplementedError, match="local"):
        check_cuda_graphs(new, ["core_attn"])
