# SPDX-License-Identifier: Apache-2.0
"""`LayerRecompute`: implements the third choice of a budget, to checkpoint a layer with its input offloaded."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from offload_engine._budget.decide import Decider
from offload_engine._budget.state import State
from offload_engine.engine import OffloadEngine
from offload_engine.frontends._layers.find_layers import Layer
from offload_engine.frontends._layers.layer_checkpoint import CheckpointedLayer
from offload_engine.frontends._layers.layer_host import LayerHost
from offload_engine.frontends._layers.recomputable import LayerWatch
from offload_engine.planning.choices import Choices
from offload_engine.planning.recompute import RecomputeOption
from offload_engine.planning.shapes import Shapes

logger = logging.getLogger(__name__)


class LayerRecompute:
    """Offers the layers of a model to the budget of its engine, and switches checkpointing as the budget chooses.

    Args:
        layers: layers of the model.
        groups: groups of those layers.
        engine: an engine with a budget.
    """

    def __init__(self, layers: Sequence[Layer], groups: LayerHost, engine: OffloadEngine) -> None:
        budget = engine.budget
        assert budget is not None
        self._decider: Decider = budget.decider
        self._has_gauge = engine.device.memory is not None
        self._watch = LayerWatch(
            layers, groups, lambda: budget.state in (State.FLOOR, State.MEASURE), self._decider.runs
        )
        self._switches = [CheckpointedLayer(layer, groups) for layer in layers]
        self._decider.find_options, self._decider.apply = self._find_options, self._apply
        self._has_logged = False

    def remove(self) -> None:
        """Restore the forward of each layer. Idempotent."""
        self._decider.find_options, self._decider.apply = lambda shapes: (), lambda choices: None
        self._apply(Choices())

    def _find_options(self, shapes: Shapes) -> tuple[RecomputeOption, ...]:
        options = tuple(self._watch.offer(shapes))
        if not self._has_logged:
            self._has_logged = True
            logger.info(
                "gpu_budget: %d of %d layers may be checkpointed with their inputs offloaded%s",
                len(options),
                len(self._switches),
                "".join(f"; not {name}: {reason}" for name, reason in self._watch.refused().items()),
            )
        if self._has_gauge:
            return options
        return tuple(dataclasses.replace(option, comes_back=False) for option in options)  # only groups are measured

    def _apply(self, choices: Choices) -> None:
        """Switch checkpointing as chosen. Called between two steps."""
        names, refused = {slot.name for slot in choices.recomputed}, self._watch.refused()
        for switch in self._switches:
            name = switch.layer.name
            if name in names and name in refused:
                logger.warning("gpu_budget: %s is not checkpointed, as its plan says: %s", name, refused[name])
            switch.switch(on=name in names and name not in refused)
