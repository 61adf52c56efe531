# SPDX-License-Identifier: Apache-2.0
"""`Forecast`: predicts what training takes on a machine: memory per rank, time per step, host memory per node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from offload_engine.planning.choices import Choices
from offload_engine.planning.clocks import Link
from offload_engine.planning.hardware import Hardware
from offload_engine.planning.plan import Line, Plan, make_plan
from offload_engine.planning.planner import plan_step
from offload_engine.planning.predict import Prediction
from offload_engine.planning.recompute import RecomputeOption, options_of, with_recomputation
from offload_engine.planning.shapes import Bounds, Shapes, step_boundaries
from offload_engine.planning.simulate import PipelineJob, RankJob, Simulation, simulate
from offload_engine.schedule import Action

CONTEXT_BYTES: Final = 750 << 20
"""GPU memory of a process outside torch's allocator: CUDA's context, libraries. (A Qwen2: 750 to 772 MiB.)"""
TE_CONTEXT_BYTES: Final = 9112 << 20
"""The same where kernels of TransformerEngine run, of whatever model, on H200s: 9,112 to 9,180 MiB with 2.20.2."""
_HOST_SHARE: Final = 0.8
"""Share of a host's memory that may be pinned."""


CHOSEN: Final = "chosen within the budget"


class WayForecast(NamedTuple):
    """One rank trained in one way, for instance without offload."""

    name: str
    peak_bytes: int
    """Allocated at most."""
    wasted_bytes: int
    """Reserved by torch's allocator in vain."""
    milliseconds: float
    """Compute time, without waits for other ranks."""
    host_bytes: int = 0
    """Pinned bytes."""
    copied_out_bytes: int = 0
    """In the rehearsed step."""
    context_bytes: int = CONTEXT_BYTES
    """Of the GPU, outside torch's allocator."""
    wasted_in_arena: int = 0
    """`wasted_bytes` if an arena is reserved before each step, as under a budget."""

    @property
    def gpu_bytes(self) -> int:
        """Return about how many bytes the process holds on its GPU."""
        return self.peak_bytes + self.wasted_bytes + self.context_bytes


class RankForecast(NamedTuple):
    """One rank of the pipeline, or one that waits for no other."""

    num_parameters: int
    state_bytes: int
    """Weights, gradients and state of the optimizer."""
    actions: tuple[Action, ...]
    """Of a step; empty if it waits for no other."""
    shapes: Shapes
    ways: tuple[WayForecast, ...]
    """No offload, offload, and full recomputation if the model has it, in this order."""
    bounds: Bounds = Bounds()
    """Bounds of the offload policy."""
    is_combined: bool = False
    """Forward and backward of two chunks run together."""
    chosen: Prediction | None = None
    """Within the budget; None: it does not fit, or nothing was chosen."""
    options: tuple[RecomputeOption, ...] = ()
    """What its layers can recompute."""
    refusals: tuple[str, ...] = ()
    """What they have for that, and cannot be chosen: a line for each, with the reason."""
    kept: Choices = Choices()
    """Groups that stay on the device when the others are offloaded."""


class ModuleForecast(NamedTuple):
    """The groups of one name of a rank, over a step."""

    name: str
    num_groups: int
    nbytes: int
    moved_bytes: int
    """Copied out, and in again."""
    link_ms: float
    """Time of both copies."""
    exposed_ms: float
    """How long compute waits for them."""


class StepForecast(NamedTuple):
    """A step of all ranks, trained in one way."""

    name: str
    milliseconds: float
    gpu_bytes: int
    """GPU memory of the rank that holds the most."""
    host_bytes: int
    """Bytes pinned for all GPUs of a node together."""
    fits: bool


class Forecast(NamedTuple):
    """A whole training."""

    hardware: Hardware
    num_gpus: int
    gpus_of_node: int
    budget_bytes: int
    """What a process may hold on its GPU."""
    link: Link
    num_tokens: int
    """Tokens of a step."""
    optimizer_ms: float
    ranks: tuple[RankForecast, ...]
    modules: tuple[tuple[ModuleForecast, ...], ...]
    """The modules of each rank."""
    steps: tuple[StepForecast, ...]
    curve: tuple[StepForecast, ...] = ()
    """Steps within budgets from the lowest to one that all fits, each with more memory and less time than before."""

    @property
    def best(self) -> StepForecast | None:
        """Return the fastest step that fits; None: none does."""
        return min((step for step in self.steps if step.fits), key=lambda step: step.milliseconds, default=None)


