# SPDX-License-Identifier: Apache-2.0
"""`TakeOver`: translates settings of megatron-core's own activation offload into the engine's.

A configuration keeps megatron-core's settings, and its own `__post_init__` checks them first. Only the two switches are
cleared, because the model reads them when it is built.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

logger = logging.getLogger(__name__)

_DEFAULTS = {"activation_offload_fraction": 1.0, "delta_offload_bytes_across_pp_ranks": 0}


class _Line(NamedTuple):
    """One setting and its translation."""

    before: str
    after: str
    field: str | None = None
    """Field of the configuration that gets `value`, unless it is set already."""

    value: Any = None


class TakeOver:
    """Translates configurations that ask for it, and logs the translations once.

    Args:
        is_for_all: take over from every configuration with megatron-core's offload, not only from those that have
            `offload_engine` set.
    """

    def __init__(self, is_for_all: bool) -> None:
        self.is_for_all: bool = is_for_all
        self._said: set[str] = set()

    def translate(self, config: Any) -> None:
        """Translate a configuration whose own `__post_init__` has run. No-op for one without megatron-core's offload.

        Raises:
            ValueError: if `offload_engine` is set and there is nothing to take over, or the setting moves nothing.
        """
        is_fine, is_layers = config.fine_grained_activation_offloading, config.cpu_offloading
        if not (self.is_for_all or config.offload_engine):
            return
        if not (is_fine or is_layers):
            _check_is_over(config)
            return
        lines = [*(_fine_grained(config) if is_fine else _layers(config))]
        config.offload_engine = config.offload_activation = True
        config.fine_grained_activation_offloading = config.cpu_offloading = False
        for line in lines:
            self._apply(config, line)

    def _apply(self, config: Any, line: _Line) -> None:
        after = line.after
        if line.field is not None:
            own = getattr(config, line.field)
            if own is None:
                setattr(config, line.field, line.value)
            elif own != line.value:
                after = f"nothing, because {line.field}={own} is set"
        text = f"{line.before} of megatron-core becomes {after}"
        if text not in self._said and _is_first_rank():
            logger.info(text)
        self._said.add(text)


def _check_is_over(config: Any) -> None:
    if config.offload_engine and not config.offload_activation:
        raise ValueError(
            "offload_engine=True takes over megatron-core's own offload, which this configuration does not ask for: "
            "set fine_grained_activation_offloading (--fine-grained-activation-offloading) or "
            "cpu_offloading_num_layers as well, or offload_activation=True (--offload-activation) instead"
        )


def _fine_grained(config: Any) -> Iterator[_Line]:
    names = ", ".join(config.offload_modules)
    yield _Line("fine_grained_activation_offloading", f"offload_activation, of {names}")
    elements = config.min_offloaded_tensor_size
    itemsize = _itemsize(config)
    yield _Line(
        f"min_offloaded_tensor_size={elements:,} elements",
        f"offload_min_tensor_bytes={elements * itemsize:,}, at {itemsize} bytes each",
        "offload_min_tensor_bytes",
        elements * itemsize,
    )
    if (fraction := _value(config, "activation_offload_fraction")) is not None:
        yield _Line(
            f"activation_offload_fraction={fraction:g} of the groups",
            f"offload_fraction={fraction:g} of their bytes",
            "offload_fraction",
            fraction,
        )
    if delta := _value(config, "delta_offload_bytes_across_pp_ranks"):
        yield _Line(
            f"delta_offload_bytes_across_pp_ranks={delta:,}",
            f"offload_rank_delta_bytes={delta:,}: pipeline rank r keeps r times as much",
            "offload_rank_delta_bytes",
            delta,
        )
    yield from _inflight(config)
    if getattr(config, "delay_offload_until_cuda_graph", False):
        yield _Line("delay_offload_until_cuda_graph", "nothing: copies are issued on streams of their own, at once")


def _inflight(config: Any) -> Iterator[_Line]:
    limit = getattr(config, "fine_grained_offloading_max_inflight_offloads", None)
    if limit is None:
        return
    before = f"fine_grained_offloading_max_inflight_offloads={limit}"
    if limit == 0:
        yield _Line(before, "offload_max_inflight_bytes=0", "offload_max_inflight_bytes", 0)
        return
    yield _Line(f"{before} of each name", "the engine's own bound: at most twice the largest group, of all names")


def _layers(config: Any) -> Iterator[_Line]:
    if not config.cpu_offloading_activations or not config.cpu_offloading_num_layers:
        raise ValueError(
            f"cpu_offloading=True with cpu_offloading_activations={config.cpu_offloading_activations} and "
            f"cpu_offloading_num_layers={config.cpu_offloading_num_layers} moves no activation: offload_engine has "
            "nothing to take over"
        )
    num = config.cpu_offloading_num_layers
    yield _Line(
        f"cpu_offloading_num_layers={num}",
        f"offload_num_layers={num}, of all names that these layers have",
        "offload_num_layers",
        num,
    )
    for name, why in (
        ("cpu_offloading_weights", "weights stay on the device"),
        ("cpu_offloading_double_buffering", "copies run ahead without it"),
        ("cpu_offloading_retain_pinned_cpu_buffers", "host memory is kept from step to step anyway"),
    ):
        if getattr(config, name, False):
            yield _Line(name, f"nothing: {why}")


def _value(config: Any, name: str) -> Any:
    """Return a setting that not every version has; None if it is absent or has its default."""
    value = getattr(config, name, None)
    return None if value == _DEFAULTS[name] else value


def _itemsize(config: Any) -> int:
    dtype = torch.bfloat16 if config.bf16 else torch.float16 if config.fp16 else torch.float32
    return dtype.itemsize


def _is_first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
