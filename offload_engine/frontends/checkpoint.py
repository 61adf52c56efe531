"""Checkpointing with the inputs on the host: `CheckpointOffload`, and `checkpoint` to be used inside it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar, Token
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from offload_engine._compat.torch_private import tree_leaves
from offload_engine._saved.handles import PackedTensor, StayingTensor
from offload_engine._saved.storage import TensorGroup
from offload_engine.chunk import ChunkOffloadHandler
from offload_engine.config import OffloadConfig
from offload_engine.engine import OffloadEngine
from offload_engine.errors import OffloadError
from offload_engine.frontends._common.compiling import refuse_when_compiled
from offload_engine.frontends._common.groups import SavedInGroup
from offload_engine.frontends._common.session import Session, is_in_backward
from offload_engine.policies import GroupWindow
from offload_engine.stats import IterationStats
from offload_engine.traits import GroupTraits

logger = logging.getLogger(__name__)

Checkpoint = Callable[..., Any]
"""Called with a function and its arguments, as `torch.utils.checkpoint.checkpoint` is."""

checkpoint_in_force: ContextVar[Checkpoint | None] = ContextVar("checkpoint_in_force", default=None)
"""What `checkpoint` calls; a `with` sets it for as long as it lasts, in its own thread."""


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **options: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, with the inputs on the host until the backward needs them.

    It offloads through the `CheckpointOffload`, or the `manage_activations`, whose `with` it is called in. It fits in
    wherever a function like PyTorch's is asked for, as in transformers:

    ```python
    model._set_gradient_checkpointing(True, offload_engine.checkpoint)
    with CheckpointOffload():
        train(model)
    ```

    Without gradients, and in code that is being recomputed, there is nothing to offload, so it may be called anywhere.

    Args:
        function: to be run now, and once more in backward.
        args: its inputs. Tensors among them leave the device; those inside lists and dictionaries do not.
        use_reentrant: as in PyTorch, with its own default.
        options: keyword arguments of `function`, and PyTorch's options (`preserve_rng_state`, `context_fn`,
            `determinism_check`, `debug`, `early_stop`).

    Returns:
        What `function` returns.

    Raises:
        OffloadError: outside of both.
        CopyError: if a copy has failed.
    """
    in_force = checkpoint_in_force.get()
    if in_force is not None:
        return in_force(function, *args, use_reentrant=use_reentrant, **options)
    if torch.is_grad_enabled() and not is_in_backward():
        raise OffloadError(
            "offload_engine.checkpoint() does not know which engine to use: call it inside `with CheckpointOffload():` "
            "or as a method of one. To checkpoint without offload, use torch.utils.checkpoint.checkpoint."
        )
    return torch_checkpoint(function, *args, use_reentrant=use_reentrant, **options)


