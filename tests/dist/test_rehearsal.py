# SPDX-License-Identifier: Apache-2.0
"""A rehearsal has the groups of a real step, with the same bytes; the figures that GPUs have shown; and a budget's."""

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


# -- a budget: what is allocated is predicted --------------------------------------------------------------------------

SHARES = (0.02, 0.4, 0.8)
"""Of what lies between the lowest budget and no offload."""
MICROBATCHES = 2


@pytest.mark.parametrize("stages", [1, 2], ids=["one stage", "interleaved"])
def test_first_predictions_of_what_is_allocated_are_exact(stages: int) -> None:
    """Steps that have settled hold it. Copies that complete early are worth less than a group."""
    [(spread, largest, firsts)] = run_ranks(_first_decisions, stages, pipeline=None)
    assert len(firsts) == len(SHARES) and spread > 8 * largest
    assert any(recomputed for *_, recomputed in firsts) and any(moved for _, moved, _ in firsts), firsts
    assert all(recomputed or moved for _, moved, recomputed in firsts), firsts
    assert max(abs(error) for error, *_ in firsts) <= largest / 4, firsts


def _first_decisions(stages: int) -> tuple[int, int, list[tuple[int, int, int]]]:
    """Return what no offload holds above the lowest budget, the largest group, and what is found within each budget.

    That is by how much the prediction is wrong, and what is moved and recomputed.
    """
    from benchmarks.gpu.settings import Shape
    from megatron_patches._rehearsal.stage import StageRehearsal
    from offload_engine.planning.clocks import Link
    from offload_engine.planning.hardware import find_hardware
    from offload_engine.planning.shapes import largest_bytes

    layers, vpp = (6, 0) if stages == 1 else (12, 2)
    small = Shape(
        layers=layers, hidden=1024, ffn=3584, heads=8, seq=4096, nmb=MICROBATCHES, pp=stages, vpp=vpp, vocab=16_000
    )
    firsts = []
    with StageRehearsal(_job_of(small, stages), find_hardware("h200"), Link(55.0, 55.0), 0).ready() as stage:
        decider = _planned(stage, 1 << 40)[0].decider
        lowest, most = decider.chosen.floor.held_bytes, decider.chosen.top.held_bytes
        for share in SHARES:
            controller, predicted, held = _planned(stage, round(lowest + share * (most - lowest)))
            summary = controller.summary
            firsts.append((predicted - held, summary.offloaded_bytes, summary.recomputed_bytes))
    return most - lowest, largest_bytes(decider.known.job.shapes), firsts


def _planned(stage: Any, budget: int) -> tuple[Any, int, int]:
    """Run steps until the first decision has settled; return the controller, what was predicted, and what was held."""
    from megatron_patches._arguments import Settings
    from offload_engine import OffloadConfig

    runtime, made = stage._runtime, list[Any]()

    def make(step: Any, settings: Settings) -> Any:
        made.append(_BudgetEngine(settings.engine.replace(gpu_budget=budget), runtime.device))
        return made[-1]

    runtime._make_engine = make
    runtime.use(Settings(OffloadConfig(), tuple(stage.names()), has_report=False, may_recompute=True))
    while not made or made[-1].budget is None or made[-1].budget.decider.chosen is None:
        stage._step(MICROBATCHES)
    controller = made[-1].budget
    predicted = controller.decider.chosen.best.held_bytes
    controller.decider.budget_bytes = 1 << 40  # the decision stays, whatever it holds
    for _ in range(2):
        stage._step(MICROBATCHES)
    return controller, predicted, controller._last.peak_bytes


class _Gauge:
    """Reserves what is allocated, and nothing in vain."""

    def __init__(self, allocated: Any) -> None:
        self._allocated = allocated

    def peak_bytes(self) -> int:
        return int(self._allocated.peak_bytes)

    held_bytes = peak_bytes

    def reset(self) -> None:
        self._allocated.reset_peak()

    def outside_bytes(self) -> int:
        return 0

    def total_bytes(self) -> int:
        return 1 << 40

    def trim(self) -> None: ...


def _BudgetEngine(config: Any, device: Any) -> Any:  # noqa: N802  # a class, of packages that only a rank imports
    from offload_engine.engine import OffloadEngine

    class Engine(OffloadEngine):
        def __init__(self) -> None:
            device.memory = _Gauge(device.allocated)
            super().__init__(config, device, logs_first_step=False)
            self.budget._floor.optimizers.has_state = lambda num_steps: True  # type: ignore[union-attr,method-assign]

        def begin_iteration(self, *args: Any, **options: Any) -> None:
            now = device.clocks.now
            now.host = now.compute = max(now.host, now.compute)  # it has waited for the device
            super().begin_iteration(*args, **options)

    return Engine()
