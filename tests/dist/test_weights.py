# SPDX-License-Identifier: Apache-2.0
"""The weights of a model: when they are looked up, and that they never move."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch

from megatron_patches import apply
from offload_engine import OffloadEngine
from tests.dist.launch import on_ranks
from tests.dist.tiny import ALL, forward_step, make_chunks, make_config, run, step


@on_ranks()
def test_between_the_begin_of_a_step_and_its_first_forward_the_model_is_not_walked() -> None:
    """There the device waits for the host: in a model of eight layers a walk takes it 0.2 ms or more."""
    chunks = make_chunks(make_config())
    walks: list[str] = []
    walk = torch.nn.Module._named_members

    def counted(*args: Any, **kwargs: Any) -> Any:
        walks.append("walk")
        return walk(*args, **kwargs)

    def noted(batches: Iterator[torch.Tensor], model: torch.nn.Module, *more: Any) -> Any:
        walks.append("forward")
        return forward_step(batches, model, *more)

    with apply(ALL, modules=["core_attn"]):
        run(chunks, 2)  # the first step looks at the model in any case
        with (
            mock.patch.object(torch.nn.Module, "_named_members", counted),
            mock.patch.object(torch.nn.Module, "zero_grad"),  # that of `run`, which walks the model, too
        ):
            for _ in range(2):
                walks.clear()
                run(chunks, 2, forward_step=noted)
                assert walks[:2] == ["forward", "forward"]


@on_ranks()
def test_a_parameter_that_takes_the_place_of_another_is_known_a_step_later() -> None:
    expected = step(make_chunks(make_config()), 2)
    (chunk,) = chunks = make_chunks(make_config())
    begin = OffloadEngine.begin_iteration
    told: list[list[int]] = []

    def noted(engine: Any, actions: Any, weights: Iterable[torch.Tensor], **more: Any) -> None:
        told.append([tensor.data_ptr() for tensor in weights])
        begin(engine, actions, weights, **more)

    with apply(ALL, modules=["qkv_linear"]), mock.patch.object(OffloadEngine, "begin_iteration", noted):
        run(chunks, 2)
        linear: Any = chunk.decoder.layers[0].self_attention.linear_qkv
        linear.weight = torch.nn.Parameter(linear.weight.detach().clone())
        assert [step(chunks, 2) for _ in range(2)] == [expected, expected]
    assert [linear.weight.data_ptr() in weights for weights in told[1:]] == [False, True]
