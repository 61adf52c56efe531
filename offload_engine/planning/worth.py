# SPDX-License-Identifier: Apache-2.0
"""Decides what to keep first: orders groups by their worth per byte at the peak."""

from __future__ import annotations

from collections.abc import Mapping

from offload_engine.planning.choices import Choices, Slot
from offload_engine.planning.moves import OUT
from offload_engine.planning.predict import Predictor, summed
from offload_engine.planning.residents import groups_before
from offload_engine.planning.steps import Decision


def order_to_keep(predictor: Predictor, costs: Mapping[Slot, int]) -> list[Slot]:
    """Return the groups that move when everything is offloaded, in the order in which to keep them.

    Groups that are worth most per byte at the peak come first. Worth is host time, plus the exposed time of copies.
    Bytes that are not on the device at the peak, or would be there anyway, do not count. Among equals, layers whose
    backward comes first precede the others, because their copies have the least time.

    Args:
        predictor: predicts the steps.
        costs: see `peak_costs`.
    """
    num_moves = _num_moves(predictor)
    worth = _worth(predictor, num_moves)
    places = {slot: number for number, slot in enumerate(predictor.nbytes)}  # in the order of forward, by stage
    late = sorted(num_moves, key=lambda slot: -places[slot])
    return sorted(late, key=lambda slot: -worth[slot] / max(costs[slot], 1))


def ms_per_byte(predictor: Predictor) -> float:
    """Return how long it takes to copy a byte out and in."""
    link = predictor.costs.link
    return (1 / link.out_gbps + 1 / link.in_gbps) / 1e6


def _num_moves(predictor: Predictor) -> dict[Slot, int]:
    """Count the copy-outs of each slot that moves, when everything is offloaded."""
    moves = predictor.steps.planned(Decision()).plan.moves()
    return summed((predictor.slot_of(move.group), 1) for _, move in moves if move.op is OUT)


def _worth(predictor: Predictor, num_moves: Mapping[Slot, int]) -> dict[Slot, float]:
    """Return how many ms a step gains by keeping each slot."""
    per_byte, host_ms = ms_per_byte(predictor), predictor.costs.host_us / 1e3
    copy_ms = {slot: count * predictor.nbytes[slot] * per_byte for slot, count in num_moves.items()}
    total = sum(copy_ms.values())
    exposed = min(1.0, predictor.predict(Decision()).stalled_ms / total) if total else 0.0
    return {slot: count * host_ms + exposed * copy_ms[slot] for slot, count in num_moves.items()}


def peak_costs(predictor: Predictor) -> dict[Slot, int]:
    """Return by how many bytes keeping each slot would raise the peak of a step that keeps all, or none."""
    job = predictor.job
    decisions = [Decision(), Decision(Choices(frozenset(predictor.nbytes)))]
    steps = [predictor.steps.planned(decision) for decision in decisions]
    costs = dict.fromkeys(predictor.nbytes, 0)
    for step in steps:
        peak = predictor.model.others.peak_boundary(step.residents.before)
        if peak is None:
            continue
        none, every = (groups_before(job.actions, job.shapes, job.bounds, each.plan, peak) for each in steps)
        growth = summed((slot := predictor.slot_of(group), predictor.nbytes[slot]) for group in every - none)
        costs |= {slot: max(costs[slot], nbytes) for slot, nbytes in growth.items()}
    return costs
