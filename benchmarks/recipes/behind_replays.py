# SPDX-License-Identifier: Apache-2.0
"""The engine with copies of eager experts behind the next replay, as megatron-core's `delay_offload_until_cuda_graph`.

Between a replay and its experts the host waits for the routing, so that copies issued there delay no launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from megatron_patches._hooks.attach import Attachment
from megatron_patches._model.modules import is_in_experts

if TYPE_CHECKING:
    from megatron_patches import Handle


@contextmanager
def copied_behind_replays(handle: Handle) -> Iterator[None]:
    """Let groups of experts wait for a replay, in place of the end of their layer.

    They wait within half of `max_inflight_bytes`; by default that is the largest group, which may be less than what a
    layer saves.
    """
    bracket, replay = Attachment.bracket, torch.cuda.CUDAGraph.replay

    def delayed(attachment: Attachment, site: Any, is_last: bool = False) -> Any:
        is_delayed = site.is_before_experts or is_in_experts(site.name)
        return bracket(attachment, site._replace(is_before_experts=is_delayed), is_last)

    def replayed(graph: torch.cuda.CUDAGraph) -> None:
        replay(graph)
        chunk = handle.engine.active_chunk if handle.engine is not None else None
        if chunk is not None:  # in a forward
            chunk.note_launch()

    with (
        mock.patch.object(Attachment, "bracket", delayed),
        mock.patch.object(Attachment, "_attach_moe_layers", lambda *args: None),
        mock.patch.object(torch.cuda.CUDAGraph, "replay", replayed),
    ):
        yield
