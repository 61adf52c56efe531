# SPDX-License-Identifier: Apache-2.0
"""`GroupTraits`: facts about a group that are known when it opens."""

from __future__ import annotations

from typing import NamedTuple


class GroupTraits(NamedTuple):
    """Facts about one group by which policies decide. Set when the group opens; they never change."""

    keep: bool = False
    """The backward of the group comes at once, so it stays on the device. `ChunkOffloadHandler.offload_kept_groups`
    reverts this."""
    layer: int = -1
    """Layer of the chunk that the group belongs to, from 0; -1 if layers are not known."""
    read_once: bool = False
    """Each backward reads its tensors once and drops them, as a recomputation does with its inputs. Their device memory
    is then freed when the reader drops it, and their host memory is kept for a second backward."""
    may_delay: bool = False
    """Its copy-out may be issued after its commit, at `ChunkOffloadHandler.note_launch`."""
    min_bytes: int = 0
    """Its storages below this size stay on the device, as do those below `OffloadConfig.min_tensor_bytes`."""
