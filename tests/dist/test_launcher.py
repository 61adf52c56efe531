# SPDX-License-Identifier: Apache-2.0
"""`python -m megatron_patches`: a script that knows nothing of it runs with the patches; `--check` of megatron-core."""

from __future__ import annotations

import json
import sys
import threading
import weakref
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from megatron.core.pipeline_parallel import schedules

from megatron_patches import apply, apply_cpu_support
from megatron_patches.__main__ import main
from megatron_patches._arguments import Settings
from megatron_patches._check import KNOWN_TARGETS, State, check_rows, read_known
from megatron_patches._handle import patch_rows
from megatron_patches._plan_files import PlanFiles
from megatron_patches._rows.registry import Patch
from megatron_patches._runtime import ModelRuntime
from megatron_patches._versions import installed_version
from offload_engine import OffloadConfig
from offload_engine._devices.cpu import CpuDevice
from tests.dist.launch import on_ranks, run_ranks
from tests.dist.tiny import messages

SCRIPT = """
import json, sys
import sibling
from megatron.core.transformer.transformer_config import TransformerConfig
import torch
from tests.dist.launch import Group, set_up_groups, Pipeline
from tests.dist.tiny import make_chunks, make_config, run

set_up_groups(Group(0, 1, "file://" + sys.argv[1] + "/store", Pipeline()), Pipeline())


def pretrain():  # frees the model with its end
    chunks = make_chunks(make_config())
    for _ in range(2):
        run(chunks, 2)
    if "fail inside" in sys.argv:
        raise ZeroDivisionError("of the script")
    return [name for name, module in chunks[0].named_modules() if module._forward_hooks]


json.dump([__name__, sys.argv[1:], sys.path[0], pretrain()], open(sys.argv[1] + "/seen.json", "w"))
if "fail" in sys.argv:
    raise ZeroDivisionError("of the script")
"""
OFFLOAD = ["--offload-activation", "--offload-min-tensor-bytes", "1"]


@pytest.mark.compat
def test_runs_a_script_as_main_with_its_own_arguments(tmp_path: Path) -> None:
    names = ["--offload-modules", "core_attention", "mlp_act"]
    *seen, hooked = _launch(tmp_path, *OFFLOAD, *names, "--offload-trace", str(tmp_path / "step{step}.json"))
    assert (tmp_path / "step1.json").exists()
    assert seen == ["__main__", [str(tmp_path), "--bf16", "other.py"], str(tmp_path)]
    # Of what a layer is made of: core attention, and the ends of the stretch of the activation, which are those of the
    # first projection and of its MLP; and what passes the engine by.
    parts = [name.removeprefix("decoder.layers.").partition(".")[2] for name in hooked]
    wanted = ("self_attention.core_attention", "mlp.linear_fc1", "mlp")
    unshared = ("input_layernorm", "self_attention.linear_qkv", "pre_mlp_layernorm")
    assert Counter(filter(None, parts)) == dict.fromkeys((*wanted, *unshared), 4)


def test_a_recipe_needs_one_flag(tmp_path: Path) -> None:
    recipe = 'fine_grained_activation_offloading=True, offload_modules=["core_attn"], min_offloaded_tensor_size=1'
    hooked = _launch(tmp_path, "--offload-engine", config=recipe)[-1]
    assert sum(name.endswith("core_attention") for name in hooked) == 4


# -- the end -----------------------------------------------------------------------------------------------------------


@on_ranks(None)
def test_last_tables_and_plans_are_written(tmp_path: Path) -> None:
    """Also where the model was freed with the function that trained it."""
    logged = messages()
    with mock.patch.object(PlanFiles, "close", side_effect=lambda engine: logged.append("the last plan")):
        _main([*OFFLOAD, *_write(tmp_path)])
    _check_unpatched()
    assert logged.count("the last plan") == 1
    assert any("activation offload in the second step" in line for line in logged)


@pytest.mark.parametrize("is_removed", [True, False])
@on_ranks(None)
def test_an_error_of_the_script_is_not_hidden(is_removed: bool, tmp_path: Path) -> None:
    failure = mock.patch.object(ModelRuntime, "close", side_effect=RuntimeError("of the removal"))
    with nullcontext() if is_removed else failure, pytest.raises(ZeroDivisionError, match="of the script"):
        _main([*OFFLOAD, *_write(tmp_path), "fail"])
    if is_removed:
        _check_unpatched()


