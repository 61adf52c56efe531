# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with inputs on the host: `CheckpointOffload`, and `checkpoint` for use inside it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import partial
from operator import methodcaller
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from offload_engine._compat.own_hooks import OwnHooks, pop_own
from offload_engine._compat.torch_private import tree_leaves
from offload_engine._saved.handles import PackedTensor, StayingTensor
from offload_engine._saved.quantized import PLAIN_TYPES, taken_apart
from offload_engine._saved.storage import TensorGroup
from offload_engine.chunk import ChunkOffloadHandler
from offload_engine.config import OffloadConfig
from offload_engine.engine import OffloadEngine
from offload_engine.errors import OffloadError
from offload_engine.frontends._common.compiling import refuse_when_compiled
from offload_engine.frontends._common.groups import SavedInGroup
from offload_engine.frontends._common.recording import RecordsSteps
from offload_engine.frontends._common.session import Session, is_in_backward
from offload_engine.policies import GroupWindow
from offload_engine.stats import IterationStats
from offload_engine.traits import GroupTraits

logger = logging.getLogger(__name__)

Checkpoint = Callable[..., Any]
"""A function called like `torch.utils.checkpoint.checkpoint`."""


class _InForce(NamedTuple):
    """A checkpoint function, and the object whose `with` has put it in force."""

    owner: object
    function: Checkpoint


_in_force: ContextVar[tuple[_InForce, ...]] = ContextVar("checkpoints_in_force", default=())
"""One for each `with` that this thread is in; `checkpoint` calls the last one."""


def put_in_force(owner: object, function: Checkpoint) -> None:
    """Make `checkpoint` call `function` in this thread, until `owner` takes it out of force."""
    _in_force.set((*_in_force.get(), _InForce(owner, function)))


def take_out_of_force(owner: object) -> None:
    """Undo the owner's last `put_in_force`, even if others have come after it. No-op without one."""
    entries = _in_force.get()
    last = max((i for i, entry in enumerate(entries) if entry.owner is owner), default=len(entries))
    _in_force.set(entries[:last] + entries[last + 1 :])


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **options: Any) -> Any:
    """Checkpoint like `torch.utils.checkpoint.checkpoint`, with the inputs on the host until the backward needs them.

    It offloads through the enclosing `with` of a `CheckpointOffload` or `manage_activations`. Pass it wherever a
    function like PyTorch's is expected, as in transformers:

    ```python
    model._set_gradient_checkpointing(True, offload_engine.checkpoint)
    with CheckpointOffload():
        train(model)
    ```

    Without gradients and during recomputation nothing is offloaded, so no enclosing `with` is needed there.

    Args:
        function: runs now, and once more in backward.
        args: its inputs. Tensors among them are offloaded; those inside lists and dictionaries are not.
        use_reentrant: as in PyTorch, but False by default.
        options: keyword arguments of `function`, and PyTorch's options (`preserve_rng_state`, `context_fn`,
            `determinism_check`, `debug`, `early_stop`).

    Returns:
        The outputs of `function`.

    Raises:
        OffloadError: if there is no enclosing `with`.
        CopyError: if a copy has failed.
    """
    if in_force := _in_force.get():
        return in_force[-1].function(function, *args, use_reentrant=use_reentrant, **options)
    if torch.is_grad_enabled() and not is_in_backward():
        raise OffloadError(
            "offload_engine.checkpoint() has no engine: call it inside `with CheckpointOffload():` or as a method of "
            "one. To checkpoint without offload, use torch.utils.checkpoint.checkpoint."
        )
    return torch_checkpoint(function, *args, use_reentrant=use_reentrant, **options)