def make_forecast(
    hardware: Hardware,
    link: Link,
    num_gpus: int,
    num_tokens: int,
    optimizer_ms: float,
    ranks: Sequence[RankForecast],
    budget_bytes: int,
) -> Forecast:
    """Combine the ranks of a pipeline.

    Args:
        hardware: machine of a node.
        link: link of each GPU.
        num_gpus: number of GPUs on all nodes.
        num_tokens: tokens of a step on all GPUs.
        optimizer_ms: time of the optimizer and of the reduction of gradients.
        ranks: ranks of the pipeline, in order.
        budget_bytes: bytes that a process may hold on its GPU.
    """
    per_node = min(hardware.num_gpus, num_gpus)
    host_limit = _HOST_SHARE * hardware.host_bytes
    kept = _simulated(ranks, link, [_no_moves(rank) for rank in ranks])
    moved = _simulated(ranks, link, [_all_moves(rank) for rank in ranks])
    milliseconds = [kept.milliseconds, moved.milliseconds]
    if all(len(rank.ways) > 2 for rank in ranks):  # longer by the ratio of its slowest rank
        longer = max(rank.ways[2].milliseconds / rank.ways[0].milliseconds for rank in ranks)
        milliseconds.append(kept.milliseconds * longer)
    steps = tuple(
        _step([rank.ways[index] for rank in ranks], each + optimizer_ms, per_node, budget_bytes, host_limit)
        for index, each in enumerate(milliseconds)
    )
    modules = tuple(_modules(rank, outcome.stalls, link) for rank, outcome in zip(ranks, moved.ranks, strict=True))
    forecast = Forecast(
        hardware, num_gpus, per_node, budget_bytes, link, num_tokens, optimizer_ms, tuple(ranks), modules, steps
    )  # fmt: skip
    return forecast if steps[0].fits else _with_chosen(forecast)


def _with_chosen(forecast: Forecast) -> Forecast:
    """Add the step that was chosen, if that of each rank fits."""
    chosen = [rank.chosen for rank in forecast.ranks if rank.chosen is not None]
    if len(chosen) < len(forecast.ranks):
        return forecast
    return forecast._replace(steps=(*forecast.steps, step_with(forecast, chosen)))


def step_with(forecast: Forecast, chosen: Sequence[Prediction]) -> StepForecast:
    """Predict a step with choices for each rank."""
    milliseconds, ways = _ways_with(forecast.ranks, chosen, forecast.link)
    return _step(
        ways,
        milliseconds + forecast.optimizer_ms,
        forecast.gpus_of_node,
        forecast.budget_bytes,
        _HOST_SHARE * forecast.hardware.host_bytes,
    )


def _ways_with(
    ranks: Sequence[RankForecast], chosen: Sequence[Prediction], link: Link
) -> tuple[float, list[WayForecast]]:
    """Return the time of a step with each rank's choices, without the optimizer, and the way of each rank."""
    if not ranks[0].actions:  # alone
        [best] = chosen
        moved = sum(best.moved_bytes.values())
        return best.step_ms, [_chosen_way(best, best.step_ms, moved, moved)]
    ranks = [_recomputing(rank, prediction.decision.choices) for rank, prediction in zip(ranks, chosen, strict=True)]
    plans, bounds = [], []
    for rank, prediction in zip(ranks, chosen, strict=True):
        choices, room = prediction.decision
        bounds.append(rank.bounds if room is None else Bounds(resident_bytes=room))
        plans.append(
            plan_step(rank.actions, rank.shapes, bounds[-1], choices=choices, is_combined=rank.is_combined)
        )  # fmt: skip
    simulation = _simulated(ranks, link, plans, bounds)
    ways = [
        _chosen_way(
            prediction, outcome.milliseconds, outcome.counters.peak_host_bytes, context_bytes=rank.ways[0].context_bytes
        )
        for rank, prediction, outcome in zip(ranks, chosen, simulation.ranks, strict=True)
    ]
    return simulation.milliseconds, ways


def _recomputing(rank: RankForecast, choices: Choices) -> RankForecast:
    return rank._replace(shapes=with_recomputation(rank.shapes, options_of(rank.options, choices.recomputed)))


