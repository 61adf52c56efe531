# SPDX-License-Identifier: Apache-2.0
"""Rehearses a training step of any model with layers, grouped as by `enable_activation_offloading`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from offload_engine.config import MIB, OffloadConfig
from offload_engine.frontends._layers.find_layers import find_layers
from offload_engine.frontends.layers import LayerOffload
from offload_engine.planning.clocks import Link
from offload_engine.planning.hardware import Hardware
from offload_engine.planning.memory import Job
from offload_engine.planning.predict import Costs
from offload_engine.planning.shapes import Shapes
from offload_engine.policies import LowestPeak, PolicySettings, ResidentLayers
from offload_engine.rehearsal.attention import fused_attention
from offload_engine.rehearsal.chosen import RankChooser, layer_options
from offload_engine.rehearsal.costs import KernelCosts
from offload_engine.rehearsal.curve import with_curve
from offload_engine.rehearsal.device import RehearsalDevice, StepClocks, steps_until_steady
from offload_engine.rehearsal.engine import NotedBoundary, RehearsalEngine
from offload_engine.rehearsal.failures import rehearsing
from offload_engine.rehearsal.forecast import Forecast, RankForecast, WayForecast, forecast_alone
from offload_engine.rehearsal.shapes import shapes_of
from offload_engine.rehearsal.tensors import HollowTensors
from offload_engine.schedule import no_pipelining

NUM_WAYS: Final = 4
"""Rehearsals of a model, the last of which is only needed if the first does not fit."""
_WORKSPACE_BYTES: Final = 64 << 20
"""Workspace of cuBLAS on Hopper."""
_PIECE_BYTES: Final = 1 << 30
"""The system may refuse a larger allocation than it has memory, although no page is ever touched."""


class ModelRehearsal:
    """Runs steps of one model on a machine.

    Args:
        make_model: makes the model; called where tensors are hollow.
        run_forward: returns the loss.
        hardware: machine of one node.
        num_gpus: number of GPUs, each with a replica of the model.
        optimizer_bytes: bytes of optimizer state per parameter.
        budget_bytes: bytes that a process may hold on its GPU; None: all of them.
        min_tensor_bytes: see `OffloadConfig`.
    """

    def __init__(
        self,
        make_model: Callable[[], torch.nn.Module],
        run_forward: Callable[[Any], torch.Tensor],
        hardware: Hardware,
        num_gpus: int = 1,
        optimizer_bytes: int = 8,
        budget_bytes: int | None = None,
        min_tensor_bytes: int = MIB,
    ) -> None:
        self._make_model = make_model
        self._run_forward = run_forward
        self._hardware = hardware
        self._num_gpus = num_gpus
        self._optimizer_bytes = optimizer_bytes
        self._budget_bytes = hardware.gpu_bytes if budget_bytes is None else budget_bytes
        self._min_tensor_bytes = min_tensor_bytes
        self._link: Link = hardware.link(min(num_gpus, hardware.num_gpus), is_both_ways=False)
        self._state_bytes = self._num_parameters = 0
        self._shapes: Shapes = ()
        self._boundaries: tuple[NotedBoundary, ...] = ()
        self._managed_bytes = 0

    @property
    def managed_bytes(self) -> int:
        """Return the bytes that the groups of the last step have saved."""
        return self._managed_bytes

    @property
    def shapes(self) -> Shapes:
        """Return the shape of a forward, as in the last step."""
        return self._shapes

    def forecast(
        self, num_tokens: int, on_progress: Callable[[], None] = lambda: None, has_curve: bool = False
    ) -> Forecast:
        """Rehearse the model without offload, with it, and with its layers checkpointed and their inputs offloaded.

        Args:
            num_tokens: tokens of one replica's step.
            on_progress: called `NUM_WAYS` times.
            has_curve: predict what every budget would take, too.

        If the model does not fit the budget without offload, each layer is chosen to be kept, offloaded or recomputed.
        """
        ways: list[WayForecast] = []
        shapes: Shapes = ()
        for name, settings in _WAYS.items():
            ways.append(self.run(name, **settings))
            on_progress()
            shapes = shapes or self._shapes
        optimizer_ms = 2 * self._state_bytes / self._hardware.memory_gbps / 1e6 if self._optimizer_bytes else 0.0
        is_short = ways[0].gpu_bytes > self._budget_bytes
        choosers = [self._chooser(shapes, self._shapes, ways[0])] if is_short or has_curve else []
        on_progress()
        chosen = choosers[0].within(self._budget_bytes) if is_short else None
        rank = RankForecast(self._num_parameters, self._state_bytes, (), shapes, tuple(ways), chosen=chosen)
        tokens = num_tokens * self._num_gpus
        found = forecast_alone(
            self._hardware, self._link, self._num_gpus, tokens, optimizer_ms, rank, self._budget_bytes
        )
        return with_curve(found, choosers) if has_curve else found

    def _chooser(self, saved: Shapes, checkpointed: Shapes, kept: WayForecast) -> RankChooser:
        """Rehearse a step in which everything is offloaded, by which to choose.

        Args:
            saved: shapes of a step without offload, whose times have no waits.
            checkpointed: shapes of a step with all layers checkpointed.
            kept: step without offload.
        """
        floor = self.run("everything offloaded", policy=LowestPeak())
        job = Job(tuple(no_pipelining(1)), saved)
        options = layer_options(saved, checkpointed)
        costs = Costs(self._link, options=options, floor_ms=floor.milliseconds)
        wasted = floor.wasted_in_arena, kept.wasted_in_arena
        return RankChooser(job, job, self._boundaries, costs, *wasted)

    def run(
        self,
        name: str,
        *,
        dry_run: bool = False,
        checkpoints: bool = False,
        policy: PolicySettings = ResidentLayers(),  # noqa: B008  # immutable
    ) -> WayForecast:
        """Rehearse a step; see `OffloadConfig`, and `enable_ckpt` of `enable_activation_offloading`.

        Raises:
            RehearsalError: if it fails.
        """
        hollow = HollowTensors(KernelCosts(self._hardware), self._hardware.peer_gbps)
        device = RehearsalDevice(StepClocks(self._link), hollow.allocated)
        hollow.run = device.clocks.run
        with rehearsing(f"a step with {name}"), hollow, fused_attention():
            model = self._make_model()
            state = self._hold_state(model)
            config = OffloadConfig(min_tensor_bytes=self._min_tensor_bytes, dry_run=dry_run, policy=policy)
            engine = RehearsalEngine(config, device)
            handle = LayerOffload(model, find_layers(model, None), engine, checkpoints)
            for _ in steps_until_steady(hollow.allocated, device.clocks):
                self._run_forward(model).backward()
                milliseconds = device.clocks.now.compute
                peak = max(engine.peak_bytes, hollow.allocated.peak_bytes)
            stats = engine.stats
            self._managed_bytes = stats.managed_bytes
            self._shapes, self._boundaries = shapes_of(engine.boundaries), tuple(engine.boundaries)
            wasted = hollow.allocated.wasted_beside(peak)
            moved = stats.copied_out_bytes
            way = WayForecast(
                name, peak, wasted.nbytes, milliseconds, stats.host_bytes, moved, wasted_in_arena=wasted.in_arena
            )
            handle.remove()
            del state
        return way

    def _hold_state(self, model: torch.nn.Module) -> list[torch.Tensor]:
        """Allocate gradients, which stay from step to step, and the state of the optimizer."""
        parameters = list(model.parameters())
        self._num_parameters = sum(parameter.numel() for parameter in parameters)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        held = self._optimizer_bytes * self._num_parameters
        weights = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
        self._state_bytes = 2 * weights + held
        pieces = [_PIECE_BYTES] * (held // _PIECE_BYTES) + [held % _PIECE_BYTES, _WORKSPACE_BYTES]
        return [torch.empty(nbytes, dtype=torch.uint8) for nbytes in pieces]


_WAYS: Final[dict[str, dict[str, Any]]] = {
    "no offload": {"dry_run": True},
    "layers offloaded": {},
    "layers checkpointed, inputs offloaded": {"checkpoints": True},
}