class CheckpointOffload(RecordsSteps):
    """Owns an engine for the inputs of checkpointed functions. Inside its `with`, `checkpoint` uses it.

    Each call of `checkpoint` is one group: its saved inputs are copied out while the function runs, copied in ahead of
    the recomputation, and released after it. Checkpointing itself is PyTorch's, with its handling of random states,
    autocast and determinism checks. A storage that several calls share, such as an attention mask, is copied once and
    released after the last of them.

    Args:
        config: bounds and thresholds. The default policy is `policies.GroupWindow(2)`.
        weights: returns parameters and buffers, which never move. None: parameters that receive a gradient are
            recognized without it.
        engine: used instead of a new one, with its own config, device and meter. It must have no other user.

    Raises:
        ValueError: if both `config` and `engine` are given.
    """

    def __init__(
        self,
        config: OffloadConfig | None = None,
        *,
        weights: Callable[[], Iterable[torch.Tensor]] | None = None,
        engine: OffloadEngine | None = None,
    ) -> None:
        if config is not None and engine is not None:
            raise ValueError("CheckpointOffload() takes a config or an engine, which has one already; got both")
        if engine is None:
            engine = OffloadEngine((config or OffloadConfig()).with_default(GroupWindow(2)))
        self._session = Session(engine, weights)
        self._running: ChunkOffloadHandler | None = None  # the forward in which a checkpointed function is running
        self._has_warned = False

    @property
    def engine(self) -> OffloadEngine:
        """Return the engine that moves the tensors."""
        return self._session.engine

    @property
    def stats(self) -> IterationStats:
        """Return the counters of the running step, or of the last one. A step begins with its first checkpoint."""
        return self._session.stats

    def checkpoint(self, function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **options: Any) -> Any:
        """Checkpoint like the function `checkpoint`, with this engine."""
        return self.run(torch_checkpoint, function, *args, use_reentrant=use_reentrant, **options)

    def run(self, original: Checkpoint, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call `original(function, *args, **options)`, any checkpoint function, with its saved inputs on the host.

        A checkpoint nested in another one is not offloaded: the outer one does not save its inputs.

        Raises:
            CopyError: if a copy has failed.
            OffloadError: in code that torch.compile compiles, or after `close`.
        """
        if self._is_inside or not torch.is_grad_enabled():
            return original(function, *args, **options)
        refuse_when_compiled("a checkpoint that offloads its inputs")
        if is_in_backward():
            return original(function, *args, **options)
        self._session.check_open("CheckpointOffload()")
        function, args, options = _keywords_as_inputs(function, args, options)
        self._pop_leftover()
        chunk = self._session.chunk or self._session.start_forward()
        if chunk is None:  # the budget has decided that nothing leaves in this step
            return original(function, *args, **options)
        put_in_force(self, self.checkpoint)
        self._running = chunk
        try:
            # Now, so that the copy-out overlaps the function: autograd may save the inputs only after it.
            group = chunk.open_group("checkpoint", GroupTraits(read_once=True))
            inputs = [chunk.hooks.pack(arg) for arg in args if isinstance(arg, torch.Tensor)]
            chunk.close_group()
            with OwnHooks(partial(_pack, chunk, group), self._unpack):
                outputs = original(function, *args, **options)
        except BaseException:
            self._session.abandon_forward()
            raise
        finally:
            self._running = None
            take_out_of_force(self)
        self._check_saved(inputs, outputs)
        return outputs

    def end_forward(self) -> None:
        """End the forward, so that the next checkpoint starts another one. A backward also ends it. Idempotent."""
        if self._session.chunk is not None:
            self._session.warn_if_idle()
        self._session.end_forward()

    def close(self) -> None:
        """Return host memory to the system. Remaining graphs can no longer run their backward. Idempotent."""
        self._pop_leftover()
        self._session.close()

    def __enter__(self) -> CheckpointOffload:
        put_in_force(self, self.checkpoint)
        return self

    def __exit__(self, *exc_info: object) -> None:
        take_out_of_force(self)
        self.end_forward()

    @property
    def _is_inside(self) -> bool:
        """Return whether a checkpointed function is running. False after an interrupt has ended its forward."""
        return self._running is not None and self._running is self._session.chunk

    def _pop_leftover(self) -> None:
        """Pop hooks that an interrupt has left on the stack. Call it while no checkpointed function is running."""
        pop_own(lambda unpack: unpack == self._unpack)

    def _unpack(self, saved: SavedInGroup | StayingTensor) -> torch.Tensor:
        if is_in_backward():
            self._session.note_backward(saved.chunk if isinstance(saved, SavedInGroup) else None)
            self._turn_around()
        return saved.unpack()

    def _turn_around(self) -> None:
        """End the forward, because a backward runs: `end_forward` may not have been called."""
        if self._session.chunk is not None:
            self._session.chunk.recall_groups()
            self.end_forward()

    def _check_saved(self, inputs: Sequence[Any], outputs: Any) -> None:
        """Warn, once, if a checkpoint does not save its inputs through the hooks: offload has no effect on it."""
        packed = [handle for handle in inputs if isinstance(handle, PackedTensor)]
        if self._has_warned or not packed or any(len(handle.storage.handles) > 1 for handle in packed):
            return
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(outputs)):
            self._has_warned = True
            logger.warning(
                "a checkpoint did not save its inputs through saved tensors hooks, so they were not offloaded. If it "
                "offloads by itself, as with gradient_checkpointing_enable(offload=True), use only one of the two."
            )


def checkpoint_of_all_inputs(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Checkpoint with PyTorch's function, and save activations passed by keyword like positional ones."""
    function, args, options = _keywords_as_inputs(function, args, options)
    return torch_checkpoint(function, *args, **options)


def _pack(chunk: ChunkOffloadHandler, group: TensorGroup, tensor: torch.Tensor) -> SavedInGroup | StayingTensor:
    """Return what autograd keeps for an input, already packed by `group`. Other tensors stay on the device."""
    if type(tensor) not in PLAIN_TYPES:
        parts = taken_apart(tensor, partial(_pack, chunk, group), methodcaller("unpack"))
        if parts is not None:
            return parts
    packed = chunk.hooks.pack_ungrouped(tensor)
    return SavedInGroup(packed, group, chunk) if isinstance(packed, PackedTensor) else packed


def _keywords_as_inputs(
    function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Make activations passed by keyword positional: PyTorch's checkpoint saves only positional ones through hooks."""
    names = [name for name, value in options.items() if isinstance(value, torch.Tensor) and value.grad_fn is not None]
    if not names:
        return function, args, options

    def positional(*inputs: Any, **others: Any) -> Any:
        keywords = dict(zip(names, inputs, strict=False))
        return function(*inputs[len(names) :], **keywords, **others)

    rest = {name: value for name, value in options.items() if name not in names}
    return positional, (*(options[name] for name in names), *args), rest
