# SPDX-License-Identifier: Apache-2.0
"""The order of chunks, against what megatron-core's own schedules call."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offload_engine.schedule import (
    Action,
    ChunkKey,
    count_alive,
    format_actions,
    interleaved,
    no_pipelining,
    one_forward_one_backward,
    parse_actions,
    validate_actions,
)

ARTIFACTS = Path(__file__).parents[1] / "artifacts"
SCHEDULES = "megatron.core.pipeline_parallel.schedules"
COMBINED = "megatron.core.pipeline_parallel.combined_1f1b"


class Shape(NamedTuple):
    """One pipeline and its step. `vpp` None: no virtual stages, `group` None: megatron-core's default."""

    pp: int
    vpp: int | None
    microbatches: int
    group: int | None = None
    overlap: bool = False

    @property
    def name(self) -> str:
        numbers = (("pp", self.pp), ("vpp", self.vpp), ("mb", self.microbatches), ("group", self.group))
        return "_".join([f"{name}{number}" for name, number in numbers if number] + ["overlap"] * self.overlap)

    def actions(self, rank: int) -> list[Action]:
        if self.pp == 1:
            return no_pipelining(self.microbatches, self.overlap)
        if self.vpp is None:
            return one_forward_one_backward(self.pp, rank, self.microbatches)
        return interleaved(self.pp, rank, self.vpp, self.microbatches, self.group, self.overlap)


GOLDEN = [
    *(Shape(pp, None, m) for pp, m in ((1, 1), (1, 4), (2, 1), (2, 5), (4, 2), (4, 4), (4, 8))),
    *(Shape(pp, vpp, m) for pp, vpp, m in ((2, 2, 2), (2, 2, 4), (4, 2, 4), (4, 2, 8), (4, 3, 8))),
    *(Shape(2, 3, 5, group=3), Shape(4, 2, 10, group=6)),
    *(Shape(1, None, 4, overlap=True), Shape(2, 2, 6, overlap=True)),
]

CROSS_CHECKED = [
    *(Shape(1, None, m, overlap=overlap) for m in (1, 2, 3, 7) for overlap in (False, True)),
    *(Shape(pp, None, m) for pp in (2, 4) for m in (1, 2, 3, 4, 5, 9)),
    *(
        Shape(pp, vpp, pp * groups, overlap=overlap)
        for pp, vpp, groups, overlap in itertools.product((2, 4), (1, 2, 3), (1, 2, 3), (False, True))
    ),
    # Groups larger than the pipeline, with a smaller last one.
    *(Shape(2, vpp, m, group) for vpp in (1, 2, 3) for m, group in ((3, 3), (5, 3), (7, 5), (8, 4))),
    *(Shape(4, vpp, m, group) for vpp in (2, 3) for m, group in ((5, 5), (9, 5), (10, 6))),
    *(Shape(2, 2, m, group, overlap=True) for m, group in ((3, 3), (5, 3))),
]


