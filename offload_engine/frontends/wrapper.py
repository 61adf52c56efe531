# SPDX-License-Identifier: Apache-2.0
"""`offload_wrapper`: offloads the inputs of a model's checkpointed layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import nn

from offload_engine.config import OffloadConfig
from offload_engine.engine import OffloadEngine
from offload_engine.frontends._common.device import device_for
from offload_engine.frontends._common.recording import RecordsSteps
from offload_engine.frontends._common.weights import weights_of
from offload_engine.frontends.checkpoint import Checkpoint, CheckpointOffload
from offload_engine.policies import GroupWindow
from offload_engine.stats import IterationStats

_Model = TypeVar("_Model", bound=nn.Module)

DEFAULT_HORIZON = 2
PYTORCH = "checkpoint_fn"
"""Attribute of PyTorch's `CheckpointWrapper` with its checkpoint function."""
TRANSFORMERS = "_gradient_checkpointing_func"
"""The same attribute in modules of transformers, which call it if their `gradient_checkpointing` is set."""


def offload_wrapper(
    model: _Model,
    activation_loading_horizon: int | None = None,
    *,
    config: OffloadConfig | None = None,
    engine: OffloadEngine | None = None,
) -> _Model:
    """Offload the inputs of the checkpointed layers of `model`, the only tensors that checkpointing keeps.

    For models checkpointed with PyTorch's `apply_activation_checkpointing` or `checkpoint_wrapper`, or with
    `gradient_checkpointing_enable` of transformers; reentrant or not. Each input is copied out while its layer runs,
    copied in during the backward of the next layer, and released after the recomputation of its own layer.

    ```python
    model.gradient_checkpointing_enable()
    model = offload_wrapper(model)
    ```

    The function has PyTorch's name; `activation_loading_horizon` is that of SageMaker model parallel (SMP) v2, whose
    configurations `OffloadConfig.from_smp` reads.

    Args:
        model: on the device where it will train. Call this before DDP wraps it, before or after FSDP does.
        activation_loading_horizon: maximum number of inputs on the device at once, in forward and in backward, the one
            in use included; None: that of `config` or `engine`, otherwise 2. With 1, no copy overlaps compute.
        config: other bounds and thresholds; may have a horizon.
        engine: used instead of a new one, with its own config, device and meter. It must have no other user.

    Returns:
        The same model object. Only the checkpointing of its layers changes, not its type, the keys of its state dict,
        evaluation or `generate()`. A copy or a pickle of it is checkpointed without offload.
        `model.activation_offload` is the `WrapperHandle`, with `stats`, and `remove()` to undo everything.

    Raises:
        ValueError: if a horizon is not a positive integer, two horizons differ, both `config` and `engine` are given,
            no layer of the model is checkpointed, or the model is already wrapped.
    """
    if config is not None and engine is not None:
        raise ValueError("offload_wrapper() takes a config or an engine, which has one already; got both")
    settings = _with_horizon(config or OffloadConfig(), activation_loading_horizon)
    if engine is not None and activation_loading_horizon is not None and engine.config.policy != settings.policy:
        raise ValueError(
            f"activation_loading_horizon={activation_loading_horizon} comes too late for this engine: construct it "
            f"with OffloadConfig(policy={settings.policy})"
        )
    _check_model(model)
    if engine is None:
        engine = OffloadEngine(settings, device_for((model,), settings))
    offload = CheckpointOffload(weights=lambda: weights_of((model,)), engine=engine)
    model.activation_offload = WrapperHandle(model, offload)  # type: ignore[assignment]
    return model


