"""`TrainingOffload`: offload of the layers of a model from the begin to the end of its training by a trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import nn

from offload_engine.config import OffloadConfig
from offload_engine.frontends._layers.find_layers import strategy_of
from offload_engine.frontends.layers import LayerOffload, enable_activation_offloading

FindLayers = Callable[[nn.Module], Sequence[nn.Module]]

_REPORTED = (
    "copied_out_bytes",
    "copied_in_bytes",
    "kept_bytes",
    "prefetch_misses",
    "peak_resident_bytes",
    "peak_host_bytes",
)


class TrainingOffload:
    """What the callbacks of trainers share. One model at a time.

    Args:
        config: bounds and thresholds.
        enable_ckpt: checkpoint the layers as well, see `enable_activation_offloading`.
        layers: gives the layers of a model that is about to train; None: they are found.
    """

    def __init__(self, config: OffloadConfig | None, enable_ckpt: bool, layers: FindLayers | None) -> None:
        self._config = config
        self._enable_ckpt = enable_ckpt
        self._find_layers = layers
        self._handle: LayerOffload | None = None

    def attach(self, model: nn.Module) -> None:
        """Offload `model`, wrapped and sharded as it will train.

        Raises:
            ValueError: if no layers are found.
            OffloadError: if somebody else offloads the model.
        """
        self.detach()  # of a training that raised: its trainer may not have told us of its end
        self._handle = enable_activation_offloading(
            model,
            strategy_of(model),
            self._enable_ckpt,
            config=self._config,
            layers=None if self._find_layers is None else self._find_layers(model),
        )

    def detach(self) -> None:
        """Give the model back as it was. Idempotent."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def forward(self) -> AbstractContextManager[None]:
        """Around code that calls the layers and is not the forward of a module; nothing while none is attached."""
        return nullcontext() if self._handle is None else self._handle.forward()

    def metrics(self) -> dict[str, int]:
        """Counters of the last forward and backward, by names to log them under; empty while nothing is attached."""
        if self._handle is None:
            return {}
        stats = self._handle.stats
        return {f"offload_{name}": getattr(stats, name) for name in _REPORTED}
