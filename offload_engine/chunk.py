"""`ChunkOffloadHandler`: the groups of one forward of one model chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import torch

from offload_engine._compat.te_base import HandlerBase
from offload_engine._policy.prefetch import ChunkGroups
from offload_engine._saved.handles import PackedTensor, StayingTensor, without_graph
from offload_engine._saved.quantized import PLAIN_TYPES, PackedParts, is_quantized_activation
from offload_engine._saved.storage import TensorGroup
from offload_engine.errors import OffloadError
from offload_engine.schedule import ChunkKey

if TYPE_CHECKING:
    from offload_engine._policy.moves import Mover


# The context manager for these has no way to ask whose hooks are the innermost.
_innermost_hooks: Final[Any] = torch._C._autograd._top_saved_tensors_default_hooks
_pop_hooks: Final[Any] = torch._C._autograd._pop_saved_tensors_default_hooks
_push_hooks: Final[Any] = torch._C._autograd._push_saved_tensors_default_hooks
_PARAMETER: Final = torch.nn.Parameter


def _any_tensor(_: torch.Tensor) -> bool:
    return True


class ChunkOffloadHandler(HandlerBase):  # type: ignore[misc]
    """Brackets the groups of one chunk and hands what they save to the engine. Made by `OffloadEngine.start_chunk`.

    It keeps the contract of TransformerEngine's `AsyncDoubleBufferGroupOffloadHandler`, so that library's
    `CpuOffloadHookWithOffloadHandler` and `GroupCommitFunction` can drive it for a stack of layers: without an open
    group, a push opens one and the next commit closes it. Unlike its base it shares streams and host memory with all
    chunks, has no window map, and takes any number of microbatches in flight.

    Args:
        key: virtual stage and microbatch.
        mover: the engine's part that moves groups.
        keep_groups: indices of the groups that stay resident.
        num_offload_group: groups from this index on stay resident too; None: no bound.
        tensor_need_offloading_checker: saved tensors for which it is false stay where they are.
        double_buffering: must be False.
        has_head: the backward comes at once, and `begin_head` will be called in front of the loss.

    Raises:
        NotImplementedError: for `double_buffering=True`.
    """

    current_group: int

    def __init__(
        self,
        key: ChunkKey,
        mover: Mover,
        *,
        keep_groups: frozenset[int] = frozenset(),
        num_offload_group: int | None = None,
        tensor_need_offloading_checker: Callable[[torch.Tensor], bool] = _any_tensor,
        double_buffering: bool = False,
        has_head: bool = False,
    ) -> None:
        if double_buffering:
            raise NotImplementedError(
                "double_buffering=True is not supported: with it TransformerEngine's handler returns wrong data as "
                "soon as its windows are uneven. Leave it off; copy-ins are prefetched into fresh buffers anyway."
            )
        # Skips the base's own __init__, which makes two streams per instance and the window map.
        bound = 2**63 if num_offload_group is None else num_offload_group
        super(HandlerBase, self).__init__(bound, tensor_need_offloading_checker)
        self.key: ChunkKey = key
        self.chunk_groups: ChunkGroups = ChunkGroups(key)
        self._mover = mover
        self._keep_groups = keep_groups
        self._has_head = has_head
        self._open: list[TensorGroup] = []  # innermost last
        self._rest = TensorGroup(key, -1, "outside the groups", is_kept=True, is_rest=True)
        self._popped: list[Callable[[torch.Tensor], Any]] = []  # of the hooks that pause; innermost first
        self._pack_until: Callable[[torch.Tensor], Any] | None = None  # of those that wait for what they pause behind

    def __repr__(self) -> str:
        return f"<ChunkOffloadHandler stage {self.key.stage} microbatch {self.key.microbatch}>"

    @property
    def innermost_group(self) -> TensorGroup | None:
        """The innermost open group, if any."""
        return self._open[-1] if self._open else None

    # -- groups ------------------------------------------------------------------------------------------------------

    def open_group(self, name: str) -> TensorGroup:
        """Start a group: what is saved from now on belongs to it, until `close_group`."""
        groups = self.chunk_groups.groups
        if self.current_group == 0 and groups and self.chunk_groups.is_forward_done:
            # Driven for another pass, after the backward of the last one came down to the first group.
            self.chunk_groups = ChunkGroups(self.key)
            self._mover.start_chunk(self.chunk_groups)
            groups = self.chunk_groups.groups
        index = len(groups)
        is_kept = index in self._keep_groups or index >= self.num_offload_group
        group = TensorGroup(self.key, index, name, is_kept)
        groups.append(group)
        self._open.append(group)
        self.current_group = index + 1
        return group

    def close_group(self) -> TensorGroup:
        """Commit the innermost open group: its copy-out is issued, unless it may wait.

        Raises:
            OffloadError: if no group is open.
            CopyError: if the copy-out of an earlier group has failed.
        """
        group = self._pop_open()
        self._mover.commit(group, self.chunk_groups, self._has_head)
        return group

    def keep_group(self) -> TensorGroup:
        """Close the innermost open group without a copy-out, because its backward comes at once.

        Raises:
            OffloadError: if no group is open.
        """
        group = self._pop_open()
        group.is_kept = True
        self._mover.keep(group)
        return group

    def begin_tail(self) -> None:
        """A computation begins that ends the forward and takes longer than the copies issued so far, such as the MLP of
        the last layer. It may save groups of its own. The next backward may then wait for those copies at no cost."""
        self._mover.begin_tail(self.chunk_groups)

    def begin_head(self) -> None:
        """The last layer is through and the logits are made: what was copied out is off the device for their loss.

        Idempotent. Nothing happens without `has_head`: then it is so from the first kept group on.
        """
        if self._has_head:
            self._mover.begin_head()

    def end_forward(self) -> None:
        """The forward is over: from now on the chunk may be prefetched, and what comes behind it. Idempotent.

        Else the next forward, or this chunk's own backward, says so.
        """
        self._mover.issue_waiting()
        self.chunk_groups.end_forward()

    def begin_backward(self) -> None:
        """The backward of the chunk begins: what it allocates shall find the bytes of older copies. Idempotent.

        Else the first of its groups says so, which may come behind the peak.
        """
        self._mover.end_tail(self.chunk_groups)

    def end_loss(self) -> None:
        """The backward has come through the loss of the chunk, and freed what that needed: its groups may come back.

        Else they begin to when the backward of the last of them begins. Where the forward ended with a tail, groups of
        the layers before the last come a layer ahead and no earlier: that backward, too, needs memory in large pieces.
        """
        self._mover.end_loss(self.chunk_groups)

    def pass_host_wait(self) -> None:
        """The device had to wait for the host and has work again: the copy-outs that waited for it are issued.

        While a copy is under way the host works more slowly: a read of memory that it has not cached takes two to four
        times as long. So groups committed with `TensorGroup.may_wait` are not copied before this is called, or a group
        commits that is copied at once, or the last block begins, or the forward is over. At most half of what may be
        in flight waits, and nothing where the link is behind: where as much is in flight as may be.

        Raises:
            OffloadError: if the host tier is full, and that is to be an error.
            CopyError: if an earlier copy has failed.
        """
        self._mover.pass_host_wait()

    def recall_groups(self) -> None:
        """The backward comes next: what is still being copied out stays on the device, where its bytes still are."""
        for group in self.chunk_groups.groups:
            self._mover.store.recall(group)

    def offload_kept_groups(self) -> None:
        """Another forward comes before the backward: issue the copy-out of what was to stay for it."""
        for group in self.chunk_groups.groups:
            self.keep_no_longer(group)

    def keep_no_longer(self, group: TensorGroup) -> None:
        """The backward of `group`, if that was to stay for it, does not come at once: issue its copy-out."""
        if group.is_kept and group.storages:
            self._mover.keep_no_longer(group)

    def abandon_group(self) -> None:
        """Forget the innermost open group, whose forward raised. What it saved goes with its graph."""
        if self._open:
            self._open.pop().is_kept = False

    def saved_tensors_hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Context manager for the forward of a group: hands what autograd saves to this handler."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def has_innermost_hooks(self) -> bool:
        """False where somebody else packs what is saved now: a checkpoint that counts what it will recompute, say."""
        top = _innermost_hooks(True)
        return top is None or top[1] == self._unpack  # which is that of both its pairs

    def push_hooks(self) -> None:
        """As to enter `saved_tensors_hooks()`, at less cost; `pop_hooks()` is as to leave it."""
        _push_hooks(self._pack, self._unpack)

    def pop_hooks(self) -> None:
        """Undo `push_hooks`. Hooks that were pushed since must have been popped."""
        _pop_hooks()

    def rest_hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Context manager for the whole forward of the chunk, around its groups.

        What is saved outside the groups stays on the device, unless a group saves the same storage too, before or
        after: then it leaves and comes back with that group. Without these hooks the copy of such a storage frees
        nothing, because the other saver still holds it.
        """
        return torch.autograd.graph.saved_tensors_hooks(self.pack_rest, self._unpack)

    def pause_rest_hooks(self) -> bool:
        """What is saved from now on does not go through `rest_hooks`, until `resume_hooks`.

        Spares the host what a hook costs for each tensor. It stays on the device, even where a group saves it too, and
        no meter counts it. Nothing of it may be told to `OffloadEngine.held_elsewhere`, if a group does save it too.

        Returns:
            False, and nothing changes, where `rest_hooks` are not the innermost hooks: in an open group, for instance.
        """
        if _innermost_hooks(True) != (self.pack_rest, self._unpack):
            return False
        self._pop_all_hooks()
        return True

    def pause_hooks_behind(self, tensor: torch.Tensor) -> bool:
        """What is saved behind the whole of `tensor` goes through no hooks of this chunk, until `resume_hooks`.

        For a module that saves its input and hundreds of weights. Nothing pauses before the input itself, or a view of
        all of it, has been saved; for what comes behind it the same holds as with `pause_rest_hooks`.

        Returns:
            False, and nothing changes, where the innermost hooks are not this chunk's, and in such a pause.
        """
        innermost = _innermost_hooks(True)
        if innermost is None or innermost[1] != self._unpack or innermost[0] is self._pack_until:
            return False
        pack, begin, size = innermost[0], tensor.data_ptr(), tensor.numel()

        def pack_until(saved: torch.Tensor) -> Any:
            packed = pack(saved)
            if saved.numel() == size and saved.data_ptr() == begin:
                self._pop_waiting_hooks()
                self._pop_all_hooks()
            return packed

        self._pack_until = pack_until
        _push_hooks(pack_until, self._unpack)
        return True

    def resume_hooks(self) -> None:
        """Undo `pause_rest_hooks` or `pause_hooks_behind`, where that returned True."""
        if self._pack_until is not None:
            self._pop_waiting_hooks()
        while self._popped:
            _push_hooks(self._popped.pop(), self._unpack)

    def pack_rest(self, tensor: torch.Tensor) -> PackedTensor | StayingTensor:
        """Pack one tensor saved outside the groups, as `rest_hooks` do."""
        if type(tensor) not in PLAIN_TYPES and is_quantized_activation(tensor):
            return PackedParts(tensor, self.pack_rest, self._unpack)
        return self._pack_plain(tensor, self._rest)

    # -- contract of TransformerEngine's handler ---------------------------------------------------------------------

    def tensor_push(self, tensor: torch.Tensor, **kwargs: Any) -> Any:
        """Pack one saved tensor: returns a handle, or the tensor itself where it stays."""
        group = self._open[-1] if self._open else self.open_group("layer")
        self.tensor_count_current_group += 1
        packed = self._pack_plain(tensor, group)
        return packed if isinstance(packed, PackedTensor) else packed.unpack()

    def tensor_pop(self, tensor_tag: Any, **kwargs: Any) -> torch.Tensor:
        """Unpack what `tensor_push` returned; may be called more than once, as for a retained graph."""
        if not isinstance(tensor_tag, PackedTensor):
            return tensor_tag
        return self._mover.store.unpack(tensor_tag)

    def on_group_commit_forward(self) -> TensorGroup | None:
        """Close the open group; no-op where nothing was opened, as in evaluation."""
        return self.close_group() if self._open else None

    def on_group_commit_backward(self, group: TensorGroup | None = None) -> None:
        """The backward of `group` begins; TransformerEngine's function names none and means the next one down."""
        index = max(self.current_group - 1, 0) if group is None else group.index
        self.current_group = index
        self._mover.begin_backward(self.chunk_groups, index)

    def on_group_start_backward(self) -> None:
        """The backward of a group is over."""
        self._mover.end_backward()

    def bulk_offload_group(self, group_to_offload: int) -> None:
        """Issue the copy-out of the group with this index. No-op for what has been copied out already."""
        self._mover.copy_out(self._group(group_to_offload))

    def bulk_reload_group(self, group_to_reload: int) -> None:
        """Issue the copy-in of the group with this index. No-op for what is resident."""
        self._mover.copy_in(self._group(group_to_reload))

    # -- private -----------------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> PackedTensor | StayingTensor:
        if type(tensor) not in PLAIN_TYPES and is_quantized_activation(tensor):
            return PackedParts(tensor, self._pack, self._unpack)
        return self._pack_plain(tensor, self._open[-1] if self._open else self.open_group("layer"))

    def _pack_plain(self, tensor: torch.Tensor, group: TensorGroup) -> PackedTensor | StayingTensor:
        if type(tensor) is _PARAMETER and tensor.is_leaf:  # half of what layers with many experts save
            return StayingTensor(tensor)
        checker = self.tensor_need_offloading_checker
        if checker is not _any_tensor and not checker(tensor):
            return StayingTensor(without_graph(tensor))
        packed = self._mover.store.pack(tensor, group)
        return packed if isinstance(packed, PackedTensor) else StayingTensor(packed)

    def _unpack(self, packed: PackedTensor | StayingTensor) -> torch.Tensor:
        return self._mover.store.unpack(packed) if isinstance(packed, PackedTensor) else packed.unpack()

    def _pop_waiting_hooks(self) -> None:
        self._pack_until = None
        _pop_hooks()

    def _pop_all_hooks(self) -> None:
        while (top := _innermost_hooks(True)) is not None and top[1] == self._unpack:
            self._popped.append(top[0])
            _pop_hooks()

    def _pop_open(self) -> TensorGroup:
        if not self._open:
            raise OffloadError(f"{self!r} has no open group to commit; call open_group() or group_start() first")
        self.tensor_count_current_group = 0
        return self._open.pop()

    def _group(self, index: int) -> TensorGroup:
        groups = self.chunk_groups.groups
        if not 0 <= index < len(groups):
            raise IndexError(f"{self!r} has {len(groups)} groups, there is no group {index}")
        return groups[index]
