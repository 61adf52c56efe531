# SPDX-License-Identifier: Apache-2.0
"""The contenders, and how one model is switched between them.

Each is a context manager that puts itself on the model and takes itself off again, also after an exception in a step:
wrappers take the place of layers or their parts, checkpointing is the model's own (non-reentrant), and the rest is
around the forward or the step. Between two turns the model is as it was built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
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
from .link_bound import saved_bytes_per_token
from .workload import Attached, Workload

Attach = Callable[[Workload], AbstractContextManager[Attached]]


@dataclass(frozen=True)
class Ours:
    """How ours are configured."""

    engine: Mapping[str, Any]
    """Fields of `OffloadConfig`."""
    group_bytes: int | None = None
    """Of `manage_activations`; None: its default."""
    horizon: int | None = None
    """How many inputs of checkpoints may be on the device, that of the running one included; None: the defaults."""

    @property
    def config(self) -> OffloadConfig:
        return OffloadConfig.from_flags(**self.engine)

    @property
    def checkpoint_config(self) -> OffloadConfig:
        """Return the same with the horizon for inputs of checkpoints, unless another one is set."""
        if self.horizon is None or self.config.policy is not None:
            return self.config
        return self.config.replace(policy=GroupWindow(self.horizon))


def make_contender(name: str, ours: Ours, folder: Path | None) -> Attach:
    """Make a contender of `settings.CONTENDERS`; imports the package of a rival, or its file below `folder`."""
    if name in _OURS:
        attach = _OURS[name]
        return lambda workload: attach(workload, ours)
    return _PYTORCH[name] if name in _PYTORCH else rivals.load(name, folder)


# ---- PyTorch and transformers ----


@contextmanager
def _no_offload(workload: Workload) -> Iterator[Attached]:
    yield Attached()


@contextmanager
def _checkpointing(workload: Workload) -> Iterator[Attached]:
    workload.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    try:
        yield Attached()
    finally:
        workload.model.gradient_checkpointing_disable()
        workload.model.disable_input_require_grads()  # a hook that enabling adds and disabling leaves


@contextmanager
def _save_on_cpu(workload: Workload) -> Iterator[Attached]:
    yield Attached(around_forward=lambda: save_on_cpu(pin_memory=workload.is_cuda))


@contextmanager
def _offload_wrapper(workload: Workload) -> Iterator[Attached]:
    with _replaced([(workload.layers, name, layer) for name, layer in workload.layers.named_children()], _offloading):
        yield Attached()


@contextmanager
def _parts_offload_wrapper(workload: Workload) -> Iterator[Attached]:
    with _replaced(_parts_of(workload), lambda part: _offloading(checkpoint_wrapper(part))):
        yield Attached()


class _Unpinned(OffloadWrapper):
    """PyTorch's wrapper without the pinning that needs a GPU."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with save_on_cpu():
            return self._checkpoint_wrapped_module(*args, **kwargs)


def _offloading(module: torch.nn.Module) -> torch.nn.Module:
    return OffloadWrapper(module) if next(module.parameters()).is_cuda else _Unpinned(module)


def _parts_of(workload: Workload) -> list[tuple[Any, str, torch.nn.Module]]:
    return [(layer, name, part) for layer in workload.layers for name, part in layer.named_children()]


@contextmanager
def _replaced(
    parts: list[tuple[Any, str, torch.nn.Module]], wrap: Callable[[torch.nn.Module], torch.nn.Module]
) -> Iterator[None]:
    """Put wrappers in the place of some submodules, each given with its owner and its name there."""
    for owner, name, part in parts:
        setattr(owner, name, wrap(part))
    try:
        yield
    finally:
        for owner, name, part in parts:
            setattr(owner, name, part)


def _with_checkpointing(attach: Attach) -> Attach:
    @contextmanager
    def attach_both(workload: Workload) -> Iterator[Attached]:
        with _checkpointing(workload), attach(workload) as attached:
            yield attached

    return attach_both


_PYTORCH: dict[str, Attach] = {
    "none": _no_offload,
    "ckpt": _checkpointing,
    "save": _save_on_cpu,
    "torch": _offload_wrapper,
    "ckpt_save": _with_checkpointing(_save_on_cpu),
    "ckpt_torch": _with_checkpointing(_offload_wrapper),
    "parts_torch": _parts_offload_wrapper,
}


# ---- ours ----


@contextmanager
def offloaded_layers(
    workload: Workload,
    config: OffloadConfig,
    enable_ckpt: bool = False,
    layers: Sequence[torch.nn.Module] | None = None,
) -> Iterator[Attached]:
    """Put `enable_activation_offloading` on the model, for these layers of it; None: for all."""
    handle = enable_activation_offloading(workload.model, "none", enable_ckpt, config=config, layers=layers)
    try:
        yield Attached(stats=lambda: handle.stats, engine=handle.engine)
    finally:
        handle.remove()


@contextmanager
def _any_model(workload: Workload, ours: Ours, **changes: Any) -> Iterator[Attached]:
    options: dict[str, Any] = {} if ours.group_bytes is None else {"group_bytes": ours.group_bytes}
    manager = manage_activations(workload.model, ours.config.replace(**changes), **options)
    try:
        yield Attached(around_step=lambda: manager, stats=lambda: manager.stats)
    finally:
        manager.close()


@contextmanager
def _any_model_of_two_layers(workload: Workload, ours: Ours) -> Iterator[Attached]:
    """Allow as many bytes on the device as `enable_activation_offloading` allows itself."""
    two_layers = 2 * saved_bytes_per_token(workload.shape) * workload.num_tokens
    with _any_model(workload, ours, policy=ResidentBudget(two_layers)) as attached:
        yield attached


@contextmanager
def _wrapper(workload: Workload, ours: Ours) -> Iterator[Attached]:
    with _checkpointing(workload), _offloaded_inputs(workload, ours) as attached:
        yield attached


@contextmanager
def _parts(workload: Workload, ours: Ours) -> Iterator[Attached]:
    """Checkpoint norms, attention and MLP instead of layers: on the device is one MLP, not one layer."""
    with _replaced(_parts_of(workload), checkpoint_wrapper), _offloaded_inputs(workload, ours) as attached:
        yield attached


@contextmanager
def _offloaded_inputs(workload: Workload, ours: Ours) -> Iterator[Attached]:
    """Put `offload_wrapper` on each checkpointed part of the model."""
    handle: Any = offload_wrapper(workload.model, config=ours.checkpoint_config).activation_offload
    try:
        yield Attached(stats=lambda: handle.stats)
    finally:
        handle.remove()


_OURS: dict[str, Callable[[Workload, Ours], AbstractContextManager[Attached]]] = {
    "layers": lambda workload, ours: offloaded_layers(workload, ours.config),
    "layers_ckpt": lambda workload, ours: offloaded_layers(workload, ours.checkpoint_config, enable_ckpt=True),
    "any_model": _any_model,
    "any_model_2": _any_model_of_two_layers,
    "wrapper": _wrapper,
    "parts": _parts,
}
