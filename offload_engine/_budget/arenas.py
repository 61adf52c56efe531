# SPDX-License-Identifier: Apache-2.0
"""Finds out how large an arena must be, by replays."""

from __future__ import annotations

from typing import Final, NamedTuple

from offload_engine.planning.replay import LEAD, Replay
from offload_engine.planning.segments import SPARE_SHARE, SPARE_SHARE_INEXACT, Reserved, segment_bytes, with_spare

_OTHER_LEADS: Final = (0.0, 1.0, 1.4, 2.5)
"""How far the host may be ahead in other steps of the same decision; see `LEAD`. With 0 no other stream delays a free.
(In pipelines on H200s some steps reserved a segment beside an arena that had room with `LEAD`. With one of these each
of them lacked it, too; of twelve arenas of MoE stages, two only with 0, 1 GiB each.)"""
_SHARES_TO_SPARE: Final = (SPARE_SHARE, 1 / 32, 1 / 128, 3 / 64)
"""Of an arena, in the order in which they are tried."""
_SHARES_INEXACT: Final = (SPARE_SHARE_INEXACT, 3 / 64, SPARE_SHARE, 1 / 128)
_LEAST_SHARE: Final = min(_SHARES_TO_SPARE)
_MOST_LESS: Final = 1 / 32
"""Share of the usual arena by which a smaller one is worth trying."""


class Arena(NamedTuple):
    """An arena that has an end."""

    nbytes: int
    more_bytes: int
    """That a step with it is thought to hold, beside those found with an arena without one."""


def arena_for(replay: Replay, found: Reserved, room_bytes: int, *, must_fit: bool) -> Arena:
    """Return the arena in which all blocks have room, however far ahead the host is.

    Args:
        replay: of the step.
        found: what it reserves, and uses of an arena without an end.
        room_bytes: what it may hold beside that.
        must_fit: if there is no room for it, a step is thought to hold no more than there is room for; otherwise it
            is thought to hold all the same what it would need.
    """
    usual = with_spare(found.arena_bytes, replay.spare_share)  # of which the replay has told what is reserved
    needed = {
        lead: each.arena_bytes for lead in _OTHER_LEADS if replay.has_lags and (each := replay.reserved(lead=lead))
    }
    most = max(found.arena_bytes, *needed.values(), 0)
    largest = usual + max(0, room_bytes)
    largest -= largest % segment_bytes(1)
    enough = with_spare(most, replay.spare_share)
    least = SPARE_SHARE_INEXACT if replay.has_lags else SPARE_SHARE
    if not (replay.is_exact or must_fit) and largest < with_spare(most, least):
        return Arena(largest, enough - usual)
    tried = list[Arena]()
    shares = _SHARES_TO_SPARE if replay.is_exact else _SHARES_INEXACT
    for nbytes in dict.fromkeys(min(with_spare(most, share), largest) for share in shares):
        leads = [lead for lead, need in needed.items() if need == most or need > nbytes]
        again = [replay.reserved(nbytes), *(replay.reserved(nbytes, lead) for lead in leads)]
        more = max(each.reserved_bytes for each in again if each is not None) - found.reserved_bytes
        if more <= nbytes - usual:
            return Arena(nbytes, more)
        tried.append(Arena(nbytes, more))
    best = min(tried, key=lambda each: each.more_bytes)
    if must_fit:
        return best._replace(more_bytes=best.nbytes - usual)
    return best if enough <= largest else best._replace(more_bytes=enough - usual)


def tight_arena(replay: Replay, found: Reserved, over_bytes: int) -> Arena | None:
    """Return an arena that is smaller than the usual one, if all blocks have room in it; else None.

    They must have room in one that is smaller still, so that some of it is spare. That may be less than is used of an
    arena without an end: blocks there are placed as if nothing were scarce. Where the host's lead matters, there is no
    such arena: other steps have other leads. (Beside one with a 64th to spare a step on H200s reserved 448 MiB.)

    Args:
        replay: of the step.
        found: what it reserves, and uses of an arena without an end.
        over_bytes: by how much it is to be smaller.
    """
    usual = with_spare(found.arena_bytes, replay.spare_share)
    nbytes = usual - segment_bytes(over_bytes)
    if replay.has_lags or nbytes < (1 - (_MOST_LESS if replay.is_exact else SPARE_SHARE)) * usual:
        return None
    least = segment_bytes(round(nbytes / (1 + (_LEAST_SHARE if replay.is_exact else SPARE_SHARE))))
    for size, lead in [(least, LEAD), (nbytes, LEAD)] if replay.is_exact else [(least, 0.0)]:
        again = replay.reserved(size, lead)
        if again is None or again.reserved_bytes - found.reserved_bytes > size - usual:
            return None
    return Arena(nbytes, nbytes - usual)
