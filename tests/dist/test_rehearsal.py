# SPDX-License-Identifier: Apache-2.0
"""A rehearsal has the groups of a real step, with the same bytes; the figures that GPUs have shown; and a budget's."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.gpu.settings import SETUPS, Shape
from megatron_patches import apply
from megatron_patches._arguments import Settings
from megatron_patches._model.candidates import find_candidates
from megatron_patches._rehearsal.forecast import _FULL, _rehearse_rank, forecast_job
from megatron_patches._rehearsal.job import TrainingJob
from megatron_patches._rehearsal.rows import balanced
from megatron_patches._rehearsal.stage import StageRehearsal
from offload_engine import OffloadConfig, OffloadEngine
from offload_engine.planning.clocks import Link
from offload_engine.planning.hardware import find_hardware
from offload_engine.planning.shapes import largest_bytes
from offload_engine.rehearsal.allocated import AllocatedBytes, Wasted
from offload_engine.rehearsal.device import StepClocks, steps_until_steady
from offload_engine.rehearsal.forecast import TE_CONTEXT_BYTES
from tests.dist.launch import Pipeline, on_ranks, run_ranks
from tests.dist.tiny import MICRO_BATCH, SEQUENCE, VOCABULARY, make_chunks, make_config, mean_loss, run

LONG = Path(__file__).parents[2] / "docs/results/2026-11-26_long_h200.jsonl"
BUDGETS = LONG.with_name("2026-11-27_arenas_h200.jsonl")
NUM_MICROBATCHES = 4
NAMES = {
    "dense": ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"],
    "moe": ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "router", "router_fc1", "moe_act", "router_fc2"],
}
MIB = 1 << 20

Groups = list[list[tuple[str, int, int]]]
"""Of each virtual stage: name, layer and bytes of its groups."""


@pytest.mark.parametrize(("kind", "shape"), [("dense", Pipeline(2)), ("moe", Pipeline(2, 2))], ids=str)
@pytest.mark.compat
def test_groups_are_those_of_a_real_step(kind: str, shape: Pipeline) -> None:
    real = run_ranks(_real_groups, kind, pipeline=shape)
    (rehearsed,) = run_ranks(_rehearsed_groups, kind, shape, pipeline=None)
    assert rehearsed == real
    assert all(nbytes for groups in real for stage in groups for name, _, nbytes in stage if name == "core_attn")


def _real_groups(kind: str) -> Groups:
    """Return the groups that the engine counts on the CPU, of the last microbatch."""
    from megatron.core.transformer.moe import router

    router.topk_routing_with_score_function = balanced(router.topk_routing_with_score_function)
    config = OffloadConfig(min_tensor_bytes=1, dry_run=True)
    with apply(config, modules=NAMES[kind], has_report=False) as handle:
        chunks = make_chunks(make_config(kind))
        run(chunks, NUM_MICROBATCHES, forward_step=_forward_step)
        handle.record()
        run(chunks, NUM_MICROBATCHES, forward_step=_forward_step)
        assert handle.engine is not None and handle.engine.last_record is not None
        groups = handle.engine.last_record.groups
    starts = [f"{stage}.{NUM_MICROBATCHES - 1}:" for stage in range(len(chunks))]
    return [[(g.name, g.layer, g.own_bytes) for g in groups if g.group.startswith(start)] for start in starts]


def _forward_step(batches: Iterator[torch.Tensor], model: Any) -> Any:
    tokens = next(batches)
    positions = torch.arange(tokens.shape[1])[None].expand(tokens.shape[0], -1)
    return model(tokens, positions, None, labels=tokens), mean_loss


def _rehearsed_groups(kind: str, shape: Pipeline) -> list[Groups]:
    """Return the groups of each rank of a pipeline, all of them from this process."""
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


@pytest.mark.parametrize(("reserving", "num_steps"), [({0}, 2), ({0, 1}, 3), ({0, 1, 2}, 3), (set(), 2)], ids=str)
def test_steps_are_rehearsed_until_one_reserves_nothing(reserving: set[int], num_steps: int) -> None:
    allocated, held = AllocatedBytes(lambda key: None), list[torch.Tensor]()
    for number, _ in enumerate(steps_until_steady(allocated, StepClocks(Link()))):
        if number in reserving:
            held.append(torch.empty(32 * MIB, dtype=torch.uint8))
            allocated.note(held[-1].untyped_storage())
    assert number + 1 == num_steps


def test_an_arena_has_room_for_what_separate_segments_have_not() -> None:
    """Not for what the steps find: that has been allocated before."""

    def note(nbytes: int) -> torch.Tensor:
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        allocated.note(tensor.untyped_storage())
        return tensor

    allocated = AllocatedBytes(lambda key: None)
    weights = note(64 * MIB)
    for _ in steps_until_steady(allocated, StepClocks(Link())):
        note(32 * MIB)
        note(96 * MIB)
        assert allocated.peak_bytes == 160 * MIB
    # The larger block has the smaller one's place in the arena, of which a 64th is spare, or a 32nd, in steps of 2 MiB.
    assert allocated.wasted_beside(allocated.peak_bytes) == (32 * MIB, 2 * MIB, 4 * MIB) and weights.numel()


@on_ranks(None, timeout_s=300)
def test_in_a_pipeline_an_arena_has_more_to_spare_where_nothing_moves() -> None:
    logging.disable(logging.WARNING)
    wasted = Wasted(nbytes=MIB, in_arena=2 * MIB, in_large_arena=4 * MIB)
    for stages, expected in ((1, 2 * MIB), (2, 4 * MIB)):
        job = _job_of(
            Shape(layers=2 * stages, hidden=256, ffn=512, heads=4, seq=512, nmb=2, vocab=512, pp=stages), stages
        )
        with mock.patch.object(AllocatedBytes, "wasted_beside", return_value=wasted):
            ranks = forecast_job(job, find_hardware("h200x2")).ranks
        assert [[way.wasted_in_arena for way in rank.ways[:2]] for rank in ranks] == [[expected, 2 * MIB]] * stages


# What GPUs have shown, from docs/results/2026-11-23_h200.md: MiB allocated, and ms of a step of all ranks; without
# offload, and with everything offloaded.
MEASURED = {
    "a": ([19_697], [11_515], 858.1, 1_320.9),
    "c-dense": ([16_887, 13_359], [7_246, 7_548], 972.4, 1_342.5),
}


@pytest.mark.parametrize("setup", MEASURED)
@on_ranks(None, timeout_s=600)
def test_figures_of_h200(setup: str) -> None:
    """Peaks within 0.1%, the step within 3%; with everything offloaded, which the link bounds, within 10%."""
    logging.disable(logging.WARNING)
    shape, num_gpus = SETUPS[setup], SETUPS[setup].pp
    forecast = forecast_job(_job_of(shape, num_gpus), find_hardware(f"h200x{num_gpus}"))
    peaks = [[rank.ways[way].peak_bytes // MIB for rank in forecast.ranks] for way in (0, 1)]
    found = (*peaks, *(step.milliseconds for step in forecast.steps[:2]))
    for got, expected, tolerance in zip(found, MEASURED[setup], (1e-3, 1e-3, 0.03, 0.10), strict=True):
        assert got == pytest.approx(expected, rel=tolerance)


@on_ranks(None, timeout_s=300)
def test_what_is_held_at_32768_tokens() -> None:
    """Within 5%, and 3.5% in the middle, of what H200s held; it was up to 11% low."""
    turns = [json.loads(line) for line in LONG.read_text().splitlines()]
    held: dict[tuple[str, str], int] = {}
    for turn in turns:
        if turn["kind"] == "turn" and turn["label"] in ("none", "recompute"):
            place, nbytes = (turn["setup"], turn["label"]), turn["peak_reserved_bytes"] + turn["outside_bytes"]
            held[place] = max(nbytes, held.get(place, 0))
    found = []
    for setup, way in held:
        shape = dataclasses.replace(SETUPS[setup], seq=32_768, nmb=1, vocab=8_192)
        changes = _FULL if way == "recompute" else {}
        with _ready(_job_of(shape, 1), **changes) as stage:
            outcome = stage.run(Settings(OffloadConfig(), (), has_report=False))
        found.append(outcome.peak_bytes + outcome.wasted.nbytes + TE_CONTEXT_BYTES)
    errors = sorted(abs(got / expected - 1) for got, expected in zip(found, held.values(), strict=True))
    assert len(errors) == 4 and errors[-1] < 0.05 and errors[2] < 0.035, errors


@pytest.mark.parametrize("setup", ["b", "c-dense"])
@on_ranks(None, timeout_s=600)
def test_what_budgets_hold_and_take(setup: str) -> None:
    """Held within 3.5% of what H200s did, and times within 8%. Without recomputation the lowest budget did not fit.

    But for the lowest budget of b at 32,768 tokens: its steps there were 19% longer, of a decision that nothing had
    replayed.
    """
    logging.disable(logging.WARNING)
    more = {"seq": 32_768, "nmb": 1, "vocab": 8_192} if setup == "b" else {}
    shape = dataclasses.replace(SETUPS[setup], **more)
    hardware, job = find_hardware(f"h200x{shape.pp}"), _job_of(shape, shape.pp)
    ranks: dict[int, Any] = {}

    def rehearse_once(*args: Any) -> Any:
        rank = args[3]
        if rank not in ranks:
            ranks[rank] = _rehearse_rank(*args)
        return ranks[rank]

    errors = []
    with mock.patch("megatron_patches._rehearsal.forecast._rehearse_rank", rehearse_once):
        for label, held, milliseconds in _measured_budgets(setup, shape.seq):
            forecast = forecast_job(job, hardware, hardware.gpu_bytes if label == "auto" else int(label))
            if label == "auto" or forecast.steps[0].fits:
                ways = [rank.ways[0] for rank in forecast.ranks]
                got = max(way.peak_bytes + way.wasted_in_arena + way.context_bytes for way in ways)
                errors.append((got / held - 1, forecast.steps[0].milliseconds / milliseconds - 1))
            else:
                step = forecast.steps[-1]
                assert step.name == "chosen within the budget" and step.gpu_bytes <= int(label)
                errors.append((step.gpu_bytes / held - 1, step.milliseconds / milliseconds - 1))
    assert len(errors) == {"b": 6, "c-dense": 4}[setup]
    assert max(abs(held) for held, _ in errors) < 0.035, errors
    assert sorted(abs(took) for _, took in errors)[-2 if setup == "b" else -1] < 0.08, errors


def _measured_budgets(setup: str, seq: int) -> list[tuple[str, int, float]]:
    """Return budgets, what H200s held at last within them, and the shortest step in ms."""
    found: dict[str, list[dict[str, Any]]] = {}
    is_wanted = False
    for line in BUDGETS.read_text().splitlines():
        turn = json.loads(line)
        if turn["kind"] == "run":
            is_wanted = (turn["setup"], turn["shape"]["seq"]) == (setup, seq) and "H200" in turn["device"]
        elif is_wanted and turn["contender"] == "budget":
            found.setdefault(turn["label"].removeprefix("budget "), []).append(turn)
    return [
        (
            label,
            max(turn["peak_reserved_bytes"] + turn["outside_bytes"] for turn in turns),
            min(min(turn["step_ms"]) for turn in turns),
        )
        for label, turns in found.items()
    ]


def _ready(job: TrainingJob, **changes: Any) -> Any:
    return StageRehearsal(job, find_hardware("h200"), Link(55.0, 55.0), 0, **changes).ready()


def _job_of(shape: Any, num_gpus: int) -> Any:
    """Return the job of a benchmark with TransformerEngine's layers."""
    from benchmarks.gpu import model

    def make_config(**changes: Any) -> Any:
        config = model.make_config(shape)
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


