# SPDX-License-Identifier: Apache-2.0
"""`Recording`: records what the captures of several graphs save and read, in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from offload_engine._captured.program import Use
from offload_engine._captured.saves import BroughtBack, CapturedStorage, CapturedTensor
from offload_engine._captured.share import CapturedShare
from offload_engine._captured.slots import Slots
from offload_engine._compat import torch_private
from offload_engine._compat.own_hooks import are_innermost
from offload_engine._devices.regions import HostRegion
from offload_engine._saved.eligibility import Eligibility
from offload_engine._saved.handles import StayingTensor
from offload_engine._saved.quantized import PLAIN_TYPES, taken_apart
from offload_engine.errors import OffloadError

_MODIFIED = "a tensor that a captured forward saved for its backward has been modified by an inplace operation"

Lend = Callable[[list[int]], "list[HostRegion] | None"]


class _Leaving(NamedTuple):
    """Storages of one capture that leave together, and their host regions."""

    number: int
    storages: list[CapturedStorage]
    regions: list[HostRegion]


class CapturedGroup:
    """Packs what one module saves in a capture. Made by `Recording.group`."""

    def __init__(self, recording: Recording, min_bytes: int) -> None:
        self._recording = recording
        self._min_bytes = min_bytes

    def push(self) -> None:
        """Begin the group, or resume it."""
        self._recording.push(self._min_bytes)

    def pop(self) -> None:
        """End the group, or pause it."""
        self._recording.pop()


class Recording:
    """Numbers captures, and packs the tensors they save.

    A storage stays in the memory of the graphs during the captures that overlap its copy-out. Then it is released, so
    later captures use the same bytes, and its backward reads it at another address.

    Args:
        eligibility: decides which saved tensors may move.
        slots: device memory from which backwards read storages that have left.
        lend: returns host memory for storages of these sizes, or None.
        share: decides whether the storages of a forward stay.
        saves_all: tensors saved outside the groups may leave, too.
        graphs_beside: number of graphs that overlap a copy-out.

    Attributes:
        number: number of the running or last capture.
        is_capturing: whether a capture is running.
        uses: reads of storages that have left.
        left_before: maps each capture whose storages have left to the capture before which they did.
    """

    def __init__(
        self,
        eligibility: Eligibility,
        slots: Slots,
        lend: Lend,
        share: CapturedShare,
        saves_all: bool,
        graphs_beside: int,
    ) -> None:
        self.number: int = -1
        self.is_capturing: bool = False
        self.uses: list[Use] = []
        self.left_before: dict[int, int] = {}
        self._eligibility = eligibility
        self._slots = slots
        self._lend = lend
        self._share = share
        self._saves_all = saves_all
        self._graphs_beside = graphs_beside
        self._is_begun = False
        self._kept: dict[int, dict[int, CapturedStorage]] = {}  # by capture, then by storage
        self._groups: list[int] = []  # of each open group, the size below which storages stay
        self._brought_back: dict[CapturedStorage, BroughtBack] = {}  # by the running capture
        self._leaving: list[_Leaving] = []  # to be released at the first save or read of the running capture
        self._away: list[_Leaving] = []
        # Host memory whose backwards have been captured, by its sizes, with the first capture that may use it again.
        self._returned: dict[tuple[int, ...], list[tuple[int, list[HostRegion]]]] = {}

    # -- captures ----------------------------------------------------------------------------------------------------

    def prepare(self) -> int:
        """Begin the next capture, before CUDA does; return its number.

        Raises:
            OffloadError: if CUDA has not ended the one before.
        """
        if self._is_begun:
            raise OffloadError("a capture of layers was interrupted: start over, in a new capture_layers()")
        self._is_begun = True
        self.number += 1
        self._return_regions()
        for number in [number for number in self._kept if number + self._graphs_beside < self.number]:
            self._find_leaving(number)
        return self.number

    def begin(self) -> None:
        """Start packing, inside the capture."""
        self._kept[self.number] = {}
        torch_private.push_hooks(self.pack_ungrouped, self.unpack)
        self.is_capturing = True  # last: after an interrupt in between, `end` must not pop hooks of others

    def end(self) -> None:
        """Stop packing, inside the capture, and make room for what later captures read."""
        self.stop()
        self._brought_back.clear()
        self._slots.end_capture(self.number)

    def stop(self) -> None:
        """Stop packing, and end all open groups. No-op outside a capture."""
        if self.is_capturing:
            while self._groups:
                self.pop()
            torch_private.pop_hooks()
            self.is_capturing = False
        for leaving in self._leaving:  # the capture saved and read nothing
            self._keep(leaving)
        self._leaving.clear()

    def finish(self) -> None:
        """Note that CUDA has ended the capture."""
        self._is_begun = False

    # -- tensors -----------------------------------------------------------------------------------------------------

    def group(self, min_bytes: int = 0) -> CapturedGroup:
        """Return a group: storages of at least `min_bytes` that are saved between its `push` and `pop` may leave."""
        return CapturedGroup(self, min_bytes)

    def push(self, min_bytes: int) -> None:
        """Begin a group."""
        self._groups.append(min_bytes)
        torch_private.push_hooks(self.pack, self.unpack)

    def pop(self) -> None:
        """End the innermost group. No-op if none is open, because the capture ended before the group."""
        if self._groups:
            self._groups.pop()
            torch_private.pop_hooks()

    def add_to_group(self, tensors: Iterable[torch.Tensor], min_bytes: int = 0) -> None:
        """Let storages of at least `min_bytes` leave that the running capture has saved outside the groups."""
        for tensor in tensors:
            saved = self._kept[self.number].get(tensor.untyped_storage()._cdata)
            if saved is not None and saved.nbytes >= min_bytes:
                saved.is_grouped = True

    def are_innermost(self) -> bool:
        """Return whether these hooks are the innermost: False inside a checkpoint of torch, for instance."""
        return are_innermost(self.unpack)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Pack a tensor that a group saves; return what autograd keeps."""
        return self._pack(tensor, self.pack, is_grouped=True)

    def pack_ungrouped(self, tensor: torch.Tensor) -> Any:
        """Pack a tensor that is saved outside the groups; return what autograd keeps."""
        return self._pack(tensor, self.pack_ungrouped, is_grouped=self._saves_all)

    def _pack(self, tensor: torch.Tensor, pack: Callable[[torch.Tensor], Any], is_grouped: bool) -> Any:
        if type(tensor) not in PLAIN_TYPES and (parts := taken_apart(tensor, pack, self.unpack)) is not None:
            return parts
        found = self._eligibility.read_movable(tensor)
        if found is None or found[7]:
            return StayingTensor(self._eligibility.staying(tensor))
        self._release_leaving()
        if torch_private.current_graph_task() < 0:  # not what a backward computes again
            self._free_slots()
        storages = self._kept[self.number]
        saved = storages.get(found[1])
        if saved is None or not saved.handles:  # without handles: an earlier storage had the same identity
            saved = storages[found[1]] = CapturedStorage(self.number, found)
        saved.is_grouped |= is_grouped and saved.nbytes >= (self._groups[-1] if self._groups else 0)
        return CapturedTensor(tensor, found, saved)

    def unpack(self, packed: Any) -> torch.Tensor:
        """Return the tensor that a handle stands for, in the memory from which the running capture reads it.

        Raises:
            OffloadError: outside a capture, if its bytes have left.
            RuntimeError: if it was written in place after it was saved, or by another backward of this capture.
        """
        if not isinstance(packed, CapturedTensor):
            tensor: torch.Tensor = packed.unpack()
            return tensor
        if packed.is_modified:
            raise RuntimeError(_MODIFIED)
        self._release_leaving(packed.saved)
        return self._bring_back(packed) if packed.tensor is None else packed.tensor

    def _bring_back(self, packed: CapturedTensor) -> torch.Tensor:
        if not self.is_capturing:
            raise OffloadError("the backward of a captured forward runs outside a capture: capture it, too")
        saved = packed.saved
        found = self._brought_back.get(saved)
        if found is None:
            storage, after = self._slots.take(saved.nbytes, saved.offset)  # laid out as on host, for one copy of all
            found = self._brought_back[saved] = BroughtBack(storage)
            self.uses.append(Use(saved, self.number, after, storage.data_ptr()))
        if found.is_overwritten(packed.place):
            raise RuntimeError(_MODIFIED)
        return found.view(packed.place)

    # -- storages that leave -----------------------------------------------------------------------------------------

    def _find_leaving(self, number: int) -> None:
        """Choose the saved storages of a capture that leave, and their host regions.

        Call it between captures: inside one no memory can be pinned.
        """
        storages = list(self._kept.pop(number).values())
        leaving = [saved for saved in storages if saved.may_leave()]
        if self._share.stays(leaving):
            return
        sizes = [saved.nbytes for saved in leaving]
        regions = self._regions(sizes, number) if leaving else None
        if regions is not None:
            self._leaving.append(_Leaving(number, leaving, regions))
            self._slots.reserve(self._slots.size_of(sizes))

    def _release_leaving(self, read: CapturedStorage | None = None) -> None:
        """Release the storages that leave, at the first save or read of a capture.

        Args:
            read: the storage that is read. If its own capture is among those that leave, that one stays: no graph would
                run beside the copies out and back.
        """
        for leaving in self._leaving:
            if read is not None and read.number == leaving.number:
                self._keep(leaving)
                self._free_slots()
                continue
            pairs = zip(leaving.storages, leaving.regions, strict=True)
            left = [
                saved for saved, region in pairs if saved.release(region, region.offset - leaving.regions[0].offset)
            ]
            self.left_before[leaving.number] = self.number
            self._share.note_left(left)
            self._away.append(leaving._replace(storages=left))
        self._leaving.clear()

    def _free_slots(self) -> None:
        """Let a capture that reads nothing which has left use the bytes of the slots, as if they were not there.

        Not where copies run beside graphs: slots would be filled later.
        """
        if not self._graphs_beside:
            self._slots.free()

    def _keep(self, leaving: _Leaving) -> None:
        self._kept[leaving.number] = {saved.key: saved for saved in leaving.storages}
        self._return(leaving, leaving.number)

    def _regions(self, sizes: list[int], number: int) -> list[HostRegion] | None:
        """Return host memory that is unused from the replay of the forward `number` to that of its backward."""
        returned = self._returned.get(tuple(sizes), [])
        for found in returned:
            if found[0] <= number:
                returned.remove(found)
                return found[1]
        return self._lend(sizes)

    def _return_regions(self) -> None:
        for leaving in [one for one in self._away if not any(saved.handles for saved in one.storages)]:
            self._away.remove(leaving)
            self._return(leaving, self.number)

    def _return(self, leaving: _Leaving, since: int) -> None:
        sizes = tuple(region.nbytes for region in leaving.regions)
        self._returned.setdefault(sizes, []).append((since, leaving.regions))
