# SPDX-License-Identifier: Apache-2.0
"""Names of the settings made by hand. No torch here: pictures are drawn without it."""

from __future__ import annotations

from typing import Final

TITLES: Final = {
    "none": "no offload",
    "all": "everything offloaded",
    "layers_ckpt": "each layer checkpointed, its input offloaded",
    "layers": "two layers on the device",
    "ckpt": "each layer checkpointed",
    "half_layers": "half of the layers on the device",
    "bytes_1/3": "a third of the bytes on the device",
    "every_other": "every other layer offloaded",
    "bytes_2/3": "two thirds of the bytes on the device",
    "half_ckpt": "every other layer checkpointed, its input offloaded",
    "any_model": "manage_activations",
}
"""In this order they take their turns; the first two are the ends between which budgets are."""
