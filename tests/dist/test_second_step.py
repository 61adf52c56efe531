# SPDX-License-Identifier: Apache-2.0
"""The tables of the second training step: of all ranks, once, on rank 0, and without a rank that waits for ever."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_patches import apply
from megatron_patches._model.graphs import may_be_recorded
from tests.dist.launch import Pipeline, on_ranks, run_ranks
from tests.dist.tiny import ALL, fingerprint, make_chunks, make_config, messages, run

NUM_STEPS = 4


def tables() -> list[str]:
    """Return what is logged from now on; nothing else is at this level."""
    logging.getLogger("megatron_patches._second_step").setLevel(logging.INFO)
    return messages()


def train(chunks: list[torch.nn.Module]) -> list[float]:
    """A step, behind which data-parallel ranks wait for each other, as for their gradients."""
    losses = run(chunks, 4)
    torch.distributed.barrier()
    return losses


class Seen:
    """What one rank has logged of the tables, in which step, and what it has trained."""

    def __init__(self, modules: list[str], settings: dict[str, Any], **options: Any) -> None:
        logged = tables()
        self.tables, self.in_steps, self.num_emptied = list[str](), list[int](), list[int]()
        with apply(ALL, modules=modules, **options) as handle:
            chunks = make_chunks(make_config(**settings))
            for step in range(NUM_STEPS):
                losses = train(chunks)
                self.in_steps += [step] * (len(logged) - len(self.tables))
                self.tables = list(logged)
                self.num_emptied.append(-1 if handle.stats is None else handle.stats.num_emptied_storages)
            self.has_record = handle.engine is not None and handle.engine.last_record is not None
            self.report = handle.report()
        self.fingerprint = fingerprint(chunks, losses)

    def rows(self, module: str) -> list[list[str]]:
        """The cells of its rows in the table: rank, stage, layers, module, groups and so on."""
        lines = [re.split(r"\s*[│┃]\s*", line)[1:-1] for line in self.tables[0].splitlines()]
        return [cells for cells in lines if len(cells) > 3 and cells[3] == module]


def test_it_has_all_stages_once_on_rank_0() -> None:
    plain, (first, second) = (run_ranks(Seen, each, {}, pipeline=Pipeline(2, 2)) for each in ([], ["core_attn"]))
    assert first.in_steps in ([2], [3]) and second.in_steps == []
    stages = [(cells[0], cells[1]) for cells in first.rows("core_attn")]
    assert set(stages) == {(str(stage % 2), str(stage)) for stage in range(4)}
    assert first.has_record and second.has_record and "core_attn" in str(second.report)
    assert [rank.fingerprint for rank in (first, second)] == [rank.fingerprint for rank in plain]


@pytest.mark.parametrize(("shape", "offloading"), [(Pipeline(2), 0), (Pipeline(), 1)], ids=str)
def test_ranks_whose_model_does_not_offload(shape: Pipeline, offloading: int) -> None:
    first, second = run_ranks(_see_on_one, offloading, pipeline=shape, world_size=2)
    assert first.in_steps in ([2], [3]) and second.in_steps == []
    assert {cells[0] for cells in first.rows("core_attn")} == {str(offloading)}


def _see_on_one(offloading: int) -> Seen:
    return Seen([], {"offload_activation": torch.distributed.get_rank() == offloading})


@on_ranks(world_size=2, timeout_s=30)
def test_no_rank_waits_for_a_rank_without_patches() -> None:
    """Two data-parallel ranks, of which one was started without offload."""
    for offloading in (0, 1):
        if torch.distributed.get_rank() == offloading:
            assert len(Seen(["core_attn"], {}).tables) == int(offloading == 0)
        else:
            for _ in range(NUM_STEPS):
                train(make_chunks(make_config()))


@on_ranks()
def test_it_can_be_switched_off() -> None:
    off: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {"has_report": False}), ({"offload_report": False}, {})]
    for settings, options in off:
        seen = Seen(["core_attn"], settings, **options)
        assert not seen.tables and not seen.has_record


@on_ranks(Pipeline(2))
def test_the_recorded_step_empties_what_other_steps_empty() -> None:
    """Its hooks on all modules do not count as other readers of the inputs of stages."""
    num_emptied = Seen(["attn_norm"], {}).num_emptied
    assert num_emptied[0] > 0 and len(set(num_emptied)) == 1, num_emptied


@on_ranks(Pipeline(2))
def test_each_model_has_its_own() -> None:
    logged = tables()
    with apply(ALL):
        models = [
            make_chunks(make_config(offload_activation=True, offload_modules=[name]))
            for name in ("core_attn", "mlp_fc1")
        ]
        for chunks in (*models, *models, *models):
            train(chunks)
    # Each is logged by a thread of its own, in any order.
    expected = [] if torch.distributed.get_rank() else [(False, True), (True, False)]
    assert sorted(("core_attn" in text, "mlp_fc1" in text) for text in logged) == expected
    assert not any("other rank" in text for text in logged), "each waits for its own"


def test_what_may_be_captured_or_is_compiled_is_not_recorded_unasked() -> None:
    config = TransformerConfig(num_layers=2, hidden_size=8, num_attention_heads=2)
    compiled = {
        "module": lambda model: model[0].compile(backend="eager"),
        "wrapper": lambda model: model.append(torch.compile(model[1], backend="eager")),
        "forward": lambda model: setattr(model[0], "forward", torch.compile(model[0].forward, backend="eager")),
    }
    for how, compile_it in compiled.items():
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Tanh())
        assert may_be_recorded([model], config)
        compile_it(model)
        assert not may_be_recorded([model], config), how
    config.cuda_graph_impl = "transformer_engine"
    assert not may_be_recorded([torch.nn.Tanh()], config)
