# SPDX-License-Identifier: Apache-2.0
"""The contenders, and how one model is switched between them.

Each puts itself on the model, and leaves on a stack what takes it off again, also after an exception in a step: so
between two turns the model is as it was built. Wrappers take the place of layers or their parts, checkpointing is the
model's own (non-reentrant), and the rest is around the forward or the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import OffloadWrapper, checkpoint_wrapper

from offload_engine import (
    GroupWindow,
    OffloadConfig,
    ResidentBudget,
    enable_activation_offloading,
    manage_activations,
    offload_wrapper,
)

from . import rivals
from .workload import Attach, Attached, Workload, attaching


@dataclass(frozen=True)
class Ours:
    """How ours are configured."""

    config: OffloadConfig
    group_bytes: int | None = None
    """Of `manage_activations`; None: its default."""
    horizon: int | None = None
    """How many inputs of checkpoints may be on the device, that of the running one included; None: the defaults."""

    @property
    def checkpoint_config(self) -> OffloadConfig:
        """Return the same with the horizon for inputs of checkpoints."""
        return self.config if self.horizon is None else self.config.replace(policy=GroupWindow(self.horizon))


Put = Callable[[Workload, Ours, ExitStack], Attached]


def make_contender(name: str, ours: Ours, folder: Path | None) -> Attach:
    """Make a contender of `settings.CONTENDERS`; imports the package of a rival, or its file below `folder`."""
    put = _CONTENDERS.get(name)
    return rivals.load(name, folder) if put is None else attaching(lambda workload, stack: put(workload, ours, stack))


# ---- PyTorch and transformers ----


def _no_offload(workload: Workload, ours: Ours, stack: ExitStack) -> Attached:
    return Attached()


def _save_on_cpu(workload: Workload, ours: Ours, stack: ExitStack) -> Attached:
    return Attached(around_forward=lambda: save_on_cpu(pin_memory=workload.is_cuda))


def _checkpointing(workload: Workload, ours: Ours, stack: ExitStack) -> Attached:
    stack.callback(workload.model.disable_input_require_grads)  # a hook that enabling adds and disabling leaves
    stack.callback(workload.model.gradient_checkpointing_disable)
    workload.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Attached()


def _with_checkpointing(put: Put) -> Put:
    def put_both(workload: Workload, ours: Ours, stack: ExitStack) -> Attached:
        _checkpointing(workload, ours, stack)
        return put(workload, ours, stack)

    return put_both


def _offload_wrapper(workload: Workload, ours: Ours, stack: ExitStack) -> Attached:
    _replace(
        [(workload.layers, name, layer) for name, layer in workload.layers.named_children()], OffloadWrapper, stack
    )
    return Attached()


def _parts_offload_wrapper(workload: Workload, ours: Ours, stack: ExitStack) -> Attached:
    _replace(_parts_of(workload), lambda part: OffloadWrapper(checkpoint_wrapper(part)), stack)
    return Attached()


def _parts_of(workload: Workload) -> list[tuple[Any, str, torch.nn.Module]]:
    return [(layer, name, part) for layer in workload.layers for name, part in layer.named_children()]


def _replace(parts: Sequence[tuple[Any, str, Any]], wrap: Callable[[Any], Any], stack: ExitStack) -> None:
    """Put wrappers in the place of some submodules, each given with its owner and its name there."""
    for owner, name, part in parts:
        setattr(owner, name, wrap(part))
        stack.callback(setattr, owner, name, part)


# ---- ours ----


def put_layers(
    workload: Workload,
    stack: ExitStack,
    config: OffloadConfig,
    enable_ckpt: bool = False,
    layers: Sequence[Any] | None = None,
) -> Attached:
    """Put `enable_activation_offloading` on the model, for these layers of it; None: for all."""
    handle = enable_activation_offloading(workload.model, "none", enable_ckpt, config=config, layers=layers)
    stack.callback(handle.remove)
    return Attached(stats=lambda: handle.stats, engine=handle.engine)


def _any_model(workload: Workload, ours: Ours, stack: ExitStack, **changes: Any) -> Attached:
    options: dict[str, Any] = {} if ours.group_bytes is None else {"group_bytes": ours.group_bytes}
    manager = manage_activations(workload.model, ours.config.replace(**changes), **options)
    stack.callback(manager.close)
    return Attached(around_step=lambda: manager, stats=lambda: manager.stats)


def _any_model_of_two_layers(workload: Workload, ours: Ours, stack: ExitStack) -> Attached:
    """Allow as many bytes on the device as `enable_activation_offloading` allows itself."""
    return _any_model(workload, ours, stack, policy=ResidentBudget(2 * workload.layer_bytes))


def _offloaded_inputs(workload: Workload, ours: Ours, stack: ExitStack) -> Attached:
    """Put `offload_wrapper` on each checkpointed part of the model."""
    handle: Any = offload_wrapper(workload.model, config=ours.checkpoint_config).activation_offload
    stack.callback(handle.remove)
    return Attached(stats=lambda: handle.stats)


def _parts(workload: Workload, ours: Ours, stack: ExitStack) -> Attached:
    """Checkpoint norms, attention and MLP instead of layers: on the device is one MLP, not one layer."""
    _replace(_parts_of(workload), checkpoint_wrapper, stack)
    return _offloaded_inputs(workload, ours, stack)


_CONTENDERS: dict[str, Put] = {
    "none": _no_offload,
    "ckpt": _checkpointing,
    "save": _save_on_cpu,
    "torch": _offload_wrapper,
    "ckpt_save": _with_checkpointing(_save_on_cpu),
    "ckpt_torch": _with_checkpointing(_offload_wrapper),
    "parts_torch": _parts_offload_wrapper,
    "layers": lambda workload, ours, stack: put_layers(workload, stack, ours.config),
    "layers_ckpt": lambda workload, ours, stack: put_layers(workload, stack, ours.checkpoint_config, enable_ckpt=True),
    "any_model": _any_model,
    "any_model_2": _any_model_of_two_layers,
    "wrapper": _with_checkpointing(_offloaded_inputs),
    "parts": _parts,
}