def _chosen_way(
    best: Prediction, milliseconds: float, host_bytes: int, moved: int = 0, context_bytes: int = CONTEXT_BYTES
) -> WayForecast:
    wasted = best.overhead_bytes - context_bytes
    return WayForecast(CHOSEN, best.allocated_bytes, wasted, milliseconds, host_bytes, moved, context_bytes)


def forecast_alone(
    hardware: Hardware,
    link: Link,
    num_gpus: int,
    num_tokens: int,
    optimizer_ms: float,
    rank: RankForecast,
    budget_bytes: int,
) -> Forecast:
    """Return the forecast of identical ranks that wait for no other; see `make_forecast` for the arguments."""
    per_node = min(hardware.num_gpus, num_gpus)
    host_limit = _HOST_SHARE * hardware.host_bytes
    steps = tuple(
        _step([way], way.milliseconds + optimizer_ms, per_node, budget_bytes, host_limit) for way in rank.ways
    )
    ms_per_byte = (1 / link.out_gbps + 1 / link.in_gbps) / 1e6
    groups = [group for shape in rank.shapes for group in shape.groups]
    modules = []
    for way in rank.ways[1:]:
        exposed = max(0.0, way.milliseconds - rank.ways[0].milliseconds) if way is rank.ways[1] else 0.0
        moved = way.copied_out_bytes
        nbytes = sum(group.nbytes for group in groups)
        modules.append(ModuleForecast(way.name, len(groups), nbytes, moved, moved * ms_per_byte, exposed))
    forecast = Forecast(
        hardware, num_gpus, per_node, budget_bytes, link, num_tokens, optimizer_ms, (rank,), (tuple(modules),), steps
    )  # fmt: skip
    return _with_chosen(forecast)


def _simulated(
    ranks: Sequence[RankForecast], link: Link, plans: Sequence[Plan], bounds: Sequence[Bounds] | None = None
) -> Simulation:
    limits = bounds or [rank.bounds for rank in ranks]
    jobs = (RankJob(rank.actions, rank.shapes, limit) for rank, limit in zip(ranks, limits, strict=True))
    return simulate(PipelineJob(tuple(jobs), link), plans)


def _no_moves(rank: RankForecast) -> Plan:
    return make_plan([Line(boundary, ()) for boundary in step_boundaries(rank.actions, rank.shapes)])


def _all_moves(rank: RankForecast) -> Plan:
    return plan_step(rank.actions, rank.shapes, rank.bounds, choices=rank.kept, is_combined=rank.is_combined)


def _step(
    ways: Sequence[WayForecast], milliseconds: float, per_node: int, budget_bytes: int, host_limit: float
) -> StepForecast:
    gpu_bytes = max(way.gpu_bytes for way in ways)
    host_bytes = max(way.host_bytes for way in ways) * per_node
    fits = gpu_bytes <= budget_bytes and host_bytes <= host_limit
    return StepForecast(ways[0].name, milliseconds, gpu_bytes, host_bytes, fits)


def _modules(rank: RankForecast, stalls: dict[str, float], link: Link) -> tuple[ModuleForecast, ...]:
    runs = {
        stage: sum(a.kind == "F" and a.chunk.stage == stage for a in rank.actions) for stage in range(len(rank.shapes))
    }
    plan = _all_moves(rank)
    moved: dict[str, int] = {}
    for _, move in plan.moves():
        group = rank.shapes[move.group.chunk.stage].groups[move.group.index]
        if move.op.name == "OUT":
            moved[group.name] = moved.get(group.name, 0) + group.nbytes
    found: dict[str, tuple[int, int]] = {}
    for stage, shape in enumerate(rank.shapes):
        for group in shape.groups:
            number, nbytes = found.get(group.name, (0, 0))
            found[group.name] = number + runs[stage], nbytes + runs[stage] * group.nbytes
    exposed: dict[str, float] = {}
    for label, waited in stalls.items():
        name = label.partition(" ")[2]
        exposed[name] = exposed.get(name, 0.0) + waited
    ms_per_byte = (1 / link.out_gbps + 1 / link.in_gbps) / 1e6
    return tuple(
        ModuleForecast(name, number, nbytes, out := moved.get(name, 0), out * ms_per_byte, exposed.get(name, 0.0))
        for name, (number, nbytes) in found.items()
    )