JOBS: dict[str, tuple[dict[str, int], float, tuple[float, ...]]] = {
    "one stage": ({"layers": 6}, 1 / 4, SHARES),
    "interleaved": ({"layers": 12, "pp": 2, "vpp": 2}, 1 / 4, SHARES),
    "experts": ({"layers": 6, "experts": 4, "moeffn": 1792, "vocab": 512}, 1 / 32, SHARES[1:]),
}
"""Sizes; the share of the largest group by which a prediction may err, where copies complete early; the budgets."""


@pytest.mark.parametrize("job", JOBS)
@on_ranks(None, timeout_s=300)
def test_first_predictions_of_what_is_allocated_are_exact(job: str) -> None:
    """They were up to 690 MiB too high, and 280 too low; with experts half a group too low, or a whole one too high."""
    more, tolerance, shares = JOBS[job]
    sizes = {"hidden": 1024, "ffn": 3584, "heads": 8, "seq": 4096, "nmb": MICROBATCHES, "vocab": 16_000}
    small = Shape(**{**sizes, **more})
    with _ready(_job_of(small, small.pp)) as stage:
        decider = _planned(stage, 1 << 40).decider
        lowest, most = decider.chosen.floor.held_bytes, decider.chosen.top.held_bytes
        again = {option.output_bytes for option in decider.known.costs.options if option.name in ("mlp", "moe")}
        assert again == {small.activation_bytes}
        largest = largest_bytes(decider.known.job.shapes)
        assert most - lowest > 8 * largest
        found = [_planned(stage, round(lowest + share * (most - lowest))) for share in shares]
    summaries = [controller.summary for controller in found]
    assert any(each.recomputed_bytes for each in summaries) and any(each.offloaded_bytes for each in summaries)
    assert all(each.recomputed_bytes or each.offloaded_bytes for each in summaries), summaries
    errors = [controller.first_bytes - controller.held_bytes for controller in found]
    assert max(map(abs, errors)) <= tolerance * largest, errors