class WrapperHandle(RecordsSteps):
    """Owns the changes of `offload_wrapper` to a model; the model has it as `activation_offload`."""

    def __init__(self, model: nn.Module, offload: CheckpointOffload) -> None:
        self._model = model
        self._offload = offload
        self._sites: Sequence[_Site] = _sites(model)
        self._hook = model.register_forward_pre_hook(_ForwardStart(self))
        self.install()

    @property
    def engine(self) -> OffloadEngine:
        """Return the engine that moves the inputs."""
        return self._offload.engine

    @property
    def stats(self) -> IterationStats:
        """Return the counters of the running step, or of the last one."""
        return self._offload.stats

    def install(self) -> None:
        """Replace each checkpoint function of the model, including those set since the last call. Idempotent."""
        for module, name in self._sites:
            original = getattr(module, name)
            if not isinstance(original, _OffloadedCheckpoint):
                setattr(module, name, _OffloadedCheckpoint(original, self._offload))

    def start_forward(self) -> None:
        """Start a forward of the model."""
        self._offload.end_forward()
        self.install()

    def remove(self) -> None:
        """Restore the checkpointing and return host memory to the system. Idempotent.

        Do not call it between a forward and its backward.
        """
        self._hook.remove()
        for module, name in self._sites:
            current = getattr(module, name)
            if isinstance(current, _OffloadedCheckpoint):
                setattr(module, name, current.original)
        self._sites = ()
        self._offload.close()
        if getattr(self._model, "activation_offload", None) is self:
            del self._model.activation_offload

    def __reduce__(self) -> Any:
        return type(None), ()  # a copied or unpickled model has no offload


class _Site(NamedTuple):
    """An attribute of a module that holds a checkpoint function."""

    module: nn.Module
    name: str


class _OffloadedCheckpoint:
    """Replaces a checkpoint function; a copy or a pickle of it is the original function."""

    def __init__(self, original: Checkpoint, offload: CheckpointOffload) -> None:
        self.original: Checkpoint = original
        self._offload = offload

    def __call__(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return self._offload.run(self.original, function, *args, **options)

    def __reduce__(self) -> Any:
        return _itself, (self.original,)


class _ForwardStart:
    """Hook that calls `WrapperHandle.start_forward`; a copy of it is a no-op."""

    def __init__(self, handle: WrapperHandle | None) -> None:
        self._handle = handle

    def __call__(self, module: nn.Module, args: Any) -> None:
        if self._handle is not None:
            self._handle.start_forward()

    def __reduce__(self) -> Any:
        return type(self), (None,)


def _itself(original: Checkpoint) -> Checkpoint:
    return original


def _sites(model: nn.Module) -> list[_Site]:
    """Return all attributes with checkpoint functions, also those of modules with checkpointing off."""
    # Instance attributes only: some wrappers forward the attributes of the wrapped module.
    return [_Site(m, name) for m in model.modules() for name in (PYTORCH, TRANSFORMERS) if name in vars(m)]


def _is_on(site: _Site) -> bool:
    return site.name == PYTORCH or getattr(site.module, "gradient_checkpointing", False)


def _check_model(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if vars(module).get("activation_offload") is not None:
            raise ValueError(
                f"{name or type(model).__name__} is already wrapped; call its activation_offload.remove() first"
            )
    if any(_is_on(site) for site in _sites(model)):
        return
    enable = (
        "model.gradient_checkpointing_enable()"
        if hasattr(model, "gradient_checkpointing_enable")
        else "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing(model, "
        "check_fn=lambda module: isinstance(module, YourLayer))"
    )
    raise ValueError(
        f"no layer of this {type(model).__name__} is checkpointed, and offload_wrapper() offloads the inputs of "
        f"checkpointed layers. Call {enable} first. A model that calls torch.utils.checkpoint.checkpoint itself can "
        "call offload_engine.checkpoint inside `with CheckpointOffload():` instead; to offload without checkpointing, "
        "use manage_activations()."
    )


def _with_horizon(config: OffloadConfig, horizon: int | None) -> OffloadConfig:
    """Return `config` with `horizon`, unless it has a policy of its own.

    Raises:
        ValueError: if `horizon` is not a positive integer, or differs from the policy of `config`.
    """
    if horizon is not None and (isinstance(horizon, bool) or not isinstance(horizon, int) or horizon < 1):
        raise ValueError(f"activation_loading_horizon must be a positive integer, got {horizon!r}")
    if horizon is not None and config.gpu_budget is not None:
        raise ValueError(
            f"activation_loading_horizon={horizon} and gpu_budget={config.budget_text} of the config both decide what "
            "stays on the device: set one of them"
        )
    if horizon is not None and config.policy not in (None, GroupWindow(horizon)):
        raise ValueError(
            f"activation_loading_horizon={horizon} and policy={config.policy} of the config are two horizons: set one"
        )
    return config.with_default(GroupWindow(DEFAULT_HORIZON if horizon is None else horizon))