class CheckpointOffload:
    """An engine for the inputs of checkpointed functions. As a context manager it is the one that `checkpoint` uses.

    Each call of `checkpoint` is one group: what of its inputs is saved leaves the device while the function runs, comes
    back ahead of its recomputation, and goes again when that needs it no more. Checkpointing itself is PyTorch's:
    random states, autocast and the check of determinism are as there. A storage that several calls have in common, as
    an attention mask, is copied once, and goes with the last of them.

    Args:
        config: bounds and thresholds; without a policy, at most two groups on the device (`GroupWindow`).
        weights: parameters and buffers, which never move; None: those that receive a gradient are known without it.
        engine: to be used instead of a new one, with its own config, device and meter. Nobody else may drive it.

    Raises:
        ValueError: for both `config` and `engine`.
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
            config = config or OffloadConfig()
            engine = OffloadEngine(config if config.policy is not None else config.replace(policy=GroupWindow(2)))
        self._session = Session(engine, weights)
        self._tokens: list[Token[Checkpoint | None]] = []
        self._is_inside = False  # a checkpointed function runs
        self._has_warned = False

    @property
    def engine(self) -> OffloadEngine:
        """Moves the tensors."""
        return self._session.engine

    @property
    def stats(self) -> IterationStats:
        """Counters of the running step, or of the last one. A step begins with the first checkpoint of it."""
        return self._session.stats

    def checkpoint(self, function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **options: Any) -> Any:
        """As the function `checkpoint`, with this engine."""
        return self.run(torch_checkpoint, function, *args, use_reentrant=use_reentrant, **options)

    def run(self, original: Checkpoint, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call `original(function, *args, **options)`, some checkpoint, with the inputs that it saves on the host.

        In a checkpoint inside another one nothing is offloaded: the outer one saves no input of it.

        Raises:
            CopyError: if a copy has failed.
            OffloadError: in code that torch.compile compiles.
        """
        if self._is_inside or not torch.is_grad_enabled():
            return original(function, *args, **options)
        refuse_when_compiled("a checkpoint that offloads its inputs")
        if is_in_backward():
            return original(function, *args, **options)
        function, args, options = _keywords_as_inputs(function, args, options)
        chunk = self._session.chunk or self._session.start_forward()
        assert chunk is not None
        token = checkpoint_in_force.set(self.checkpoint)
        self._is_inside = True
        try:
            # Here and not where autograd saves them, which may be after the function: so the copy-out overlaps it.
            group = chunk.open_group("checkpoint", GroupTraits(read_once=True))
            inputs = [chunk.tensor_push(arg) for arg in args if isinstance(arg, torch.Tensor)]
            chunk.close_group()
            with torch.autograd.graph.saved_tensors_hooks(partial(_pack, chunk, group), self._unpack):
                outputs = original(function, *args, **options)
        except BaseException:
            self._session.abandon_forward()
            raise
        finally:
            self._is_inside = False
            checkpoint_in_force.reset(token)
        self._check_saved(inputs, outputs)
        return outputs

    def end_forward(self) -> None:
        """The next checkpoint belongs to another forward; a backward tells so by itself. Idempotent."""
        if self._session.chunk is not None:
            self._session.warn_if_idle()
        self._session.end_forward()

    def close(self) -> None:
        """Give host memory back. A graph that is still there cannot run its backward any more. Idempotent."""
        self._session.close()

    def __enter__(self) -> CheckpointOffload:
        self._tokens.append(checkpoint_in_force.set(self.checkpoint))
        return self

    def __exit__(self, *exc_info: object) -> None:
        checkpoint_in_force.reset(self._tokens.pop())
        self.end_forward()

    def _unpack(self, saved: SavedInGroup | StayingTensor) -> torch.Tensor:
        if is_in_backward():
            self._turn_around()
        return saved.unpack()

    def _turn_around(self) -> None:
        """A backward runs, so the forward is over, whether or not we were told."""
        self._session.note_backward()
        if self._session.chunk is not None:
            self._session.chunk.recall_groups()
            self.end_forward()

    def _check_saved(self, inputs: Sequence[Any], outputs: Any) -> None:
        """Warn, once, of a checkpoint whose inputs were taken out of our hands: to offload them has no effect."""
        packed = [handle for handle in inputs if isinstance(handle, PackedTensor)]
        if self._has_warned or not packed or any(handle.storage.num_handles > 1 for handle in packed):
            return
        if any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(outputs)):
            self._has_warned = True
            logger.warning(
                "a checkpoint has not saved its inputs through the hooks around it, so they were not offloaded; is it "
                "one that offloads by itself, as gradient_checkpointing_enable(offload=True)? Leave one of the two out"
            )


def checkpoint_of_all_inputs(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """PyTorch's, by which activations passed by keyword are saved as the others are."""
    function, args, options = _keywords_as_inputs(function, args, options)
    return torch_checkpoint(function, *args, **options)


def _pack(chunk: ChunkOffloadHandler, group: TensorGroup, tensor: torch.Tensor) -> SavedInGroup | StayingTensor:
    """What autograd keeps for an input, which `group` has taken charge of already. Anything else stays."""
    packed = chunk.hooks.pack_ungrouped(tensor)
    return SavedInGroup(packed, group, chunk) if isinstance(packed, PackedTensor) else packed


def _keywords_as_inputs(
    function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Activations passed by keyword, made positional: PyTorch saves those only, and keeps the others as they are."""
    names = [name for name, value in options.items() if isinstance(value, torch.Tensor) and value.grad_fn is not None]
    if not names:
        return function, args, options

    def positional(*inputs: Any, **others: Any) -> Any:
        keywords = dict(zip(names, inputs, strict=False))
        return function(*inputs[len(names) :], **keywords, **others)

    rest = {name: value for name, value in options.items() if name not in names}
    return positional, (*(options[name] for name in names), *args), rest
