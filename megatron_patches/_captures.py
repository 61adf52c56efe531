# SPDX-License-Identifier: Apache-2.0
"""`Captures`: announces CUDA graphs that megatron-core captures of steps and layers of the models in training."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch

from megatron_patches._hooks.attach import Attachment
from megatron_patches._model.graphs import captured_names, num_graphs_beside_copies
from megatron_patches._model.whole_steps import release_captured

logger = logging.getLogger(__name__)


class _Attached(Protocol):
    @property
    def attachment(self) -> Attachment: ...

    @property
    def modules(self) -> Sequence[str]: ...


class Captures:
    """Announces captures to the engine of the model that is captured.

    Args:
        attached: what is attached to the models, by their first chunk.
        set_running: called with the attachment whose layers are captured, and with None afterwards.
    """

    def __init__(
        self, attached: Mapping[torch.nn.Module, _Attached], set_running: Callable[[Attachment | None], None]
    ) -> None:
        self._attached = attached
        self._set_running = set_running

    def of_step(self, chunk: torch.nn.Module) -> AbstractContextManager[object]:
        """Return a context manager around the capture of the next step of the model with `chunk` as its first chunk."""
        attached = self._attached.get(chunk)
        return nullcontext() if attached is None else attached.attachment.engine.graphs.capture()

    @contextmanager
    def of_layers(self, chunk: torch.nn.Module, config: Any) -> Iterator[None]:
        """Return a context manager around the captures of the layers of the model with `chunk` as its first chunk."""
        attached = self._attached.get(chunk)
        if attached is None or not captured_names(config, attached.modules):
            yield
            return
        attachment = attached.attachment
        engine = attachment.engine
        if engine.graphs.layers:
            gc.collect()  # TransformerEngine before 2.10 resets no graph: cycles keep dropped ones alive
            engine.graphs.release_freed()
        self._set_running(attachment)  # for what selective recomputation keeps
        try:
            with engine.graphs.capture_layers(
                attachment.weights, saves_all=False, graphs_beside=num_graphs_beside_copies(config)
            ) as captured:
                yield
        finally:
            self._set_running(None)
        logger.info("%s", captured)

    def release(self, chunk: torch.nn.Module) -> None:
        """Release captures of that model whose graphs have been reset or freed."""
        if (attached := self._attached.get(chunk)) is not None:
            release_captured(attached.attachment.engine)
