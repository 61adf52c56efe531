# SPDX-License-Identifier: Apache-2.0
"""A rehearsal has the groups of a real step, with the same bytes, and the figures that GPUs have shown."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests.dist.launch import Pipeline, run_ranks

NUM_MICROBATCHES = 4
NAMES = {
    "dense": ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"],
    "moe": ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "router", "router_fc1", "moe_act", "router_fc2"],
}
MIB = 1 << 20

Groups = list[list[tuple[str, int, int]]]
"""Of each virtual stage: name, layer and bytes of its groups."""


@pytest.mark.compat
@pytest.mark.parametrize(("kind", "shape"), [("dense", Pipeline(2)), ("moe", Pipeline(2, 2))], ids=str)
def test_groups_are_those_of_a_real_step(kind: str, shape: Pipeline) -> None:
    real = run_ranks(_real_groups, kind, pipeline=shape)
    (rehearsed,) = run_ranks(_rehearsed_groups, kind, shape, pipeline=None)
    assert rehearsed == real
    assert all(nbytes for groups in real for stage in groups for name, _, nbytes in stage if name == "core_attn")


def _real_groups(kind: str) -> Groups:
    """Return the groups that the engine counts on the CPU, of the last microbatch."""
    from megatron.core.transformer.moe import router

    from megatron_patches import apply
    from megatron_patches._rehearsal.rows import balanced
    from tests.dist.tiny import ALL, engine_of, make_chunks, make_config, run

    router.topk_routing_with_score_function = balanced(router.topk_routing_with_score_function)
    with apply(ALL.replace(dry_run=True), modules=NAMES[kind], has_report=False) as handle:
        chunks = make_chunks(make_config(kind))
        run(chunks, NUM_MICROBATCHES, forward_step=_forward_step)
        handle.record()
        run(chunks, NUM_MICROBATCHES, forward_step=_forward_step)
        groups = engine_of(handle).last_record.groups  # type: ignore[union-attr]
    found: Groups = [[] for _ in chunks]
    for group in groups:
        stage, _, behind = group.group.partition(".")
        if behind.partition(":")[0] == str(NUM_MICROBATCHES - 1):
            found[int(stage)].append((group.name, group.layer, group.own_bytes))
    return found


def _forward_step(batches: Iterator[torch.Tensor], model: Any) -> Any:
    tokens = next(batches)
    positions = torch.arange(tokens.shape[1])[None].expand(tokens.shape[0], -1)
    return model(tokens, positions, None, labels=tokens), lambda output: (
        output.float().mean(),
        {"loss": output.mean()},
    )


def _rehearsed_groups(kind: str, shape: Pipeline) -> list[Groups]:
    """Return the groups of each rank of a pipeline, all of them from this process."""
    from megatron_patches._arguments import Settings
    from megatron_patches._rehearsal.job import TrainingJob
    from megatron_patches._rehearsal.stage import StageRehearsal
    from offload_engine import OffloadConfig
    from offload_engine.planning.hardware import find_hardware
    from tests.dist.tiny import MICRO_BATCH, SEQUENCE, VOCABULARY, make_config

    sizes = {"pipeline_model_parallel_size": shape.size, "virtual_pipeline_model_parallel_size": shape.virtual}
    job = TrainingJob(
        partial(make_config, kind),
        vocab_size=VOCABULARY,
        seq_length=SEQUENCE,
        micro_batch_size=MICRO_BATCH,
        num_microbatches=NUM_MICROBATCHES,
        world_size=shape.num_ranks,
        has_te=False,
        model={"share_embeddings_and_output_weights": False},
        has_data_parallelism=False,
        parallel=sizes,
    )
    hardware = find_hardware("h200")
    ranks = []
    for rank in range(shape.size):
        with StageRehearsal(job, hardware, hardware.link(1, False), rank).ready() as stage:
            outcome = stage.run(Settings(OffloadConfig(min_tensor_bytes=1, dry_run=True), tuple(NAMES[kind])))
        ranks.append([[(g.name, g.layer, g.nbytes) for g in chunk.groups] for chunk in outcome.shapes])
    return ranks


# From docs/results/2026-11-23_h200.md: MiB allocated on each rank, without offload and with, and ms of a step of each.
MEASURED = {
    "a": ([19_697], [11_515], 858.1, 1_320.9),
    "c-dense": ([16_887, 13_359], [7_246, 7_548], 972.4, 1_342.5),
}


@pytest.mark.parametrize("setup", MEASURED)
def test_figures_of_h200(setup: str) -> None:
    """Peaks within 0.1%, the step within 3%; with everything offloaded, which the link bounds, within 10%."""
    (found,) = run_ranks(_forecast_of_setup, setup, pipeline=None, timeout_s=600)
    for got, expected, tolerance in zip(found, MEASURED[setup], (1e-3, 1e-3, 0.03, 0.10), strict=True):
        assert got == pytest.approx(expected, rel=tolerance)


def _forecast_of_setup(name: str) -> list[Any]:
    from benchmarks.gpu import settings
    from megatron_patches._rehearsal.forecast import forecast_job
    from offload_engine.planning.hardware import find_hardware

    logging.disable(logging.WARNING)
    setup = settings.SETUPS[name]
    forecast = forecast_job(_job_of(setup.shape, setup.num_gpus), find_hardware(f"h200x{setup.num_gpus}"))
    peaks = [[rank.ways[way].peak_bytes // MIB for rank in forecast.ranks] for way in (0, 1)]
    return [*peaks, *(step.milliseconds for step in forecast.steps[:2])]


def _job_of(shape: Any, num_gpus: int) -> Any:
    """Return the job of a benchmark with TransformerEngine's layers."""
    from benchmarks.gpu import model
    from megatron_patches._rehearsal.job import TrainingJob

    def make_config(**changes: Any) -> Any:
        config = model.make_config(shape, False)
        return dataclasses.replace(config, perform_initialization=False, **changes)

    return TrainingJob(
        make_config,
        shape.vocab,
        shape.seq,
        shape.mbs,
        shape.nmb,
        num_gpus,
        model={"share_embeddings_and_output_weights": False, "position_embedding_type": "rope"},
        has_data_parallelism=False,
        optimizer_bytes=0,
        parallel={"pipeline_model_parallel_size": shape.pp, "virtual_pipeline_model_parallel_size": shape.vpp or None},
    )