@on_ranks(None)
def test_after_an_error_of_one_of_several_ranks_nothing_waits_for_the_device(tmp_path: Path) -> None:
    """It may wait for the other ranks for ever. Nor does anything at the end of the process."""
    finalizers = set(weakref.finalize._registry)  # type: ignore[attr-defined]
    abandoned = mock.patch.object(CpuDevice, "abandon", autospec=True, side_effect=CpuDevice.abandon)
    several = mock.patch("megatron_patches.__main__.is_one_of_several", return_value=True)
    with several, abandoned as left, pytest.raises(ZeroDivisionError, match="of the script") as failure:
        _main([*OFFLOAD, *_write(tmp_path), "fail inside"])
    assert failure.tb is not None, "which holds the model"
    assert left.call_count == 1
    ours = {each for each in set(weakref.finalize._registry) - finalizers if each.atexit}  # type: ignore[attr-defined]
    modules = {each.peek()[1].__module__.partition(".")[0] for each in ours if each.peek() is not None}
    assert not modules & {"megatron_patches", "offload_engine"}


def _check_unpatched() -> None:
    """Patches can be applied anew only where none is in force."""
    with apply(), apply_cpu_support():
        pass


def _launch(tmp_path: Path, *flags: str, config: str = "") -> list[Any]:
    run_ranks(_main, [*flags, *_write(tmp_path, config), "--bf16", "other.py"], pipeline=None)
    return json.loads((tmp_path / "seen.json").read_text())


def _write(folder: Path, config: str = "") -> list[str]:
    """Write a script, and what it imports; return its path and its first argument."""
    script = folder / "pretrain.py"
    script.write_text(SCRIPT.replace("make_config()", f"make_config({config})"))
    (folder / "sibling.py").touch()
    return [str(script), str(folder)]


def _main(argv: list[str]) -> None:
    sys.argv = ["megatron_patches", *argv]
    main()
    for thread in threading.enumerate():  # as an interpreter does before it exits; these ranks do not
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()


# -- `--check`: the rows fit the installed megatron-core ---------------------------------------------------------------

SCHEDULE = "megatron.core.pipeline_parallel.schedules:forward_backward_no_pipelining"


def rows() -> list[Patch]:
    return patch_rows(ModelRuntime(Settings(OffloadConfig(), ()), None))


def state_of(target: str, known: Any = None) -> State:
    findings = check_rows(rows(), installed_version(), known or read_known())
    [found] = [each for each in findings if each.row.target == target]
    return found.state


@pytest.mark.compat
def test_every_row_was_read_against_the_installed_version() -> None:
    findings = check_rows(rows(), installed_version(), read_known())
    assert {each.state for each in findings} <= {State.HOLDS, State.NOT_NEEDED}
    assert {each.row.target for each in findings if not each.row.is_new} <= set(read_known())


@pytest.mark.compat
def test_other_code_with_the_same_arguments_is_to_be_read() -> None:
    arguments = next(iter(read_known()[SCHEDULE].values()))[0]
    assert state_of(SCHEDULE, {SCHEDULE: {"0.1": [arguments, "other"]}}) is State.CHANGED


@pytest.mark.compat
def test_what_would_break_is_named_and_ends_the_command_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def another(*, model: Any, num_microbatches: int) -> None: ...

    monkeypatch.setattr(schedules, "forward_backward_no_pipelining", another)
    assert state_of(SCHEDULE) is State.OTHER_ARGUMENTS
    with pytest.raises(SystemExit) as ended:
        main(["--check"])
    first, detail, *_ = capsys.readouterr().out.splitlines()
    assert ended.value.code == 1 and SCHEDULE in first and "is now (model, num_microbatches)" in detail
    monkeypatch.delattr(schedules, "forward_backward_no_pipelining")
    assert state_of(SCHEDULE) is State.MISSING
    before = KNOWN_TARGETS.read_text()
    with pytest.raises(SystemExit):
        main(["--check", "accept"])
    assert f"{SCHEDULE} is missing" in capsys.readouterr().err
    assert KNOWN_TARGETS.read_text() == before
