# SPDX-License-Identifier: Apache-2.0
"""`BackwardWindow`: lists the chunks whose groups may be copied in now, in the order of backward."""

from __future__ import annotations

from collections.abc import Sequence

from offload_engine._chunk.progress import ChunkProgress
from offload_engine.schedule import Action, ChunkKey


class BackwardWindow:
    """Predicts which backward comes next.

    Only chunks whose backward comes before the next forward may be copied in; those needed after that forward stay on
    host while it runs. Without a schedule, backwards are predicted in reverse order of the forwards, and a forward that
    begins in between ends the prediction.

    Attributes:
        backward_chunk: the chunk whose backward began last; None once a forward has begun since.
        has_schedule: whether the actions of this iteration are known.
        is_combined: see `Policy.begin`.
    """

    def __init__(self) -> None:
        self.backward_chunk: ChunkProgress | None = None
        self.has_schedule: bool = False
        self.is_combined: bool = False
        self._actions: Sequence[Action] = ()
        self._positions: dict[Action, int] = {}
        self._chunks: dict[ChunkKey, ChunkProgress] = {}  # chunks whose backward has not begun
        self._window: list[ChunkProgress] = []  # soonest first

    def begin(self, actions: Sequence[Action], is_combined: bool) -> None:
        """Start an iteration; see `Policy.begin`."""
        self.clear()
        self.has_schedule = bool(actions)
        self._actions = actions
        self.is_combined = is_combined
        self._positions = {action: i for i, action in enumerate(actions)}

    def clear(self) -> None:
        """Forget all chunks."""
        self.backward_chunk, self.has_schedule = None, False
        self._actions, self._positions = (), {}
        self._chunks, self._window = {}, []

    def begin_forward(self, chunk: ChunkProgress) -> bool:
        """Add a chunk whose forward begins.

        Returns:
            True if a backward was predicted to come first; it may come late, or never.
        """
        for other in self._chunks.values():
            other.end_forward(self.is_combined)
        was_wrong = not self.has_schedule and self.backward_chunk is not None
        if was_wrong:
            self._chunks.clear()
        self._chunks.pop(chunk.key, None)  # a reused key moves to the end of the order
        self._chunks[chunk.key] = chunk
        self.backward_chunk = None
        self._window = self._upcoming(Action("F", chunk.key))
        return was_wrong

    def begin_backward(self, chunk: ChunkProgress) -> None:
        """Make the chunk whose backward begins the first one. Idempotent."""
        if chunk is self.backward_chunk:
            return
        chunk.end_forward(self.is_combined)
        if self.is_combined and self.backward_chunk is not None:
            for other in self._chunks.values():  # the forward was combined with the backward before this one
                other.end_forward(self.is_combined)
        self.backward_chunk = chunk
        self._chunks.pop(chunk.key, None)
        following = self._upcoming(Action("B", chunk.key))
        self._window = [chunk, *(following if self.has_schedule else reversed(self._chunks.values()))]

    def next_chunk(self) -> ChunkProgress | None:
        """Return the chunk to prefetch from; None if nothing is left."""
        window = self._window
        while window:
            if window[0].prefetch_index >= 0:
                return window[0]
            window.pop(0)
        return None

    def is_next(self, chunk: ChunkProgress) -> bool:
        """Return whether the backward of `chunk`, whose forward runs, follows at once."""
        if not self.has_schedule:
            return True
        position = self._positions.get(Action("F", chunk.key), len(self._actions)) + 1
        return position < len(self._actions) and self._actions[position] == Action("B", chunk.key)

    def _upcoming(self, action: Action) -> list[ChunkProgress]:
        """Return the chunks whose backward comes after `action` and before any other forward, soonest first.

        A forward that runs together with the next backward does not count as coming before it.
        """
        chunks: list[ChunkProgress] = []
        num_forwards_to_pass = int(self.is_combined)
        for following in self._actions[self._positions.get(action, len(self._actions)) + 1 :]:
            chunk = self._chunks.get(following.chunk)
            if following.kind == "F" and num_forwards_to_pass:
                num_forwards_to_pass -= 1
                continue
            if following.kind == "F" or chunk is None or not chunk.is_forward_done:
                break
            chunks.append(chunk)
        return chunks
