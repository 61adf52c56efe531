# SPDX-License-Identifier: Apache-2.0
"""Activation offload of other packages, as they are: imported, or a single file of them loaded.

The single files import little besides torch: a device helper, a logger, a quantised tensor type. Where that is not
installed, stand-ins of a few lines take its place while the file is loaded, and nothing else does.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from .workload import Attach, Attached, Workload, attaching


def load(name: str, folder: Path | None) -> Attach:
    """Load the contender of this name, of another package than torch.

    Raises:
        ImportError: if it cannot take part; the message says why, and what would change that.
    """
    return _LOADERS[name](folder)


# ---- single files ----


def load_file(module: str, folder: Path | None, stand_ins: Mapping[str, Mapping[str, Any]]) -> Any:
    """Load `module` from its file below `folder` where that is given, else by import.

    Args:
        module: dotted name; its file is looked for under its whole path and as a file of its last name.
        folder: None: import only.
        stand_ins: modules that the file imports, with what it takes from them; used where they cannot be imported.
    """
    whole, package = Path(module.replace(".", "/") + ".py"), module.partition(".")[0]
    names = (whole, package + whole.name, f"{package}_{whole.name}")
    path = next((folder / name for name in names if (folder / name).exists()), None) if folder else None
    if path is None:
        return _import(module, hint=f"install it, or give its file {whole} below --rivals, now {folder}")
    spec = importlib.util.spec_from_file_location(f"_rival_{package}", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    with _standing_in(stand_ins):
        try:
            spec.loader.exec_module(loaded)
        except Exception as error:
            raise ImportError(f"{path} does not load: {error!r}") from error
    return loaded


def _import(module: str, hint: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # a package may fail in any way where a library of the system is missing
        raise ImportError(f"{module}: {type(error).__name__}: {str(error)[:120]}; {hint}") from error


@contextmanager
def _standing_in(modules: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    added: list[str] = []
    for name in [name for name in modules if not _is_importable(name)]:
        parts = name.split(".")
        for end in range(1, len(parts) + 1):  # parents first, as packages
            package = types.ModuleType(".".join(parts[:end]))
            package.__path__ = []
            if package.__name__ not in sys.modules:
                sys.modules[package.__name__] = package
                added.append(package.__name__)
        vars(sys.modules[name]).update(modules[name])
    try:
        yield
    finally:
        for name in added:
            del sys.modules[name]


def _is_importable(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:
        return False
    return True


# ---- verl ----


def _load_verl(folder: Path | None, enable_ckpt: bool) -> Attach:
    from torch.distributed.fsdp import FSDPModule

    helpers: dict[str, dict[str, Any]] = {
        "verl.utils.device": {"get_torch_device": lambda: torch.cuda},
        "verl.utils.fsdp_utils": {"FSDPModule": FSDPModule},
    }
    module = load_file("verl.utils.activation_offload", folder, helpers)

    def put(workload: Workload, stack: ExitStack) -> Attached:
        layers = list(workload.layers)
        stack.callback(_restore_forwards, layers)
        # It groups what FSDP wraps: without FSDP, the same layers.
        stack.enter_context(mock.patch.object(module, "FSDP2", type(layers[0])))
        module.enable_activation_offloading(workload.model, "fsdp2", enable_ckpt)
        return Attached()

    return attaching(put)


def _restore_forwards(layers: list[torch.nn.Module]) -> None:
    for layer in layers:
        vars(layer).pop("forward", None)  # the class's comes to light again


# ---- TRL and torchtune ----


def _load_trl(folder: Path | None) -> Attach:
    helpers: dict[str, dict[str, Any]] = {
        "accelerate": {"logging": types.SimpleNamespace(get_logger=logging.getLogger)},
        "accelerate.utils.versions": {"is_torch_version": lambda operation, version: True},
    }
    module = load_file("trl.models.activation_offloading", folder, helpers)
    with suppress(ImportError):  # where accelerate is installed its logger, with which TRL warns, asks for this
        importlib.import_module("accelerate.state").PartialState()

    def make(model: torch.nn.Module) -> Any:
        context = module.OffloadActivations()
        context.update_model_params(model)
        return context

    return _around_forward(make)


def _load_torchtune(folder: Path | None) -> Attach:
    nothing = type("NotInstalled", (), {})
    helpers: dict[str, dict[str, Any]] = {
        "torchao": {"__version__": "none"},
        "torchao.quantization": {"NF4Tensor": nothing},
        "torchao.dtypes.nf4tensor": {"NF4Tensor": nothing},
        "torchtune.modules": {"TiedLinear": nothing},
        "torchtune.utils": {"get_logger": logging.getLogger},
    }
    module = load_file("torchtune.training._activation_offloading", folder, helpers)
    return _around_forward(lambda model: module.OffloadActivations())


def _around_forward(make: Callable[[torch.nn.Module], Any]) -> Attach:
    def put(workload: Workload, stack: ExitStack) -> Attached:
        context = make(workload.model)
        return Attached(around_forward=lambda: context)

    return attaching(put)


# ---- TransformerEngine ----


def _load_te(folder: Path | None) -> Attach:
    hint = "needs transformer-engine[pytorch] 2.10 or later"
    module = _import("transformer_engine.pytorch.cpu_offload_v1", hint)

    def put(workload: Workload, stack: ExitStack) -> Attached:
        layers = list(workload.layers)
        weights = {p.untyped_storage().data_ptr() for p in workload.model.parameters()}
        context, synchronize = module.get_cpu_offload_context(
            True, num_layers=len(layers) - 1, model_layers=len(layers)
        )
        # Its own choice is what modules of TransformerEngine mark, of which this model has none.
        context.offload_handler.tensor_need_offloading_checker = lambda t: t.untyped_storage().data_ptr() not in weights
        stack.callback(_restore_forwards, layers)
        for layer in layers:
            layer.forward = _bracketed(layer.forward, context, synchronize)
        return Attached()

    return attaching(put)


def _bracketed(forward: Callable[..., Any], context: Any, synchronize: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def bracketed(*args: Any, **kwargs: Any) -> Any:
        with context:
            hidden = forward(*args, **kwargs)
        return synchronize(hidden)

    return bracketed


_LOADERS: dict[str, Callable[[Path | None], Attach]] = {
    "verl": lambda folder: _load_verl(folder, enable_ckpt=False),
    "verl_ckpt": lambda folder: _load_verl(folder, enable_ckpt=True),
    "trl": _load_trl,
    "torchtune": _load_torchtune,
    "te_v1": _load_te,
}
