# SPDX-License-Identifier: Apache-2.0
"""`CapturedLayers`: issues copies between the replays of CUDA graphs of parts of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import torch

from offload_engine._captured.program import Step, make_program
from offload_engine._captured.recording import Recording
from offload_engine._captured.replays import Replays
from offload_engine._captured.share import CapturedShare
from offload_engine._captured.slots import Slots
from offload_engine._devices.regions import HostRegion
from offload_engine._host.slabs import HostSlabs
from offload_engine._saved.eligibility import Eligibility
from offload_engine._saved.transfers import TransferContext
from offload_engine.config import OffloadConfig
from offload_engine.errors import OffloadError
from offload_engine.policies import LowestPeak, Planned
from offload_engine.sizes import format_bytes

logger = logging.getLogger(__name__)

_SMALLEST_SLAB = 64 << 20  # bytes


class CapturedLayers:
    """Graphs that were captured together, to be replayed in the order of their captures.

    Made by `GraphCaptures.capture_layers`. The engine keeps it until `release`.

    Args:
        context: device and copy streams.
        slabs: host memory of its own.
        config: of the engine.
        eligibility: decides which saved tensors may move.
        saves_all: tensors saved outside the groups may leave, too.
        graphs_beside: see `GraphCaptures.capture_layers`.
        release: called by `release`, once.

    Attributes:
        recording: records the captures; its groups are opened by `push` and closed by `pop`.
        before: `Replays.before`, which the graphs call; raises OffloadError while layers are captured, and once the
            memory of the graphs is released.
        after: `Replays.after`.
        slabs: its host memory.
        steps: waits and copies around the replay of each graph; empty before `complete` and after `release`.
    """

    def __init__(
        self,
        context: TransferContext,
        slabs: HostSlabs,
        config: OffloadConfig,
        eligibility: Eligibility,
        saves_all: bool,
        graphs_beside: int,
        release: Callable[[CapturedLayers], None],
    ) -> None:
        self._context = context
        self.slabs: HostSlabs = slabs
        self._is_room_required: bool = config.host_policy == "error"
        self._policy = config.policy
        self._slots = Slots(self._allocate, context.device.host_alignment, 1 + graphs_beside)
        self._num_without_room = 0
        self._freed: set[int] = set()
        self._is_complete = False
        self._is_released = False
        # Nothing stands between a graph and what it has to do: a training calls these thousands of times a step.
        self.before: Callable[[int], None] = _refuse_inside
        self.after: Callable[[int], None] = _refuse_inside
        self._release = release
        self.recording: Recording = Recording(
            eligibility, self._slots, self._lend, CapturedShare(config), saves_all, graphs_beside
        )
        self.steps: tuple[Step, ...] = ()

    def __repr__(self) -> str:
        return (
            f"<{self.num_graphs} CUDA graphs of layers: {format_bytes(self.copied_out_bytes)} are copied to the host, "
            f"and back through {format_bytes(self.slot_bytes)} on the device>"
        )

    # -- figures -----------------------------------------------------------------------------------------------------

    @property
    def num_graphs(self) -> int:
        """Return how many graphs were captured."""
        return len(self.steps)

    @property
    def are_freed(self) -> bool:
        """Return whether all graphs have been reset or freed."""
        return len(self._freed) >= self.num_graphs

    @property
    def copied_out_bytes(self) -> int:
        """Return the bytes that one pass through the graphs copies to the host."""
        return sum(region.nbytes for step in self.steps for _, region in step.copy_outs)

    @property
    def host_bytes(self) -> int:
        """Return the bytes of host memory that these graphs own."""
        return self.slabs.nbytes

    @property
    def slot_bytes(self) -> int:
        """Return the bytes of the graphs' memory that backwards read from; 0 once it is released."""
        return self._slots.nbytes

    # -- captures and replays, called by the graphs --------------------------------------------------------------------

    def prepare(self) -> int:
        """Begin the next capture, before CUDA does; return its number."""
        return self.recording.prepare()

    def begin(self) -> None:
        """Start packing, inside a capture."""
        self.recording.begin()

    def end(self) -> None:
        """Stop packing, inside a capture."""
        self.recording.end()

    def finish(self) -> None:
        """Note that CUDA has ended a capture."""
        self.recording.finish()

    def note_freed(self, number: int) -> None:
        """Note that a graph has been reset or freed."""
        self._freed.add(number)

    # -- lifetime ------------------------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Finish the captures: from now on copies run around the replays."""
        recording = self.recording
        device = self._context.device.torch_device
        self.steps = make_program(recording.uses, recording.left_before, recording.number + 1, device)
        replays = Replays(self.steps, self._context)
        self.before, self.after = replays.before, replays.after
        self._is_complete = True
        self._slots.free()
        if self.copied_out_bytes and self._policy not in (None, LowestPeak(), Planned()):
            logger.info("%r is for what runs eagerly: around replays of captured layers copies are fixed", self._policy)
        if self._num_without_room:
            logger.warning(
                "what %d captured forwards save stays on the device: the host tier had no room for it. Raise "
                "host_limit_bytes, free host memory, or offload less.",
                self._num_without_room,
            )

    def abandon(self) -> None:
        """Abandon captures after an exception: a replay of their graphs is an error from now on."""
        self._forget_program()
        self.recording.stop()
        self._slots.close()
        self.slabs.reset()
        self.slabs.close_free()

    def release(self) -> None:
        """Release the slots, and return the host memory to the engine's pool. Idempotent.

        Call it after the graphs have been reset or dropped. Blocks the host until the copies of their last pass are
        complete.

        Raises:
            OffloadError: while layers are captured.
        """
        if self._is_released:
            return
        if not self._is_complete:
            raise OffloadError("captured layers are released inside capture_layers(): leave that context first")
        self._forget_program()
        device, context = self._context.device, self._context
        for stream in (context.copy_out_stream, context.copy_in_stream):
            device.synchronize(device.record_event(stream))
        self._slots.close()
        self._release(self)

    def _forget_program(self) -> None:
        self._is_released = True
        self.before = self.after = _refuse_released
        self.steps = ()

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return self._context.device.allocate(nbytes, self._context.device.current_stream())

    def _lend(self, sizes: list[int]) -> list[HostRegion] | None:
        slabs = self.slabs
        need = sum(map(slabs.round_up, sizes))
        taken = slabs.free.take(need)
        if taken is None and slabs.grow(need, _SMALLEST_SLAB):
            taken = slabs.free.take(need)
        if taken is None:
            if self._is_room_required:
                raise OffloadError(
                    f"a captured layer needs {need:,} bytes of host memory beside the {slabs.nbytes:,} that captures "
                    "before it have. Raise host_limit_bytes, offload less, or set host_policy='keep' to leave on the "
                    "device what finds no room."
                )
            self._num_without_room += 1
            return None
        regions, offset = [], taken.start
        for nbytes in sizes:
            regions.append(HostRegion(slabs.by_index[taken.slab], offset, nbytes))
            offset += slabs.round_up(nbytes)
        return regions


def _refuse_inside(number: int) -> None:
    raise OffloadError("a CUDA graph is replayed inside capture_layers(): leave that context first")


def _refuse_released(number: int) -> None:
    raise OffloadError("a CUDA graph is replayed after the release of its memory: capture its layer again")


def eligibility_of(device: torch.device, min_bytes: int, weights: Iterable[torch.Tensor]) -> Eligibility:
    """Return the eligibility of the tensors that captures save."""
    eligibility = Eligibility(device, min_bytes)
    eligibility.begin(weights)
    return eligibility
