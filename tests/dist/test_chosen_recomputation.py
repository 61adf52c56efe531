# SPDX-License-Identifier: Apache-2.0
"""What is switched on is what was chosen, also where the groups of two small ones are those of a large one."""

from __future__ import annotations

from itertools import combinations

import pytest

pytest.importorskip("megatron.core")

from megatron_patches._model.recompute_options import RecomputeOptions
from offload_engine.planning.choices import Choices
from offload_engine.planning.shapes import ChunkShape, GroupShape
from tests.dist.launch import run_ranks
from tests.dist.test_recompute_switches import MODELS, _config
from tests.dist.tiny import make_chunks

NAMES = ["moe_act", "router_fc2", "shared_fc1", "shared_fc2"]
"""An activation of experts and the shared experts together have all the groups of the MoE layer."""
OFFERED = {"grouped": {"moe_act", "shared_experts"}, "experts": {"moe"}}


@pytest.mark.parametrize("model", OFFERED)
def test_each_set_of_offers_is_switched_on_as_it_was_chosen(model: str) -> None:
    run_ranks(_check, model)


def _check(model: str) -> None:
    kind, settings, _ = MODELS[model]
    chunks = make_chunks(_config(kind, settings))
    options = RecomputeOptions(chunks, NAMES)
    groups = [GroupShape(name, layer=layer, nbytes=1 << 30, forward_ms=1.0) for layer in range(4) for name in NAMES]
    offers = options.find((ChunkShape(tuple(groups)),))
    assert {offer.name for offer in offers} == OFFERED[model]
    for layer in range(4):
        of_layer = [offer for offer in offers if {slot.layer for slot in offer.replaces} == {layer}]
        for number in range(len(of_layer) + 1):
            for chosen in combinations(of_layer, number):
                options.apply(Choices(recomputed=frozenset().union(*(offer.replaces for offer in chosen))))
                on = {(option.switch.layer, option.switch.name) for option in options._options if option.switch.is_on}
                assert on == {(layer, offer.name) for offer in chosen}
    options.restore()
