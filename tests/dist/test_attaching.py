# SPDX-License-Identifier: Apache-2.0
"""An attachment that cannot be made leaves nothing on the model; one that cannot be closed stays."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402

from megatron_patches import _runtime, apply  # noqa: E402
from megatron_patches._hooks.attach import Attachment  # noqa: E402
from megatron_patches._model.recompute_options import RecomputeOptions  # noqa: E402
from megatron_patches._plan_files import PlanFiles  # noqa: E402
from offload_engine import OffloadConfig, OffloadEngine, OffloadError  # noqa: E402
from tests.dist.launch import run_ranks  # noqa: E402
from tests.dist.tiny import fingerprint, make_chunks, make_config, run  # noqa: E402

STEPS: list[tuple[Any, str]] = [
    (RecomputeOptions, "__init__"),
    (PlanFiles, "begin"),
    (Attachment, "_attach_pauses"),
    (_runtime, "SecondStep"),
]


def test_a_step_of_attaching_that_fails_leaves_nothing() -> None:
    run_ranks(_check_failures)


def _check_failures() -> None:
    chunks = make_chunks(make_config())
    bare = _num_hooks(chunks)
    engines: list[OffloadEngine] = []

    def engine(*args: Any, **kwargs: Any) -> OffloadEngine:
        engines.append(OffloadEngine(*args, **kwargs))
        return engines[-1]

    with apply(OffloadConfig(min_tensor_bytes=1, directory="none"), gpu_budget=1 << 30) as handle:
        for owner, name in STEPS:
            fails = mock.patch.object(owner, name, side_effect=ArithmeticError)
            with fails, mock.patch.object(_runtime, "OffloadEngine", engine), pytest.raises(ArithmeticError):
                run(chunks, 2)
            assert engines[-1]._is_closed and handle.engine is None, name
            assert _num_hooks(chunks) == bare, name
        run(chunks, 2)
        assert handle.engine is not None
    assert len(engines) == len(STEPS)


def test_what_cannot_be_closed_stays_attached() -> None:
    run_ranks(_check_kept)


def _check_kept() -> None:
    with apply(OffloadConfig(min_tensor_bytes=1, directory="none")) as handle:
        chunks = make_chunks(make_config(offload_activation=True, offload_modules=["core_attn"]))
        config: Any = chunks[0].config
        expected = fingerprint(chunks, run(chunks, 2))
        engine = handle.engine
        config.offload_modules = ["mlp_fc1"]
        refusal = mock.Mock(side_effect=OffloadError("a graph is left"))
        with mock.patch.object(_runtime, "release_captured", refusal), pytest.raises(OffloadError):
            run(chunks, 2)
        assert handle.engine is engine and len(handle._runtime._attachments) == 1
        assert fingerprint(chunks, run(chunks, 2)) == expected
        assert handle.engine is not engine and len(handle._runtime._attachments) == 1


def _num_hooks(chunks: list[torch.nn.Module]) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for chunk in chunks for m in chunk.modules())