def _planned(stage: Any, budget: int) -> Any:
    """Run steps until the first decision has settled; return the controller, with what was predicted and held."""
    names, _ = find_candidates(stage.config, stage.bare, True)
    runtime, made = stage._runtime, list[OffloadEngine]()

    def make(step: Any, settings: Settings) -> OffloadEngine:
        made.append(_BudgetEngine(settings.engine.replace(gpu_budget=budget), runtime.device))
        return made[-1]

    runtime._make_engine = make
    runtime.use(Settings(OffloadConfig(), names, has_report=False, may_recompute=True))
    while not made or made[-1].budget is None or made[-1].budget.decider.chosen is None:
        stage._step(MICROBATCHES)
    controller: Any = made[-1].budget
    controller.first_bytes = controller.decider.chosen.best.held_bytes
    controller.decider.budget_bytes = 1 << 40  # the decision stays, whatever it holds
    for _ in range(2):
        stage._step(MICROBATCHES)
    controller.held_bytes = controller._last.peak_bytes
    return controller


class _BudgetEngine(OffloadEngine):
    """Of a device that reserves what is allocated, and nothing in vain."""

    def __init__(self, config: OffloadConfig, device: Any) -> None:
        allocated, self.clocks = device.allocated, device.clocks
        values = {"outside_bytes": 0, "taken_bytes": 0, "total_bytes": 1 << 40, "record": False, "count": 0}
        device.memory = mock.Mock(**{f"{name}.return_value": value for name, value in values.items()})
        device.memory.peak_bytes = device.memory.held_bytes = lambda: int(allocated.peak_bytes)
        device.memory.reset = allocated.reset_peak
        super().__init__(config, device, logs_first_step=False)
        self.budget._floor.optimizers.has_state = lambda num_steps: True  # type: ignore[union-attr,method-assign]

    def begin_iteration(self, *args: Any, **options: Any) -> None:
        now = self.clocks.now
        now.host = now.compute = max(now.host, now.compute)  # it has waited for the device
        super().begin_iteration(*args, **options)
