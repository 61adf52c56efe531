# SPDX-License-Identifier: Apache-2.0
"""The weights of a model: when they are looked up, and that they never move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core")

import torch  # noqa: E402

from megatron_patches import apply  # noqa: E402
from offload_engine import OffloadConfig, OffloadEngine  # noqa: E402
from tests.dist.launch import run_ranks  # noqa: E402
from tests.dist.tiny import fingerprint, forward_step, make_chunks, make_config, run  # noqa: E402

_CONFIG = OffloadConfig(min_tensor_bytes=1, directory="none")


def test_between_the_begin_of_a_step_and_its_first_forward_the_model_is_not_walked() -> None:
    """There the device waits for the host: in a model of eight layers a walk takes it 0.2 ms or more."""
    (walks,) = run_ranks(_walks_in_front_of_each_forward)
    assert walks == [[0, 0], [0, 0]]


def _walks_in_front_of_each_forward() -> list[list[int]]:
    chunks = make_chunks(make_config())
    walks: list[list[int]] = []
    walk = torch.nn.Module._named_members

    def counted(*args: Any, **kwargs: Any) -> Any:
        walks[-1].append(1)
        return walk(*args, **kwargs)

    def step(batches: Iterator[torch.Tensor], model: torch.nn.Module, *more: Any) -> Any:
        seen.append(sum(walks.pop()))
        walks.append([])
        return forward_step(batches, model, *more)

    found = []
    with apply(_CONFIG, modules=["core_attn"]):
        run(chunks, 2)  # the first step looks at the model in any case
        for _ in range(2):
            seen: list[int] = []
            for chunk in chunks:
                chunk.zero_grad()
            walks.append([])
            with mock.patch.object(torch.nn.Module, "_named_members", counted):
                _train(chunks, step)
            found.append(seen)
    return found


def _train(chunks: list[torch.nn.Module], step: Any) -> None:
    with mock.patch.object(torch.nn.Module, "zero_grad"):  # that of `run`, which walks the model, too
        run(chunks, 2, forward_step=step)


def test_a_parameter_that_takes_the_place_of_another_is_known_a_step_later() -> None:
    (known,) = run_ranks(_replace_a_parameter)
    assert known == [False, True]


def _replace_a_parameter() -> list[bool]:
    expected = make_chunks(make_config())
    losses = run(expected, 2)
    (chunk,) = chunks = make_chunks(make_config())
    begin = OffloadEngine.begin_iteration
    told: list[list[int]] = []

    def noted(engine: Any, actions: Any, weights: Iterable[torch.Tensor], **more: Any) -> None:
        told.append([tensor.data_ptr() for tensor in weights])
        begin(engine, actions, weights, **more)

    with apply(_CONFIG, modules=["qkv_linear"]), mock.patch.object(OffloadEngine, "begin_iteration", noted):
        run(chunks, 2)
        linear = chunk.decoder.layers[0].self_attention.linear_qkv
        linear.weight = torch.nn.Parameter(linear.weight.detach().clone())
        for _ in range(2):
            assert fingerprint(chunks, run(chunks, 2)) == fingerprint(expected, losses)
    return [linear.weight.data_ptr() in weights for weights in told[1:]]
