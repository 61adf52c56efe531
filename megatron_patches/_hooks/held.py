# SPDX-License-Identifier: Apache-2.0
"""Declares tensors that megatron-core keeps until backward in addition to autograd, after their last read.

While another reference keeps a tensor, its copy-out frees no memory, unless the tensor is declared as no longer read
(`OffloadEngine.held_elsewhere`). The last read is known only for megatron-core's own code. So tensors are not declared
if a decoder, a layer or a hook of the model comes from other code, which may keep a tensor and read it later, nor if
CUDA graphs capture layers: the next replay overwrites the output of a graph.

1. The input of a chunk's decoder. The schedule keeps the received tensor until the backward of that chunk and reads
   only its gradient; without a pipeline `GPTModel.forward` keeps the embeddings while it computes the loss. The first
   layer is the last reader.
2. The tensors that `CheckpointWithoutOutput` recomputes from. Before 0.20 it saves detached leaves, which autograd
   keeps together with the node that accumulates their gradient. The enclosing layer is the last reader, in a residual
   connection. It may be a layer inside an MTP layer, whose own input and norms are never recomputed in this way; under
   the all-to-all overlap it is a node that runs attention.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron_patches._model.graphs import is_captured_by_te
from megatron_patches._model.sites import is_megatron_cores
from megatron_patches._versions import installed_version, is_in_range
from offload_engine import OffloadEngine
from offload_engine._compat import torch_private

logger = logging.getLogger(__name__)

# Packages whose module hooks keep no tensor: this one, data parallelism, and TransformerEngine.
_KNOWN = ("megatron.core.", "megatron_patches.", "torch.", "transformer_engine.")
# Hooks on all modules that keep none: those of a recorded step, which should take the memory of any other step.
_RECORDING = "offload_engine."
_DETACHES = "<0.20"
"""Versions in which `CheckpointWithoutOutput` saves detached copies; later ones save the tensors themselves."""


class HeldTensors:
    """Declares to an engine which tensors of the running forward are held elsewhere, after their last read."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine: OffloadEngine = engine
        self._has_copies: bool = is_in_range(installed_version(), _DETACHES)
        self._has_other_readers: bool | None = None  # for the running step; None: not determined yet
        self._is_others: bool = False  # a chunk, decoder or layer is not megatron-core's, or is captured in a graph
        self._is_logged: bool = False
        self._seen: list[weakref.ref[torch.nn.Module]] = []  # modules whose hooks get these tensors
        self._is_input_read_later: bool = False
        self._input: list[torch.Tensor] = []  # the running decoder's input and its aliases
        self._recomputed_from: list[torch.Tensor] | None = None  # by the running layer; None: not collected
        self._are_outputs_read: bool = False  # the caller collects the outputs of layers, the inputs of others

    def attach(self, chunk: torch.nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Register hooks on a model chunk and yield their handles; none if a CUDA graph captures its layers."""
        if is_captured_by_te(getattr(chunk, "config", None)):
            self._is_others = True
            return
        for layer in _layers_ahead(chunk):
            yield layer.register_forward_pre_hook(self._enter_layer)
            yield layer.register_forward_hook(self._exit_layer)
        decoder = getattr(chunk, "decoder", None)
        layers = getattr(decoder, "layers", None)
        if not layers:
            return
        assert isinstance(decoder, torch.nn.Module)
        self._note_modules(chunk)
        yield chunk.register_forward_pre_hook(self._enter_chunk, with_kwargs=True)
        yield decoder.register_forward_pre_hook(self._enter_decoder, with_kwargs=True)
        for index, layer in enumerate(layers):
            yield layer.register_forward_pre_hook(self._enter_layer)
            if index == 0:
                yield layer.register_forward_hook(self._exit_first_layer, with_kwargs=True)
            else:
                yield layer.register_forward_hook(self._exit_layer)
        yield decoder.register_forward_hook(self._exit_decoder)

    def begin_step(self) -> None:
        """Start a step. Hooks may be added and removed between steps, so `has_other_readers` is determined again."""
        self._has_other_readers = None

    @property
    def has_other_readers(self) -> bool:
        """Return whether code other than megatron-core's gets the tensors to declare, and may read them later.

        Determined at the first use in a step, when the device has queued work; at the start of the step it would idle.
        """
        if self._has_other_readers is None:
            modules = [module for seen in self._seen if (module := seen()) is not None]
            self._has_other_readers = (
                self._is_others or _has_others_global_hooks() or any(map(_has_others_hooks, modules))
            )
            self._log_once()
        return self._has_other_readers

    def _log_once(self) -> None:
        if self._has_other_readers and not self._is_logged:
            self._is_logged = True
            logger.info(
                "layer inputs that the schedule keeps stay on the device: a decoder, a layer or a hook of this model "
                "is not megatron-core's and may read them later, or a CUDA graph captures its layers"
            )

    def begin_layer(self) -> None:
        """Begin a layer, the last reader of tensors that `CheckpointWithoutOutput` saves in it."""
        is_declared = self._engine.is_active and not (self._are_outputs_read or self._is_others)
        self._recomputed_from = [] if is_declared else None

    def end_layer(self) -> None:
        """End a layer: declare the tensors that it has read for the last time."""
        recomputed_from, self._recomputed_from = self._recomputed_from, None
        if recomputed_from:
            self._declare([], recomputed_from)

    def note_recomputed_from(self, tensors: Iterable[Any]) -> None:
        """Note that `CheckpointWithoutOutput` has saved `tensors`, or detached copies of them."""
        if self._recomputed_from is not None and self._has_copies:
            leaves = (t for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad)
            self._recomputed_from += (t for t in leaves if not isinstance(t, torch.nn.Parameter))

    def take_copies(self, tensor: torch.Tensor | None) -> int:
        """Return how many detached copies of a tensor `CheckpointWithoutOutput` has saved in the running layer.

        The caller must declare the tensor then; `end_layer` does not.
        """
        if tensor is None or not self._recomputed_from:
            return 0
        others = [t for t in self._recomputed_from if _storage(t) != _storage(tensor)]
        num_copies = len(self._recomputed_from) - len(others)
        self._recomputed_from = others
        return num_copies

    def clear(self) -> None:
        """Forget the running forward, for instance after an exception."""
        self._input, self._recomputed_from = [], None

    def _note_modules(self, chunk: torch.nn.Module) -> None:
        blocks = [block for name in ("decoder", "mtp") if (block := getattr(chunk, name, None)) is not None]
        layers = [layer for block in blocks for layer in getattr(block, "layers", ())]
        self._is_others |= not is_megatron_cores(chunk, *blocks, *layers)
        inside = [*blocks, *filter(None, [getattr(chunk, "embedding", None)])]
        self._seen += (weakref.ref(module) for part in inside for module in part.modules())

    def _enter_chunk(self, chunk: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_input_read_later = getattr(chunk, "mtp_process", False) or is_input_of_others(chunk, args, kwargs)

    def _enter_decoder(self, decoder: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.clear()
        if not self._engine.is_active or self._is_others:
            return
        self._are_outputs_read = bool(kwargs.get("extract_layer_indices"))
        if not decoder.pre_process:
            assert isinstance(decoder.input_tensor, torch.Tensor)
            self._input = [decoder.input_tensor]
        elif not self._is_input_read_later:
            self._input = [_hidden_states(args, kwargs)]

    def _enter_layer(self, layer: torch.nn.Module, args: Any) -> None:
        self.begin_layer()

    def _exit_first_layer(
        self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        recomputed_from, self._recomputed_from = self._recomputed_from, None
        if recomputed_from is None:
            return
        if self._input:
            hidden_states = _hidden_states(args, kwargs)
            outputs = output if isinstance(output, tuple) else (output,)
            if any(hidden_states is tensor for tensor in outputs):  # an identity layer
                self._input = []
            elif _storage(hidden_states) == _storage(self._input[0]):  # an alias, if the input is a view
                self._input.append(hidden_states)
        self._declare(self._input, recomputed_from)

    def _exit_layer(self, layer: torch.nn.Module, args: Any, output: Any) -> None:
        self.end_layer()

    def _exit_decoder(self, decoder: torch.nn.Module, args: Any, output: Any) -> None:
        # Again: full recomputation calls the layers without gradients and saves their inputs afterwards.
        self._declare(self._input, [])
        self._input = []

    def _declare(self, tensors: list[torch.Tensor], recomputed_from: list[torch.Tensor]) -> None:
        holders: defaultdict[int, list[torch.Tensor]] = defaultdict(list)
        for tensor in (*tensors, *recomputed_from):
            holders[_storage(tensor)].append(tensor)
        if not holders or self.has_other_readers:
            return
        num_copies = Counter(map(_storage, recomputed_from))
        for storage, named in holders.items():
            self._engine.held_elsewhere(*named, num_copies=num_copies[storage])


def is_input_of_others(chunk: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the caller of a chunk, or of its plan, may read the decoder's input after the first layer.

    It may if it passes the input itself, or gets it back through an output processor or the configuration logger.

    Args:
        chunk: a model chunk.
        args: positional arguments of `GPTModel.forward`, or of the plan's constructor after the model.
        kwargs: keyword arguments of the call.
    """
    return (
        getattr(getattr(chunk, "config", None), "config_logger_dir", "") != ""
        or kwargs.get("output_processor") is not None
        or kwargs.get("decoder_input", args[3] if len(args) > 3 else None) is not None
    )


def _has_others_hooks(module: torch.nn.Module) -> bool:
    if not module._forward_hooks and not module._forward_pre_hooks:
        return False
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return not all(map(_is_known, hooks))


def _is_known(hook: Any) -> bool:
    while isinstance(hook, functools.partial):
        hook = hook.func
    return _module_of(hook).startswith(_KNOWN)


def _has_others_global_hooks() -> bool:
    hooks = (*torch_private.global_forward_hooks.values(), *torch_private.global_forward_pre_hooks.values())
    return not all(_module_of(hook).startswith(_RECORDING) for hook in hooks)


def _module_of(hook: Any) -> str:
    return getattr(hook, "__module__", None) or ""


def _layers_ahead(chunk: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the transformer layers inside the MTP layers."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    ahead = getattr(chunk, "mtp", None)
    return [m for m in ahead.modules() if isinstance(m, TransformerLayer)] if ahead is not None else []


def _hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    hidden_states = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    assert isinstance(hidden_states, torch.Tensor)
    return hidden_states


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