def test_orders_are_those_of_megatron() -> None:
    pytest.importorskip("megatron.core", reason="needs megatron-core, to run its schedules")
    for shape in CROSS_CHECKED:
        for rank in range(shape.pp):
            actions, recorded = shape.actions(rank), record_megatron(shape, rank)
            assert format_actions(actions) == format_actions(recorded), shape
            validate_actions(actions)
            assert count_alive(actions)[-1] == 0


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: no_pipelining(0), "num_microbatches must be at least 1, got 0"),
        (lambda: one_forward_one_backward(0, 0, 1), "num_stages must be at least 1, got 0"),
        (lambda: one_forward_one_backward(2, 2, 1), r"stage must be in \[0, 1\] for num_stages=2, got 2"),
        (lambda: interleaved(1, 0, 2, 4), "num_stages of at least 2, got 1: use no_pipelining"),
        (lambda: interleaved(2, 0, 0, 4), "num_virtual_stages must be at least 1"),
        (lambda: interleaved(4, 0, 2, 3), r"group_size must be in \[num_stages=4, num_microbatches=3\], got 4"),
        (lambda: interleaved(2, 0, 2, 5), "last group of 1 after groups of 2: that must be 0 or at least num_stages=2"),
        (lambda: parse_actions("F0.0 F0.01 B0.0"), "not an action.*'F0.01'"),
        (lambda: parse_actions("F0.1B0.1"), "not an action.*'F0.1B0.1'"),
        (lambda: parse_actions("F٣.1"), "not an action"),
        (lambda: validate("B0.0"), "B0.0 at position 0 runs before its forward"),
        (lambda: validate("F0.0 F1.0 F0.0"), "F0.0 at position 2 ran before, at position 0"),
        (lambda: validate("F0.0 B0.0 F0.1 B0.0"), "B0.0 at position 3 ran before, at position 1"),
        (lambda: validate("F0.0 F0.1 B0.0"), "F0.1 at position 1 has no backward"),
    ],
)
def test_impossible_shapes_words_and_orders(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


@settings(deadline=None, derandomize=True, database=None)
@given(st.lists(st.builds(Action, st.sampled_from("FB"), st.builds(ChunkKey, st.integers(0, 30), st.integers(0, 99)))))
def test_parse_is_the_inverse_of_format(actions: list[Action]) -> None:
    assert parse_actions(format_actions(actions)) == actions


def validate(text: str) -> None:
    validate_actions(parse_actions(text))


# Running megatron-core's schedules with nothing but their order: every tensor is the key of its chunk.


class Record(list[Action]):
    """Stands in for megatron-core's forward and backward steps and notes their calls."""

    tokens = torch.zeros([], dtype=torch.int)

    def forward_step(self, *_: Any, current_microbatch: int, vp_stage: int | None = None, **__: Any) -> Any:
        key = ChunkKey(vp_stage or 0, current_microbatch)
        self.append(Action("F", key))
        return torch.tensor(key), self.tokens

    def backward_step(self, _input: Any, output: torch.Tensor, *_: Any) -> torch.Tensor:
        self.append(Action("B", ChunkKey(*output.tolist())))
        return torch.zeros(1)

    def combined_step(self, *arguments: Any, **kw: Any) -> tuple[Any, Any, Any]:
        """Forward of one chunk together with backward of another, in all-to-all overlap."""
        forward_model, backward_output = arguments[2], arguments[8]
        output = gradient = None
        if forward_model is not None:
            microbatch, virtual_stage = kw["current_microbatch"], kw.get("f_model_chunk_id")
            output, _ = self.forward_step(current_microbatch=microbatch, vp_stage=virtual_stage)
        if backward_output is not None:
            gradient = self.backward_step(None, backward_output)
        return output, self.tokens, gradient


def fake_group(size: int = 1, rank: int = 0) -> Any:
    return SimpleNamespace(size=lambda: size, rank=lambda: rank)


class FakeCommunicator:
    """Receives at once, whatever is asked for; the value does not matter."""

    def __init__(self, shape: Shape, rank: int, config: Any) -> None:
        self.config = config
        self.pp_group = fake_group(shape.pp, rank)
        self.virtual_pipeline_model_parallel_size = shape.vpp
        self.total_stages, self.current_stage = shape.pp, rank
        self.is_pp_first_stage, self.is_pp_last_stage = rank == 0, rank == shape.pp - 1

    def __getattr__(self, name: str) -> Any:
        assert name.startswith(("send_", "recv_"))
        both = name == "send_forward_backward_recv_forward_backward"
        return lambda *_, **__: (torch.zeros(1), torch.zeros(1)) if both else torch.zeros(1)


@contextlib.contextmanager
def steps_replaced(record: Record) -> Iterator[Any]:
    """Replace megatron-core's schedules module: its steps are recorded, and no tensor is made on a GPU."""
    schedules, combined = importlib.import_module(SCHEDULES), importlib.import_module(COMBINED)
    zeros = torch.zeros
    with contextlib.ExitStack() as stack:
        for module, name, stub in (
            (schedules, "forward_step", record.forward_step),
            (schedules, "backward_step", record.backward_step),
            (combined, "combined_forward_backward_step", record.combined_step),
            (combined, "set_streams", lambda **_: None),
            (torch, "zeros", lambda *args, device=None, **kw: zeros(*args, **kw)),
        ):
            stack.enter_context(mock.patch.object(module, name, stub))
        yield schedules


def make_config(shape: Shape) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=shape.pp * (shape.vpp or 1),
        hidden_size=8,
        num_attention_heads=1,
        pipeline_model_parallel_size=shape.pp,
        virtual_pipeline_model_parallel_size=shape.vpp,
        microbatch_group_size_per_vp_stage=shape.group,
        pipeline_dtype=torch.float32,
    )
    config.overlap_moe_expert_parallel_comm = shape.overlap  # its other conditions (MoE, bf16) are not about order
    return config


def make_groups() -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    groups = ProcessGroupCollection()
    for name in ("tp", "cp", "embd", "pos_embd", "pp", "dp", "dp_cp", "tp_dp_cp"):
        setattr(groups, name, fake_group())
    return groups


def record_megatron(shape: Shape, rank: int) -> list[Action]:
    """Record what the installed megatron-core calls on this rank, in order."""
    config, record = make_config(shape), Record()
    models = [torch.nn.Module() for _ in range(shape.vpp or 1)]
    for model in models:
        model.config, model.model_type = config, SimpleNamespace()  # type: ignore[assignment]
    arguments: dict[str, Any] = dict(
        forward_step_func=None,
        data_iterator=[None] * len(models),
        model=models,
        num_microbatches=shape.microbatches,
        seq_length=4,
        micro_batch_size=1,
        pg_collection=make_groups(),
    )
    with steps_replaced(record) as schedules:
        schedule = schedules.get_forward_backward_func(pp_size=shape.pp, vp_size=shape.vpp)
        if shape.pp > 1:
            arguments["p2p_communicator"] = FakeCommunicator(shape, rank, config)
        schedule(**arguments)
    return list(record)


def test_groups_that_are_passed_in_need_no_parallel_state() -> None:
    pytest.importorskip("megatron.core")
    from megatron_patches._rows.schedules import _pipeline_group, _stage_groups

    groups = make_groups()
    call = {"pg_collection": groups}
    assert _stage_groups(call) == (groups.dp_cp, groups.tp) and _pipeline_group(call) is groups.pp
    assert _stage_groups({}) == () and _pipeline_group({}) is None
