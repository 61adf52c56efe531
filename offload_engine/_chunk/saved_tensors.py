# SPDX-License-Identifier: Apache-2.0
"""`SavedTensorHooks`: packs tensors saved in a chunk, and manages the entries on autograd's stack of hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from offload_engine._chunk.group_stack import GroupStack
from offload_engine._compat import torch_private
from offload_engine._compat.own_hooks import OwnHooks, pop_own
from offload_engine._observe.reasons import Reason
from offload_engine._saved.handles import PackedTensor, StayingTensor, without_graph
from offload_engine._saved.quantized import PLAIN_TYPES, taken_apart
from offload_engine._saved.storage import TensorGroup
from offload_engine._saved.store import ActivationStore

# Torch's public context manager cannot tell whose hooks are the innermost.
_innermost_hooks: Final[Any] = torch_private.innermost_hooks
_pop_hooks: Final[Any] = torch_private.pop_hooks
_push_hooks: Final[Any] = torch_private.push_hooks
_PARAMETER: Final = torch.nn.Parameter

Checker = Callable[[torch.Tensor], bool]
Handle = PackedTensor | StayingTensor
Pack = Callable[[torch.Tensor], Any]


class SavedTensorHooks:
    """Owns the saved tensors hooks of one chunk.

    Args:
        store: packs tensors that may move.
        groups: of the chunk.
        checker: returns whether a saved tensor may move; None: all may.
    """

    def __init__(self, store: ActivationStore, groups: GroupStack, checker: Checker | None) -> None:
        self._store = store
        self._groups = groups
        self._checker = checker
        self._popped: list[Pack] = []  # pack functions of the paused hooks; innermost first
        self._pack_until: Pack | None = None  # pack function of the hooks that watch for the tensor to pause after

    # -- tensors -----------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Handle:
        """Pack a tensor saved in the innermost group; return what autograd keeps."""
        if type(tensor) not in PLAIN_TYPES and (parts := taken_apart(tensor, self.pack, self.unpack)) is not None:
            return parts
        open_groups = self._groups.open_groups
        # Without an open group, as in a stack of layers that opens none, the first saved tensor opens one.
        return self.pack_plain(tensor, open_groups[-1] if open_groups else self._groups.open("layer"))

    def pack_ungrouped(self, tensor: torch.Tensor) -> Handle:
        """Pack a tensor saved outside the groups; return what autograd keeps."""
        if type(tensor) not in PLAIN_TYPES and (
            (parts := taken_apart(tensor, self.pack_ungrouped, self.unpack)) is not None
        ):
            return parts
        return self.pack_plain(tensor, self._groups.ungrouped)

    def pack_plain(self, tensor: torch.Tensor, group: TensorGroup) -> Handle:
        """Pack a tensor for `group` that is not made of other tensors."""
        if type(tensor) is _PARAMETER and tensor.is_leaf:  # half of what layers with many experts save
            self._store.note_staying(tensor, group, Reason.WEIGHT)
            return StayingTensor(tensor)
        if self._checker is not None and not self._checker(tensor):
            self._store.note_excluded(tensor, group)
            return StayingTensor(without_graph(tensor))
        packed = self._store.pack(tensor, group)
        return packed if isinstance(packed, PackedTensor) else StayingTensor(packed)

    def would_start_storage(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` would move and no group has saved its storage yet."""
        return (self._checker is None or self._checker(tensor)) and self._store.would_start_storage(tensor)

    def unpack(self, packed: Handle) -> torch.Tensor:
        """Return the tensor that a handle stands for; raises as `ActivationStore.unpack`."""
        return self._store.unpack(packed) if isinstance(packed, PackedTensor) else packed.unpack()

    # -- autograd's stack of hooks -----------------------------------------------------------------------------------

    def in_group(self) -> OwnHooks:
        """Return a context manager for the forward of a group: tensors saved inside it belong to the group."""
        return OwnHooks(self.pack, self.unpack)

    def around_groups(self) -> OwnHooks:
        """Return a context manager for the whole forward of the chunk, around its groups.

        A tensor saved outside the groups stays on the device, unless a group saves the same storage, before or after:
        then it moves with that group. Without these hooks the copy-out of such a storage would free nothing, because
        autograd would hold the tensor itself as well.
        """
        return OwnHooks(self.pack_ungrouped, self.unpack)

    def push(self) -> None:
        """Push the hooks of `in_group()`, at less cost than its context manager."""
        _push_hooks(self.pack, self.unpack)

    def pop(self) -> None:
        """Undo `push`. Hooks pushed since then must have been popped."""
        _pop_hooks()

    def are_innermost(self) -> bool:
        """Return whether the innermost hooks are these, or there are none: False inside torch's checkpoint."""
        top = _innermost_hooks(True)
        return top is None or top[1] == self.unpack  # both pairs of hooks share it

    def pause_around_groups(self) -> bool:
        """Pause the hooks of `around_groups` until `resume`.

        This saves the host the cost of a hook per tensor. A tensor saved in the meantime stays on the device, even if a
        group saves it too, and no meter counts it. If a group saves it, do not pass it to
        `OffloadEngine.held_elsewhere`.

        Returns:
            False, without effect, if these hooks are not the innermost: in an open group, for instance.
        """
        if _innermost_hooks(True) != (self.pack_ungrouped, self.unpack):
            return False
        self._pop_all()
        return True

    def pause_behind(self, tensor: torch.Tensor) -> bool:
        """Pause all hooks of this chunk as soon as the whole of `tensor` has been saved, until `resume`.

        For a module that saves its input and hundreds of weights. The hooks pause after the input itself, or a view of
        all of it, has been saved; later tensors are treated as under `pause_around_groups`.

        Returns:
            False, without effect, if the innermost hooks are not this chunk's, or already watch for such a tensor.
        """
        innermost = _innermost_hooks(True)
        if innermost is None or innermost[1] != self.unpack or innermost[0] is self._pack_until:
            return False
        pack, begin, size = innermost[0], tensor.data_ptr(), tensor.numel()

        def pack_until(saved: torch.Tensor) -> Any:
            packed = pack(saved)
            if saved.numel() == size and saved.data_ptr() == begin:
                self._pop_waiting()
                self._pop_all()
            return packed

        self._pack_until = pack_until
        _push_hooks(pack_until, self.unpack)
        return True

    def resume(self) -> None:
        """Undo `pause_around_groups` or `pause_behind`; call it only if that returned True."""
        if self._pack_until is not None:
            self._pop_waiting()
        while self._popped:
            _push_hooks(self._popped.pop(), self.unpack)

    def _pop_waiting(self) -> None:
        self._pack_until = None
        _pop_hooks()

    def _pop_all(self) -> None:
        while (top := _innermost_hooks(True)) is not None and top[1] == self.unpack:
            self._popped.append(top[0])
            _pop_hooks()


def pop_hooks_of(store: ActivationStore) -> None:
    """Pop the innermost hooks of this thread while they are those of chunks that save into `store`."""

    def is_own(unpack: Any) -> bool:
        owner = getattr(unpack, "__self__", None)
        return isinstance(owner, SavedTensorHooks) and owner._store is store

    pop_own(is_own)
